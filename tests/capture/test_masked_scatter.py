"""``masked_scatter``, by which vision-language models put image features between text: as on one device, and cut."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from cases import few
from one_device import assert_same
from torch import Tensor, nn

import shardc
from shardc import CaptureError, Mesh, P
from shardc.capture.values.refusals import GuardError
from shardc.runtime.comm.distributed import make_device_mesh

MESH = Mesh(dp=2, tp=2)
CUTS: dict[str, dict[str, P]] = {
    "nothing": {},
    "samples": {"ids": P("dp"), "images": P("dp")},
    "samples and images' owner open": {"ids": P("dp")},
    "tokens": {"ids": P("dp", "tp"), "images": P("dp")},
    "channels": {"ids": P("dp"), "images": P("dp"), "embed.weight": P(None, "tp"), "project.weight": P("tp")},
}


class Llava(nn.Module):
    """Text embeddings, in which those of the token 0 are replaced by image features in order."""

    def __init__(self, mask: str = "of tokens") -> None:
        super().__init__()
        self.embed, self.project, self.head = nn.Embedding(8, 6), nn.Linear(5, 6), nn.Linear(6, 8)
        self.mask = mask

    def forward(self, ids: Tensor, images: Tensor) -> Tensor:
        x, features = self.embed(ids), self.project(images)
        mask = (ids == 0).unsqueeze(-1)
        if self.mask == "of elements":
            mask = mask & (torch.arange(6) % 2 == 0)
        elif self.mask == "expanded":
            mask = mask.expand_as(x)
        if self.mask == "in place":
            x = x * 1
            x.masked_scatter_(mask, features)
        else:
            x = x.masked_scatter(mask, features)
        return self.head(x).square().mean()


def ids_of(counts: tuple[int, ...]) -> Tensor:
    """Rows of tokens; as many as said are of images, in other places in each row."""
    ids = torch.ones(len(counts), 8, dtype=torch.long) + torch.arange(8) % 7
    for row, count in enumerate(counts):
        ids[row, torch.randperm(8, generator=torch.Generator().manual_seed(row))[:count]] = 0
    return ids


def images_of(batch: int = 4, patches: int = 3) -> Tensor:
    return torch.randn(batch, patches, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


EVEN, UNEVEN, FEW = (3, 3, 3, 3), (5, 0, 1, 6), (0, 0, 2, 1)


def trained(mask: str, cuts: str, mesh: Any) -> list[int]:
    """How many programs there are after each of some batches, all of which train as on one device."""
    torch.manual_seed(0)
    alone = Llava(mask).double()
    parallel = shardc.parallelize(Llava(mask).double(), mesh, CUTS[cuts])
    parallel.load_state_dict(alone.state_dict())
    counts = []
    for numbers in (EVEN, UNEVEN, EVEN, FEW):
        ids = ids_of(numbers)
        inputs = [images_of().requires_grad_() for _ in range(2)]
        losses = []
        for model, images in zip((parallel, alone), inputs, strict=True):
            model.zero_grad()
            losses.append(model(ids, images))
            losses[-1].backward()
        assert_same(*losses)
        assert_same(inputs[0].grad, inputs[1].grad)
        for mine, theirs in zip(parallel.parameters(), alone.parameters(), strict=True):
            assert_same(mine.grad, theirs.grad)
        (variants,) = parallel.shardc.variants.values()
        counts.append(len(variants.calls))
    return counts


MASKS = ("of tokens", "expanded", "of elements", "in place")
CASES = list(product(MASKS, CUTS))


@pytest.mark.parametrize("case", few(CASES, *CASES[1::6]), ids=" ".join)
def test_it_trains_as_on_one_device_whatever_the_mask_picks(case: tuple[str, str]) -> None:
    mask, cuts = case
    assert trained(mask, cuts, MESH) == ([1, 1, 1, 1] if mask == "of elements" else [1, 2, 2, 2])


def on_gloo() -> list[int]:
    return trained("of tokens", "samples", make_device_mesh(MESH))


def test_ranks_of_a_job_agree_on_the_program(gloo) -> None:
    assert gloo.run(on_gloo) == [[1, 2, 2, 2]] * 4


def compiled(batch: int, numbers: tuple[int, ...], patches: int = 3) -> shardc.Compiled:
    args = ids_of(numbers * (batch // 4)), images_of(batch, patches)
    return shardc.compile(Llava().double(), Mesh(dp=2), CUTS["samples"], args=args)


def test_nothing_that_is_sent_grows_with_the_batch_where_samples_have_equal_parts() -> None:
    sent = [[each.wire_bytes for each in compiled(batch, EVEN).collectives] for batch in (4, 16)]
    assert sent[0] == sent[1]


def test_unequal_parts_send_the_source_and_its_gradient_alone() -> None:
    source = 16 * 3 * 6 * 8
    moved = {each.kind: each.wire_bytes for each in compiled(16, UNEVEN).collectives if each.bytes >= source // 2}
    assert moved == {"all_gather": source // 2, "reduce_scatter": source // 2}


def test_a_source_with_too_few_elements_is_an_error_at_capture_and_in_a_step() -> None:
    with pytest.raises(CaptureError, match="gives samples more elements than the source has"):
        compiled(4, (3, 4, 3, 3))
    program = compiled(4, UNEVEN)
    with pytest.raises(GuardError, match="gives samples more elements than the source has"):
        program.simulate(ids_of((8, 0, 0, 5)), images_of())


def test_without_values_each_sample_is_taken_to_have_its_own_part() -> None:
    args = ids_of(EVEN).to("meta"), images_of().to("meta")
    program = shardc.compile(Llava().double(), Mesh(dp=2), CUTS["samples"], args=args)
    assert {each.kind for each in program.collectives} == {"all_reduce"}
    program.simulate(ids_of(EVEN), images_of())
    with pytest.raises(GuardError, match="gives samples unequal parts"):
        program.simulate(ids_of(UNEVEN), images_of())
    odd = images_of(5).to("meta")
    program = shardc.compile(Llava().double(), Mesh(dp=2), {"ids": P("dp")}, args=(args[0], odd))
    program.simulate(ids_of(UNEVEN), images_of(5))


@pytest.mark.sweep
def test_it_trains_in_compiled_code() -> None:
    alone = Llava()
    parallel = shardc.parallelize(Llava(), MESH, CUTS["samples"], compile="inductor")
    parallel.load_state_dict(alone.state_dict())
    for numbers in (EVEN, UNEVEN):
        args, gradients = (ids_of(numbers), images_of().float()), []
        for model in (parallel, alone):
            model.zero_grad()
            model(*args).backward()
            gradients.append([parameter.grad.clone() for parameter in model.parameters()])
        torch.testing.assert_close(*gradients)
