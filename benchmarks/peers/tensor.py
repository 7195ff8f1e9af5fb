"""Tensor parallel peers: handwritten f and g of Megatron, and DTensor's plans."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from gpt import GPT
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from trainer import Job, Trainer

# By hand.


class Enter(torch.autograd.Function):
    """Megatron's f: the identity; its gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """The input unchanged."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """The sum of the gradients."""
        return summed(grad)


class Leave(torch.autograd.Function):
    """Megatron's g: the sum over the ranks; its gradient is passed on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """The sum of the inputs."""
        return summed(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """The gradient unchanged."""
        return grad


def summed(x: Tensor) -> Tensor:
    """The sum over the ranks, in place."""
    x = x.contiguous()
    dist.all_reduce(x)
    return x


class RowLinear(nn.Module):
    """A linear layer cut on its inputs."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = own_piece(linear.weight, 1)
        assert linear.bias is not None
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in / ranks]`` to ``[..., out]``."""
        return Leave.apply(F.linear(x, self.weight)) + self.bias


class Entered(nn.Module):
    """A module whose input passes f."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        """The output of the module."""
        return self.module(Enter.apply(x))


class CutEmbedding(nn.Module):
    """An embedding cut on the vocabulary."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.weight = own_piece(embedding.weight, 0)
        self.first = dist.get_rank() * len(self.weight)

    def forward(self, ids: Tensor) -> Tensor:
        """The sum of all ranks' rows, where a rank has zeros for rows that it does not hold."""
        local = ids - self.first
        is_other = (local < 0) | (local >= len(self.weight))
        rows = F.embedding(local.masked_fill(is_other, 0), self.weight)
        return Leave.apply(rows.masked_fill(is_other[..., None], 0))


class CutCrossEntropy(torch.autograd.Function):
    """The mean cross entropy of logits ``[tokens, vocab / ranks]``: three small reductions (Megatron-LM)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        """The loss."""
        top = logits.amax(-1)
        dist.all_reduce(top, dist.ReduceOp.MAX)
        logits = logits - top[:, None]
        local = targets - dist.get_rank() * logits.shape[1]
        is_other = (local < 0) | (local >= logits.shape[1])
        local = local.masked_fill(is_other, 0)
        picked = logits.gather(1, local[:, None])[:, 0].masked_fill(is_other, 0)
        dist.all_reduce(picked)
        odds = logits.exp_()
        total = odds.sum(-1)
        dist.all_reduce(total)
        ctx.save_for_backward(odds.div_(total[:, None]), local, is_other)
        return (total.log() - picked).mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """The gradient of the logits: odds, less one at the target."""
        odds, local, is_other = ctx.saved_tensors
        odds.scatter_add_(1, local[:, None], -(~is_other).to(odds.dtype)[:, None])
        return odds.mul_(grad / len(odds)), None


class CutGPT(nn.Module):
    """A GPT cut as Megatron cuts it, with head and loss cut over the vocabulary."""

    def __init__(self, gpt: GPT, ranks: int) -> None:
        super().__init__()
        self.gpt = gpt
        self.gpt.tokens = CutEmbedding(gpt.tokens)  # type: ignore[assignment]
        for block in gpt.blocks:
            attn, mlp = _parts(block)
            for linear in (attn.q, attn.k, attn.v, mlp.up):
                linear.weight, linear.bias = own_piece(linear.weight, 0), own_piece(linear.bias, 0)
            attn.heads //= ranks
            attn.proj, mlp.down = RowLinear(attn.proj), RowLinear(mlp.down)
            block.attn, block.mlp = Entered(attn), Entered(mlp)
        gpt.head.weight = own_piece(gpt.head.weight, 0)
        gpt.norm = nn.Sequential(gpt.norm, Entered(nn.Identity()))  # type: ignore[assignment]

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """The mean cross entropy."""
        return CutCrossEntropy.apply(self.gpt(ids).flatten(0, 1), targets.flatten())


def _parts(block: Any) -> tuple[Any, Any]:
    return block.attn, block.mlp


def own_piece(x: Tensor, dim: int) -> nn.Parameter:
    """This rank's piece of a parameter."""
    piece = x.detach().chunk(dist.get_world_size(), dim)[dist.get_rank()]
    return nn.Parameter(piece.clone(memory_format=torch.contiguous_format))


def by_hand(model: Any, job: Job) -> Trainer:
    """Megatron by hand: two all_reduces in forward and two in backward for each block."""
    assert isinstance(model, GPT)
    cut = CutGPT(model, job.ranks)
    return Trainer(cut, job.adamw(cut.parameters()))


def by_hand_compiled(model: Any, job: Job) -> Trainer:
    """Megatron by hand, compiled by Inductor."""
    trainer = by_hand(model, job)
    trainer.model = torch.compile(trainer.model)
    return trainer


# DTensor.


def dtensor_plan(model: Any, job: Job) -> Trainer:
    """DTensor by ``parallelize_module``, with a cut vocabulary and ``loss_parallel``."""
    block_plan: dict[str, ParallelStyle] = {
        **{f"attn.{name}": ColwiseParallel() for name in "qkv"},
        "attn.proj": RowwiseParallel(),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(),
    }
    ends: dict[str, ParallelStyle] = {
        "tokens": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    return _planned(model, job, block_plan, ends)


def dtensor_plan_compiled(model: Any, job: Job) -> Trainer:
    """DTensor's plan with each block compiled by Inductor."""
    trainer = dtensor_plan(model, job)
    for block in model.blocks:
        block.compile()
    return trainer


def dtensor_sequence_plan(model: Any, job: Job) -> Trainer:
    """DTensor's plan of tensor and sequence parallelism: tokens are cut between blocks."""
    block_plan: dict[str, ParallelStyle] = {
        "norm1": SequenceParallel(),
        "norm2": SequenceParallel(),
        "attn": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        **{f"attn.{name}": ColwiseParallel() for name in "qkv"},
        "attn.proj": RowwiseParallel(output_layouts=Shard(1)),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
    }
    ends: dict[str, ParallelStyle] = {
        "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "positions": PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(0)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    return _planned(model, job, block_plan, ends)


def _planned(model: Any, job: Job, block_plan: dict[str, ParallelStyle], ends: dict[str, ParallelStyle]) -> Trainer:
    mesh = job.mesh("tp")
    for block in model.blocks:
        parallelize_module(block, mesh, block_plan)
        block.attn.heads //= job.ranks
    parallelize_module(model, mesh, ends)
    return Trainer(model, job.adamw(model.parameters()), around=loss_parallel)


def dtensor_weights(model: Any, job: Job) -> Trainer:
    """The plain model with cut weights and replicated inputs, all as DTensors."""
    mesh = job.mesh("tp")
    cuts = {"proj.weight": 1, "down.weight": 1, "tokens.weight": 0, "head.weight": 0}
    cuts |= {f"{name}.{kind}": 0 for name in ("q", "k", "v", "up") for kind in ("weight", "bias")}

    def placement(name: str, _: Tensor) -> Placement:
        dim = cuts.get(".".join(name.split(".")[-2:]))
        return Replicate() if dim is None else Shard(dim)

    distribute(model, mesh, placement)

    def replicated(ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        one, other = (DTensor.from_local(x, mesh, [Replicate()], run_check=False) for x in (ids, targets))
        return one, other

    return Trainer(model, job.adamw(model.parameters()), replicated, over_dtensors)


def distribute(model: nn.Module, mesh: DeviceMesh, placement: Callable[[str, Tensor], Placement]) -> None:
    """Make every parameter a DTensor with the placement that its name and value give."""
    for name, parameter in list(model.named_parameters()):
        value = distribute_tensor(parameter.detach(), mesh, [placement(name, parameter)])
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, nn.Parameter(value))


@contextmanager
def over_dtensors() -> Iterator[None]:
    """Treat plain tensors as replicated DTensors. Attention is not fused: DTensor has no rule for the CPU's kernel."""
    with implicit_replication(), sdpa_kernel(SDPBackend.MATH):
        yield
