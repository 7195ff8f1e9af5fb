"""Ways in which users read tensors: each reading is a function of a tensor and a plain tensor of the same shape.

The expected answer of a reading is its result for the whole tensor on one device.
"""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional

Reading = Callable[[Tensor, Tensor], Any]


def saved(x: Tensor, _: Tensor) -> Tensor:
    """The tensor after ``torch.save`` and ``torch.load``."""
    buffer = io.BytesIO()
    torch.save(x.detach(), buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def masked(x: Tensor, _: Tensor) -> Tensor:
    y = x.detach().clone()
    y[y > 0] = 7.0
    return y


def assigned(x: Tensor, mate: Tensor) -> Tensor:
    y = x.detach().clone()
    y[0] = mate[1]
    y[:, 1:3] = 5.0
    return y


def written_through_a_view(x: Tensor, _: Tensor) -> Tensor:
    y = x.detach().clone()
    y[0].zero_()
    y.t()[1].fill_(3.0)
    y.view(-1)[2:5].add_(1.0)
    return y


def through_data(x: Tensor, mate: Tensor) -> Tensor:
    y = x.detach().clone()
    y.data = mate * 2
    y.data.add_(1)
    return y


def derivative(loss: Callable[[Tensor, Tensor], Tensor]) -> Reading:
    """A reading of the gradient of a loss."""

    def read(x: Tensor, mate: Tensor) -> Tensor:
        y = x.detach().clone().requires_grad_()
        loss(y, mate).backward()
        assert y.grad is not None
        return y.grad

    return read


def plain_derivative(x: Tensor, mate: Tensor) -> Tensor:
    """The gradient of a plain tensor that is multiplied by ``x``."""
    weight = mate.clone().requires_grad_()
    (x.detach() * weight).sum().backward()
    assert weight.grad is not None
    return weight.grad


def classes(x: Tensor) -> Tensor:
    return torch.arange(x.shape[0]) % x.shape[-1]


def random_in_place(x: Tensor, _: Tensor) -> Tensor:
    torch.manual_seed(3)
    return x.detach().clone().normal_()


def dropped(x: Tensor, _: Tensor) -> Tensor:
    torch.manual_seed(3)
    return functional.dropout(x.detach(), 0.5)


def averaged(x: Tensor, mate: Tensor) -> Tensor:
    y = x.detach().clone()
    return y.mul_(0.9).add_(mate, alpha=0.1)


READINGS: Mapping[str, Reading] = {
    "sum.item": lambda x, _: x.sum().item(),
    "float(mean)": lambda x, _: float(x.mean()),
    "float(norm)": lambda x, _: float(x.norm()),
    "norm(1)": lambda x, _: x.norm(1).item(),
    "norm(inf)": lambda x, _: x.norm(math.inf).item(),
    "torch.linalg.vector_norm": lambda x, _: torch.linalg.vector_norm(x).item(),
    "torch.norm": lambda x, _: torch.norm(x.detach()).tolist(),
    "norm of rows": lambda x, _: x.norm(dim=1).tolist(),
    "norm of columns": lambda x, _: x.norm(dim=0).tolist(),
    "max": lambda x, _: x.max().item(),
    "min": lambda x, _: x.min().item(),
    "amax": lambda x, _: x.amax().item(),
    "amin of columns": lambda x, _: x.amin(0).tolist(),
    "aminmax": lambda x, _: [each.item() for each in torch.aminmax(x)],
    "abs.max": lambda x, _: x.abs().max().item(),
    "max of rows": lambda x, _: [each.tolist() for each in x.max(1)],
    "max of columns": lambda x, _: [each.tolist() for each in x.max(0)],
    "int(argmax)": lambda x, _: int(x.argmax()),
    "argmax of rows": lambda x, _: x.argmax(-1).tolist(),
    "argmin of columns": lambda x, _: x.argmin(0).tolist(),
    "sort of rows": lambda x, _: x.sort(1).values.tolist(),
    "sort of columns": lambda x, _: x.sort(0).indices.tolist(),
    "argsort": lambda x, _: x.flatten().argsort().tolist(),
    "topk": lambda x, _: x.topk(2, dim=-1).values.tolist(),
    "topk of all": lambda x, _: x.flatten().topk(5).indices.tolist(),
    "kthvalue": lambda x, _: x.flatten().kthvalue(4).values.item(),
    "unique": lambda x, _: x.detach().round().unique().tolist(),
    "median": lambda x, _: x.median().item(),
    "quantile": lambda x, _: x.quantile(0.3).item(),
    "std": lambda x, _: x.std().item(),
    "var of rows": lambda x, _: x.var(1).tolist(),
    "mean of columns": lambda x, _: x.mean(0).tolist(),
    "sum of rows": lambda x, _: x.sum(-1).tolist(),
    "sum of both": lambda x, _: x.sum((0, 1), keepdim=True).tolist(),
    "prod": lambda x, _: (1 + x / 10).prod().item(),
    "cumsum": lambda x, _: x.cumsum(0).tolist(),
    "logsumexp": lambda x, _: x.logsumexp(0).tolist(),
    "softmax": lambda x, _: x.softmax(0).tolist(),
    "histc": lambda x, _: x.detach().histc(4).tolist(),
    "count_nonzero": lambda x, _: x.count_nonzero().item(),
    "bool((x > 0).any())": lambda x, _: bool((x > 1.5).any()),
    "(x > 0).all()": lambda x, _: (x > -9).all().item(),
    "(x > 0).sum()": lambda x, _: (x > 0).sum().item(),
    "isnan().any()": lambda x, _: x.isnan().any().item(),
    "isfinite().all()": lambda x, _: bool(torch.isfinite(x).all()),
    "if x.isinf().any()": lambda x, _: "bad" if x.isinf().any() else "good",
    "bool(x)": lambda x, _: bool(x),
    "float(x)": lambda x, _: float(x),
    "item": lambda x, _: x.item(),
    "item of an element": lambda x, _: x[0, 1].item(),
    "float of the last": lambda x, _: float(x[-1, -1]),
    "int of a sum": lambda x, _: int(x.sum()),
    "tolist": lambda x, _: x.tolist(),
    "numpy": lambda x, _: x.detach().numpy(),
    "cpu().numpy()": lambda x, _: x.detach().cpu().numpy(),
    "numpy(force=True)": lambda x, _: x.numpy(force=True),
    "np.asarray": lambda x, _: np.asarray(x.detach()),
    "np.array of rows": lambda x, _: np.array([float(row.sum()) for row in x.detach()]),
    "np.mean": lambda x, _: float(np.mean(x.detach().numpy())),
    "format of a sum": lambda x, _: f"{x.sum():.6f}",
    "format of an element": lambda x, _: f"{x[0, 0].detach():.4f} {(x > 0).sum()}",
    "%-format": lambda x, _: "%.5f" % x.sum(),  # noqa: UP031
    "print of a sum": lambda x, _: str(x.detach().sum()),
    "round": lambda x, _: round(x.sum().item(), 4),
    "== plain": lambda x, mate: (x == mate).tolist(),
    "plain ==": lambda x, mate: (mate == x).tolist(),
    "(x == x).all()": lambda x, _: bool((x == x).all()),
    "(x == plain).all()": lambda x, mate: bool((x == mate).all()),
    "x + plain": lambda x, mate: (x + mate).tolist(),
    "plain - x": lambda x, mate: (mate - x).sum().item(),
    "x * plain row": lambda x, mate: (x * mate[0]).tolist(),
    "x * plain column": lambda x, mate: (x * mate[:, :1]).sum().item(),
    "x * plain of one": lambda x, mate: (x * mate[:1, :1]).tolist(),
    "x @ plain": lambda x, mate: (x @ mate.t()).tolist(),
    "plain @ x": lambda x, mate: (mate.t() @ x).tolist(),
    "x - its max": lambda x, _: (x - x.max(0).values).sum().item(),
    "x / norm": lambda x, _: (x / x.norm()).tolist(),
    "normalize": lambda x, _: functional.normalize(x, dim=0).tolist(),
    "number / x": lambda x, _: (1.0 / (x + 9)).sum().item(),
    "torch.equal": lambda x, mate: (torch.equal(x, mate), torch.equal(mate, x), torch.equal(x, x.clone())),
    "allclose": lambda x, mate: (torch.allclose(x, mate), torch.allclose(x, x + 1e-12)),
    "assert_close": lambda x, mate: torch.testing.assert_close(x.detach(), x.detach().clone()),
    "len": lambda x, _: (len(x), x.shape, x.numel(), x.dim(), x.size(0), x.nelement()),
    "iteration": lambda x, _: [row.sum().item() for row in x],
    "x[0]": lambda x, _: x[0].tolist(),
    "x[-1]": lambda x, _: x[-1].tolist(),
    "x[1:, 2:]": lambda x, _: x[1:, 2:].tolist(),
    "x[..., None]": lambda x, _: x[..., None].sum(0).tolist(),
    "x[mask]": lambda x, _: x[x > 0].tolist(),
    "x[plain mask]": lambda x, mate: x[mate > 0].tolist(),
    "x[indices]": lambda x, _: x[torch.tensor([2, 0])].tolist(),
    "plain[x > 0]": lambda x, mate: mate[x > 0].tolist(),
    "gather": lambda x, _: x.gather(1, classes(x)[:, None]).tolist(),
    "nonzero": lambda x, _: (x > 0).nonzero().tolist(),
    "torch.where": lambda x, mate: torch.where(x > 0, x, mate).tolist(),
    "clamp": lambda x, _: x.clamp(-0.5, 0.5).sum().item(),
    "masked_fill": lambda x, mate: x.masked_fill(mate > 0, 0.0).tolist(),
    "flip": lambda x, _: x.flip(0).tolist(),
    "roll": lambda x, _: x.roll(1, 0).tolist(),
    "chunk": lambda x, _: [each.sum().item() for each in x.chunk(2)],
    "split": lambda x, _: [each.tolist() for each in x.split(2)],
    "unbind": lambda x, _: [each.tolist() for each in x.unbind(1)],
    "reshape": lambda x, _: x.reshape(2, -1).tolist() if x.numel() % 2 == 0 else None,
    "flatten": lambda x, _: x.flatten().tolist(),
    "t": lambda x, _: x.t().tolist(),
    "permute and sum": lambda x, _: x.permute(1, 0).sum(0).tolist(),
    "diagonal": lambda x, _: x.diagonal().tolist(),
    "trace": lambda x, _: x[:3, :3].trace().item(),
    "saved": saved,
    "copy.deepcopy": lambda x, _: copy.deepcopy(x.detach()).sum().item(),
    "copy_ from plain": lambda x, mate: x.detach().clone().copy_(mate).tolist(),
    "plain.copy_": lambda x, mate: torch.empty_like(mate).copy_(x.detach()).tolist(),
    "plain +=": lambda x, mate: mate.clone().add_(x.detach()).tolist(),
    "plain[0] = x[0]": lambda x, mate: torch.index_put(mate, (torch.tensor([0]),), x.detach()[0]).tolist(),
    "to": lambda x, _: x.to(torch.float32).double().sum().item(),
    "half().sum()": lambda x, _: x.bfloat16().sum(dtype=torch.float64).item(),
    "double": lambda x, _: x.double().tolist(),
    "cpu": lambda x, _: x.cpu().sum().item(),
    "detach": lambda x, _: x.detach().sum().item(),
    "clone": lambda x, _: x.clone().max().item(),
    "data": lambda x, _: x.data.max().item(),
    "through data": through_data,
    "cat with plain": lambda x, mate: torch.cat([x, mate]).tolist(),
    "stack with plain": lambda x, mate: torch.stack([mate, x]).sum(0).tolist(),
    "stack of sums": lambda x, _: torch.stack([x.sum(), x.mean(), x.norm()]).tolist(),
    "torch.tensor of elements": lambda x, _: torch.tensor([x[0, 0], x[-1, 0]]).tolist(),
    "torch.tensor of sums": lambda x, _: torch.tensor([x.detach().sum(), x.detach().max()]).tolist(),
    "torch.as_tensor": lambda x, _: torch.as_tensor(x.detach()).sum().item(),
    "mse_loss": lambda x, mate: functional.mse_loss(x, mate).item(),
    "l1_loss": lambda x, mate: functional.l1_loss(x, mate, reduction="none").tolist(),
    "cross_entropy": lambda x, _: functional.cross_entropy(x, classes(x)).item(),
    "bce_with_logits": lambda x, mate: functional.binary_cross_entropy_with_logits(x, mate.sigmoid()).item(),
    "cosine_similarity": lambda x, mate: functional.cosine_similarity(x, mate).tolist(),
    "accuracy": lambda x, _: (x.argmax(-1) == classes(x)).float().mean().item(),
    "backward of sum": derivative(lambda x, _: x.sum()),
    "backward of mean of squares": derivative(lambda x, _: x.square().mean()),
    "backward of norm": derivative(lambda x, _: x.norm()),
    "backward of max": derivative(lambda x, _: x.max()),
    "backward of max of rows": derivative(lambda x, _: x.max(1).values.sum()),
    "backward of mse_loss": derivative(functional.mse_loss),
    "backward of cross_entropy": derivative(lambda x, _: functional.cross_entropy(x, classes(x))),
    "backward of x[mask]": derivative(lambda x, mate: (x[mate > 0] ** 2).sum()),
    "backward of x[0]": derivative(lambda x, _: x[0].sum() * 2),
    "backward of cat": derivative(lambda x, mate: torch.cat([x, mate]).square().sum()),
    "backward of plain product": derivative(lambda x, mate: (mate.t() @ x).square().sum()),
    "backward of softmax": derivative(lambda x, mate: (x.softmax(0) * mate).sum()),
    "gradient of a plain factor": plain_derivative,
    "get_total_norm": lambda x, _: float(torch.nn.utils.get_total_norm([x.detach(), x.detach() * 2])),
    "get_total_norm(foreach)": lambda x, mate: float(
        torch.nn.utils.get_total_norm([x.detach(), mate, x.detach() * 2], foreach=True)
    ),
    "get_total_norm(inf)": lambda x, _: float(torch.nn.utils.get_total_norm([x.detach()] * 2, math.inf)),
    "_foreach_max": lambda x, _: [each.item() for each in torch._foreach_max([x.detach()])],
    "x[mask] =": masked,
    "x[0] =": assigned,
    "x[0].zero_()": written_through_a_view,
    "normal_": random_in_place,
    "dropout": dropped,
    "mul_, add_ of plain": averaged,
    "zero_": lambda x, _: x.detach().clone().zero_().tolist(),
    "sort in place of a clone": lambda x, _: x.detach().clone().clamp_(min=0).tolist(),
    "zeros_like": lambda x, _: torch.zeros_like(x).add(1).sum().item(),
    "new_ones": lambda x, _: x.new_ones(x.shape).sum().item(),
    "einsum": lambda x, mate: torch.einsum("ij,ij->i", x, mate).tolist(),
    "pickle": lambda x, _: pickle.loads(pickle.dumps(x.detach())),
    "in": lambda x, _: 1e9 in x.detach(),
    "is_nonzero": lambda x, _: (x.sum() > 0) or False,
    "max(number, x)": lambda x, _: float(max(-1e9, x.sum())),
    "torch.func.grad": lambda x, _: torch.func.grad(lambda y: (y * y).sum())(x.detach()).tolist(),
}


def outcome(read: Reading, x: Tensor, mate: Tensor) -> tuple[str, Any]:
    """``("value", a plain value)``, or ``("error", its type and message)``."""
    try:
        return "value", plain(read(x, mate))
    except Exception as error:
        return "error", f"{type(error).__name__}: {error}"


def plain(value: Any) -> Any:
    """A value as numbers in lists; a DTensor as its full tensor."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if isinstance(value, (Tensor, np.ndarray, np.generic)):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return value


def is_close(value: Any, answer: Any) -> bool:
    """Whether two plain values are the same up to rounding."""
    if isinstance(answer, list):
        return isinstance(value, list) and len(value) == len(answer) and all(map(is_close, value, answer))
    if type(value) is not type(answer):
        return False
    if isinstance(answer, float):
        return math.isclose(value, answer, rel_tol=1e-9, abs_tol=1e-12) or (math.isnan(value) and math.isnan(answer))
    return value == answer
