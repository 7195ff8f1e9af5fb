"""Expert parallel peers: handwritten all_to_alls with DDP, and DTensor over the plain model."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from moe import MoE, top2
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel
from trainer import Job, Trainer, own_rows

from peers.data import settle
from peers.tensor import distribute, over_dtensors


class Exchange(torch.autograd.Function):
    """An all_to_all of equal pieces along dim 0, which also exchanges gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """The received pieces, by sender."""
        return exchanged(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """The gradients, returned to the senders."""
        return exchanged(grad)


def exchanged(x: Tensor) -> Tensor:
    """The pieces that an all_to_all receives."""
    x = x.contiguous()
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x)
    return received


class CutMoE(nn.Module):
    """This rank's experts, applied to the tokens of all ranks: ``[group / ranks, token, width]`` in and out."""

    def __init__(self, moe: MoE, ranks: int) -> None:
        super().__init__()
        self.gate, self.ranks = moe.gate, ranks
        self.experts, self.capacity_factor = len(moe.up), moe.capacity_factor
        self.up, self.down = (
            nn.Parameter(x.detach().chunk(ranks)[dist.get_rank()].clone()) for x in (moe.up, moe.down)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Send tokens to their experts and the results back."""
        combine = top2(self.gate(x).softmax(-1), int(2 * self.capacity_factor * x.shape[1] / self.experts))
        sent = torch.einsum("gsec,gsm->egcm", (combine > 0).to(x.dtype), x)
        local = Exchange.apply(sent).unflatten(0, (self.ranks, -1)).transpose(0, 1)  # [own expert, rank, group, ...]
        done = torch.einsum("ehm,eprch->eprcm", self.down, torch.einsum("emh,eprcm->eprch", self.up, local).relu())
        back = Exchange.apply(done.transpose(0, 1).flatten(0, 1))
        return torch.einsum("gsec,egcm->gsm", combine, back)


def dtensor_weights(model: Any, job: Job) -> Trainer:
    """The plain model over DTensors: experts and batch rows are cut, all else is replicated."""
    mesh = job.mesh("ep")
    experts = [(block.mlp.up, block.mlp.down) for block in model.blocks if isinstance(block.mlp, MoE)]
    is_cut = {id(parameter) for pair in experts for parameter in pair}
    distribute(model, mesh, lambda name, parameter: Shard(0) if id(parameter) in is_cut else Replicate())

    def cut(ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        one, other = (DTensor.from_local(x, mesh, [Shard(0)], run_check=False) for x in own_rows(ids, targets))
        return one, other

    def reduce() -> None:
        for parameter in model.parameters():
            parameter.grad = parameter.grad.redistribute(placements=parameter.placements)

    return Trainer(model, job.adamw(model.parameters()), cut, over_dtensors, after_backward=reduce)


def by_hand(model: Any, job: Job) -> Trainer:
    """DDP for all parameters but the experts, whose gradients already come from the tokens of all ranks."""
    experts: list[nn.Parameter] = []
    for block in model.blocks:
        if isinstance(block.mlp, MoE):
            block.mlp = CutMoE(block.mlp, job.ranks)
            experts += (block.mlp.up, block.mlp.down)
    own = [name for name, parameter in model.named_parameters() if any(parameter is expert for expert in experts)]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, own)
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)

    def average() -> None:
        torch._foreach_div_([expert.grad for expert in experts if expert.grad is not None], job.ranks)

    return Trainer(parallel, job.adamw(model.parameters()), own_rows, after_backward=average, settle=settle(parallel))
