"""Masks, counts and checks in models: as on one device, with as few programs as the numbers allow."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from cases import few
from idioms import IDIOMS, Batch, Idiom, Loss
from torch import Tensor, nn

import shardc
from shardc import CaptureError, Mesh, P

MESH = Mesh(dp=2, tp=2)
ANNOTATIONS = {
    "x": P("dp"), "batch.mask": P("dp"), "batch.ids": P("dp"), "layer.weight": P("tp"),
}  # fmt: skip


class Model(nn.Module):
    """A linear layer and the loss of an idiom on what it gives."""

    def __init__(self, idiom: Idiom) -> None:
        super().__init__()
        self.layer, self.idiom = nn.Linear(8, 8), idiom

    def forward(self, x: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return self.idiom.loss(self.layer(x), Batch(**batch))


def batch_of(seed: int) -> tuple[Tensor, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(8, 6, generator=generator) > 0.5
    mask[:, seed % 6] = True
    ids = torch.randint(0, 7 + seed % 2, (8, 6), generator=generator)
    edges = torch.randint(0, 7 + seed % 2, (2, 12), generator=generator)
    sizes = torch.tensor([[3, 1, 2, 2], [1, 1, 1, 5]][seed % 2])
    x = torch.randn(8, 6, 8, generator=generator, dtype=torch.float64)
    return x, dataclasses.asdict(Batch(mask, ids, edges, sizes))


QUICK = [each for each in IDIOMS if each.how != "plain"][::3]


@pytest.mark.parametrize("idiom", few(IDIOMS, *QUICK), ids=str)
def test_an_idiom_trains_as_on_one_device(idiom: Idiom) -> None:
    torch.manual_seed(0)
    alone = Model(idiom).double()
    parallel = shardc.parallelize(Model(idiom).double(), MESH, ANNOTATIONS)
    parallel.load_state_dict(alone.state_dict())
    for seed in (1, 2, 1):
        x, batch = batch_of(seed)
        losses = []
        for model in (alone, parallel):
            model.zero_grad()
            losses.append(model(x, batch))
            losses[-1].backward()
        assert torch.allclose(*losses, rtol=1e-12, atol=1e-13)
        for mine, theirs in zip(parallel.parameters(), alone.parameters(), strict=True):
            assert torch.allclose(mine.grad, theirs.grad, rtol=1e-11, atol=1e-13)
    program = parallel.program.program
    has_rows = any("selects by a mask" in note for note in program.notes)
    assert has_rows == (idiom.how == "rows"), program.notes
    assert any(output.kind == "guard" for output in program.outputs) == (idiom.how == "guard")


def loss_if_any(h: Tensor, b: Batch) -> Tensor:
    if b.mask[:, 0].sum() > 5:
        return h[b.mask].square().mean()
    return h.square().sum() / 8


def scaled_if_large(h: Tensor, b: Batch) -> Tensor:
    loss = h.square().mean()
    return loss / 2 if loss > 0.1 and torch.isfinite(h).all() else loss


def halved_while_large(h: Tensor, b: Batch) -> Tensor:
    while bool((h.abs() > 0.5).any()):
        h = h / 2
    return h.square().mean()


@pytest.mark.parametrize("loss", [loss_if_any, scaled_if_large, halved_while_large])
def test_a_branch_on_values_has_a_program_for_each_way_that_a_step_takes(loss: Loss) -> None:
    test_an_idiom_trains_as_on_one_device(Idiom("", "guard", loss))


def test_a_branch_takes_the_way_of_one_device_on_each_batch() -> None:
    torch.manual_seed(0)
    model = Model(Idiom("", "guard", lambda h, b: h.square().sum() if h.sum() > 0 else h.abs().mean())).double()
    parallel = shardc.parallelize(model, MESH, ANNOTATIONS)
    for sign in (1, -1, -1, 1):
        x, batch = batch_of(1)
        x = x + 9 * sign
        with torch.no_grad():
            assert torch.allclose(parallel(x, batch), model(x, batch), rtol=1e-12)
    (variants,) = parallel.shardc.variants.values()
    assert len(variants.calls) == 2


def scaled_if_drawn(h: Tensor, b: Batch) -> Tensor:
    loss = h.square().mean()
    return loss / 2 if torch.rand(()) < 2 else loss


def scaled_where_drawn(h: Tensor, b: Batch) -> Tensor:
    loss = h.square().mean()
    return torch.where(torch.rand(()) < 2, loss / 2, loss)


def scaled_by_cond(h: Tensor, b: Batch) -> Tensor:
    loss = h.square().mean()
    return torch.cond(torch.rand(()) < 2, lambda each: each / 2, lambda each: each * 1, (loss,))


def divided_by_a_number(h: Tensor, b: Batch) -> Tensor:
    return h.square().sum() / h.detach().abs().max().item()


def divided_by_a_tensor(h: Tensor, b: Batch) -> Tensor:
    return h.square().sum() / h.detach().abs().max()


def weights_by_numpy(h: Tensor, b: Batch) -> Tensor:
    return (h * torch.from_numpy(b.mask.numpy().astype("float64"))[..., None]).mean()


def weights_by_torch(h: Tensor, b: Batch) -> Tensor:
    return (h * b.mask.to(h.dtype)[..., None]).mean()


def means_in_a_list(h: Tensor, b: Batch) -> Tensor:
    return torch.Tensor([row.mean() for row in h]).sum() + h.mean()


def means_stacked(h: Tensor, b: Batch) -> Tensor:
    return torch.stack([row.mean() for row in h]).detach().sum() + h.mean()


REFUSED = [
    (scaled_if_drawn, "\n  use torch.where", scaled_where_drawn),
    (scaled_if_drawn, "torch.cond", scaled_by_cond),
    (divided_by_a_number, "compute with the tensor", divided_by_a_tensor),
    (weights_by_numpy, "compute it with torch", weights_by_torch),
    (means_in_a_list, "torch.stack, not torch.Tensor", means_stacked),
]


@pytest.mark.parametrize(("refused", "remedy", "instead"), REFUSED, ids=lambda each: getattr(each, "__name__", ""))
def test_the_remedy_of_what_is_refused_trains(refused: Loss, remedy: str, instead: Loss) -> None:
    with pytest.raises(CaptureError, match=rf"test_idioms.py:\d+: (.|\n)*{re.escape(remedy)}"):
        x, batch = batch_of(1)
        shardc.parallelize(Model(Idiom("", "plain", refused)).double(), MESH, ANNOTATIONS)(x, batch)
    test_an_idiom_trains_as_on_one_device(Idiom("", "plain", instead))


def test_more_programs_than_are_kept_are_refused_with_a_remedy_that_needs_one() -> None:
    spread = shardc.parallelize(Model(Idiom("", "guard", lambda h, b: h[b.mask].std())).double(), MESH, ANNOTATIONS)
    mean = shardc.parallelize(Model(Idiom("", "rows", lambda h, b: h[b.mask].mean())).double(), MESH, ANNOTATIONS)
    x, batch = batch_of(1)
    with pytest.raises(CaptureError, match=r"8 programs were compiled already(.|\n)*torch.where\(mask, new, old\)"):
        for count in range(2, 12):
            batch["mask"] = (torch.arange(48) < count).view(8, 6)
            mean(x, batch), spread(x, batch)
    (variants,) = mean.shardc.variants.values()
    assert count == 10 and len(variants.calls) == 1
