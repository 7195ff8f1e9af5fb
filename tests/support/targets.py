"""Targets for the command line: valid ones, and ones that are wrong in some way."""

from typing import Any

import torch
from places import places
from torch import Tensor, nn
from torch.nn import functional as F

from shardc import Mesh, P


class MLP(nn.Module):
    """Two layers and a loss; ``dropout`` makes it random, ``cast`` computes its loss in float32."""

    def __init__(self, dropout: float = 0.0, cast: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
        self.dropout, self.cast = nn.Dropout(dropout), cast

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        y = self.down(self.dropout(F.gelu(self.up(x))))
        loss = F.mse_loss(y.float(), target.to(torch.float32)) if self.cast else F.mse_loss(y, target)
        return {"loss": loss, "y": y}


ANNOTATIONS = {"x": P("dp"), "target": P("dp"), "down.weight": P(None, "tp")}


def mlp(**settings: Any) -> tuple[Any, ...]:
    torch.manual_seed(0)
    return MLP(**settings), (torch.randn(8, 8), torch.randn(8, 8)), {}, ANNOTATIONS


def for_mesh(mesh: Mesh, **settings: Any) -> tuple[Any, ...]:
    """An MLP with the annotations whose axes the mesh has."""
    model, args, kwargs, annotations = mlp(**settings)
    return model, args, kwargs, annotations if "tp" in mesh.axis_names else {"x": P(*{"dp"} & {*mesh.axis_names})}


def bare() -> tuple[Any, ...]:
    """An MLP without annotations, with inputs by keyword."""
    model, (x, target), _, _ = mlp()
    return model, (x,), {"target": target}


class Branching(nn.Module):
    """A model without a graph: it branches on a number that it draws."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum() if torch.rand(()) > 0 else x.sum()


def branching() -> tuple[Any, ...]:
    return Branching(), (torch.ones(4),)


class Sparse(nn.Module):
    """A model that computes with a sparse tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sparse.mm(x.diag().to_sparse(), x[:, None]).sum()


def sparse() -> tuple[Any, ...]:
    return Sparse(), (torch.ones(4),)


def not_a_model() -> tuple[Any, ...]:
    return "model", ()


def failing() -> tuple[Any, ...]:
    raise RuntimeError("no such data")


class Demanding(nn.Module):
    """A model that raises its own error."""

    def forward(self, x: Tensor) -> Tensor:
        raise KeyError("labels are missing")


def demanding() -> tuple[Any, ...]:
    return Demanding(), (torch.ones(4),)


class Looking(nn.Module):
    """A model that looks up a row beyond its table."""

    def forward(self, table: Tensor, places: Tensor) -> Tensor:
        return table[places].sum()


def looking() -> tuple[Any, ...]:
    return Looking(), (torch.ones(4, 2), torch.tensor([0, 1, 2, 9]))


def convolution() -> tuple[Any, ...]:
    """A convolution over an image whose height, 9 rows, is cut unevenly."""
    torch.manual_seed(0)
    return nn.Conv2d(2, 4, 3, stride=2, padding=1), (torch.randn(2, 2, 9, 8),), {}, {"input": P(None, None, "x")}


class Weighed(nn.Module):
    """A fused layer whose results are weighed by the rank of each input in its column, less a buffer ``seen``."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 24)
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.layer(x).chunk(3, dim=1)
        return (q * k * v * places(x) - self.seen).square().mean()


def weighed() -> tuple[Any, ...]:
    """A target with an op without a rule, a buffer, and a cut that moves into blocks of a fused weight, with a note."""
    torch.manual_seed(0)
    return Weighed(), (torch.randn(8, 8),), {}, {"x": P("dp"), "layer.weight": P("tp")}


class Unmade(nn.Module):
    """A model whose constructor fails."""

    def __init__(self) -> None:
        super().__init__()
        raise ValueError("no such size")


def unmade() -> tuple[Any, ...]:
    return Unmade(), ()


def overfed() -> tuple[Any, ...]:
    """A target with more inputs than forward takes."""
    return Branching(), (torch.ones(4), torch.ones(4))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x)


class Misfit(nn.Module):
    """A model whose second block cannot take the output of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), Block())

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).sum()


def misfit() -> tuple[Any, ...]:
    return Misfit(), (torch.ones(2, 4),)


def loud() -> tuple[Any, ...]:
    """A target that prints, as those of users may."""
    print("making the model")
    return mlp()


class Ending(nn.Module):
    """A model that ends the process."""

    def forward(self, x: Tensor) -> Tensor:
        raise SystemExit(5)


def ending() -> tuple[Any, ...]:
    return Ending(), (torch.ones(4),)


class Silent(nn.Module):
    """A model that raises an error without a message."""

    def forward(self, x: Tensor) -> Tensor:
        raise LookupError


def silent() -> tuple[Any, ...]:
    return Silent(), (torch.ones(4),)
