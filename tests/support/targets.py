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
    """Annotates what the mesh has axes for."""
    model, args, kwargs, annotations = mlp(**settings)
    return model, args, kwargs, annotations if "tp" in mesh.axis_names else {"x": P(*{"dp"} & {*mesh.axis_names})}


def bare() -> tuple[Any, ...]:
    """No annotations, inputs by keyword."""
    model, (x, target), _, _ = mlp()
    return model, (x,), {"target": target}


class Branching(nn.Module):
    """Has no graph: it branches on a number that it draws."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum() if torch.rand(()) > 0 else x.sum()


def branching() -> tuple[Any, ...]:
    return Branching(), (torch.ones(4),)


class Sparse(nn.Module):
    """Computes with what is no dense tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sparse.mm(x.diag().to_sparse(), x[:, None]).sum()


def sparse() -> tuple[Any, ...]:
    return Sparse(), (torch.ones(4),)


def not_a_model() -> tuple[Any, ...]:
    return "model", ()


def failing() -> tuple[Any, ...]:
    raise RuntimeError("no such data")


class Demanding(nn.Module):
    """Raises an error of its own."""

    def forward(self, x: Tensor) -> Tensor:
        raise KeyError("labels are missing")


def demanding() -> tuple[Any, ...]:
    return Demanding(), (torch.ones(4),)


class Looking(nn.Module):
    """Looks up what is not there."""

    def forward(self, table: Tensor, places: Tensor) -> Tensor:
        return table[places].sum()


def looking() -> tuple[Any, ...]:
    return Looking(), (torch.ones(4, 2), torch.tensor([0, 1, 2, 9]))


def convolution() -> tuple[Any, ...]:
    """A convolution over an image whose height, 9 rows, is cut unevenly."""
    torch.manual_seed(0)
    return nn.Conv2d(2, 4, 3, stride=2, padding=1), (torch.randn(2, 2, 9, 8),), {}, {"input": P(None, None, "x")}


class Weighed(nn.Module):
    """A layer, each of whose results is weighed by its place in the batch; and what was seen of it before."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 24)
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.layer(x).chunk(3, dim=1)
        return (q * k * v * places(x) - self.seen).square().mean()


def weighed() -> tuple[Any, ...]:
    """Has an op without a rule, a buffer, and a cut that moves into the blocks of a fused weight, with a note."""
    torch.manual_seed(0)
    return Weighed(), (torch.randn(8, 8),), {}, {"x": P("dp"), "layer.weight": P("tp")}


class Unmade(nn.Module):
    """Cannot be made."""

    def __init__(self) -> None:
        super().__init__()
        raise ValueError("no such size")


def unmade() -> tuple[Any, ...]:
    return Unmade(), ()


def overfed() -> tuple[Any, ...]:
    """More inputs than forward takes."""
    return Branching(), (torch.ones(4), torch.ones(4))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x)


class Misfit(nn.Module):
    """Its second block cannot take what comes out of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), Block())

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).sum()


def misfit() -> tuple[Any, ...]:
    return Misfit(), (torch.ones(2, 4),)


def loud() -> tuple[Any, ...]:
    """Prints, as users do."""
    print("making the model")
    return mlp()


class Ending(nn.Module):
    """Ends the process."""

    def forward(self, x: Tensor) -> Tensor:
        raise SystemExit(5)


def ending() -> tuple[Any, ...]:
    return Ending(), (torch.ones(4),)


class Silent(nn.Module):
    """Raises, and says nothing."""

    def forward(self, x: Tensor) -> Tensor:
        raise LookupError


def silent() -> tuple[Any, ...]:
    return Silent(), (torch.ones(4),)
