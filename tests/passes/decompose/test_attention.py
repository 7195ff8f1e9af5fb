"""Attention over cut positions: the numbers of one device whichever way, and no more bytes than the way needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attending import BATCH, WIDTH, Attending, check_compiled, check_step, draw, kinds_sent
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardc import Mesh, P, Remat, ShardingError, Zero, compile
from shardc.costs.count import call_seconds
from shardc.language.mesh import warnings_among
from shardc.ops.attention.ring import Ring
from shardc.ops.zigzag import in_zigzag

RING, BACK = ["ring_attention"], ["ring_attention_backward"]
TOLERANCE = 1e-10


@settings(max_examples=30)
@given(
    st.sampled_from([2, 3, 4, 8]), st.integers(2, 21), st.none() | st.integers(2, 21), st.booleans(),
    st.sampled_from([1, 2, 4]), st.sampled_from(["auto", "ring", "gather"]),
)  # fmt: skip
def test_a_step_is_that_of_one_device(
    count: int, queries: int, keys: int | None, is_causal: bool, num_keys: int, way: str
) -> None:
    torch.manual_seed(0)
    model = Attending(num_keys=num_keys, is_causal=is_causal, scale=0.3).double()
    check_step(model, Mesh(cp=count), draw(queries, keys), TOLERANCE, attention=way)


class OtherSize(Attending):
    """Values have half the head size of keys, as in multi-head latent attention, or there is no dim of heads."""

    def __init__(self, has_heads: bool, is_causal: bool) -> None:
        super().__init__(is_causal=is_causal)
        self.has_heads = has_heads
        self.up = nn.Linear(WIDTH // 2, WIDTH)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        v = v[..., : WIDTH // 8]
        if not self.has_heads:
            q, k, v, mask = (None if x is None else x.flatten(0, 1) for x in (q, k, v, mask))  # type: ignore[assignment]
        out = scaled_dot_product_attention(q, k, v, mask, is_causal=self.is_causal and mask is None)
        return self.up(out.reshape(BATCH, 4, -1, WIDTH // 8).transpose(1, 2).flatten(2)).unsqueeze(1)  # type: ignore[no-any-return]


@pytest.mark.parametrize("axis", ["cp", "cp:zigzag"])
@pytest.mark.parametrize("has_heads", [True, False], ids=["", "of three dims"])
@pytest.mark.parametrize("is_masked", [False, True], ids=["", "masked"])
def test_values_of_another_size_and_attention_of_three_dims_go_round(
    has_heads: bool, is_masked: bool, axis: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardc.ops.attention.ring.TILE", 4)
    torch.manual_seed(0)
    for length in (8, 13):
        inputs = draw(length)
        if is_masked:
            inputs["mask"] = torch.rand(BATCH, 4, length, length) > 0.3
        model = OtherSize(has_heads, is_causal=not is_masked).double()
        compiled = check_step(model, Mesh(cp=2), inputs, TOLERANCE, axis, attention="ring")
        assert "ring_attention" in kinds_sent(compiled)


class Broadcast(Attending):
    """One head of keys for all queries, or one sample of them for all, without a word of it to torch."""

    def __init__(self, num_samples: int) -> None:
        super().__init__(num_keys=1)
        self.num_samples = num_samples

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        k, v = k[: self.num_samples], v[: self.num_samples]
        if self.num_samples == 1:
            k, v = (x.expand(-1, self.heads, -1, -1) for x in (k, v))
        return scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.parametrize("num_samples", [BATCH, 1])
def test_keys_that_are_broadcast_go_round_as_they_are(num_samples: int) -> None:
    torch.manual_seed(0)
    for length in (8, 13):
        compiled = check_step(Broadcast(num_samples).double(), Mesh(cp=2), draw(length), TOLERANCE, attention="ring")
        assert [each for each in kinds_sent(compiled) if "ring" in each] == RING
        if num_samples == BATCH:
            grouped = check_step(Attending(num_keys=1).double(), Mesh(cp=2), draw(length), TOLERANCE, attention="ring")
            sent, expected = ([each.wire_bytes for each in one.collectives] for one in (compiled, grouped))
            assert sent == expected


MASKS = {
    "rows of booleans": lambda n: torch.rand(n, n) > 0.4,
    "a row that sees nothing": lambda n: torch.arange(n).expand(n, n) < torch.arange(n).unsqueeze(1),
    "scores": lambda n: torch.randn(BATCH, 1, n, n, dtype=torch.float64),
    "scores of each head": lambda n: torch.randn(1, 4, n, n, dtype=torch.float64),
    "one row for all": lambda n: torch.rand(BATCH, 1, 1, n) > 0.3,
}


@pytest.mark.parametrize("way", ["ring", "ulysses", "gather"])
@pytest.mark.parametrize("name", MASKS)
def test_masks_are_those_of_one_device(name: str, way: str) -> None:
    torch.manual_seed(0)
    model = Attending(is_causal=False).double()
    for length in (8, 13):
        inputs = draw(length) | {"mask": MASKS[name](length)}
        check_step(model, Mesh(cp=2), inputs, TOLERANCE, attention=way)


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        (Mesh(dp=2, cp=2), {}),
        (Mesh(dp=2, cp=3), {"zero": Zero("dp", stage=3)}),
        (Mesh(cp=4), {"zero": Zero("cp", stage=3)}),
        (Mesh(cp=2, tp=2), {"annotations": {name: P("tp") for name in ("q.*", "k.*", "v.*")}}),
        (Mesh(cp=4), {"remat": Remat("*")}),
    ],
    ids=["dp", "zero 3", "zero 3 over positions", "tp", "remat"],
)
def test_other_axes_and_options_go_with_a_ring(mesh: Mesh, options: Any) -> None:
    torch.manual_seed(0)
    compiled = check_step(Attending().double(), mesh, draw(9), TOLERANCE, attention="ring", **options)
    assert [each for each in kinds_sent(compiled) if "ring" in each] == RING
    assert [each for each in kinds_sent(compiled, "backward") if "ring" in each] == BACK


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_narrow_dtype_is_as_near_as_on_one_device(dtype: torch.dtype) -> None:
    """Of the gradients the mean distance from float64 is at most 1.25 times that of one device."""
    torch.manual_seed(0)
    exact, inputs = Attending().double(), draw(32)
    narrow = Attending()
    narrow.load_state_dict(exact.state_dict())
    narrow, own = narrow.to(dtype), {name: value.to(dtype) for name, value in inputs.items()}
    wanted = torch.autograd.grad(exact(**inputs), list(exact.parameters()))
    alone = torch.autograd.grad(narrow(**own), list(narrow.parameters()))
    compiled = compile(narrow, Mesh(cp=4), {"x": P(None, "cp")}, kwargs=own, attention="ring")
    _, found = compiled.simulate(**own)
    distances = [
        sum((a.double() - b).abs().mean().item() for a, b in zip(each, wanted, strict=True))
        for each in (found.values(), alone)
    ]
    assert distances[0] <= 1.25 * distances[1], distances


@pytest.mark.parametrize(("count", "num_keys"), [(2, 4), (3, 4), (4, 1), (8, 2)])
def test_a_ring_sends_keys_and_values_once_and_in_backward_twice(count: int, num_keys: int) -> None:
    inputs = draw(24, dtype=torch.float32)
    compiled = compile(
        Attending(num_keys=num_keys), Mesh(cp=count), {"x": P(None, "cp")}, kwargs=inputs, attention="ring"
    )
    keys_and_values = 2 * 4 * BATCH * 24 * WIDTH * num_keys // 4
    sent = {each.name: each for each in compiled.collectives if "ring" in each.name}
    forward, backward = sent["ring_attention"], sent["ring_attention_backward"]
    assert forward.wire_bytes == keys_and_values * (count - 1) // count and forward.steps == count - 1
    assert backward.wire_bytes == 2 * forward.wire_bytes
    assert kinds_sent(compiled) == RING and kinds_sent(compiled, "backward") == BACK
    assert compiled.program.mesh is not None


def test_heads_that_divide_move_to_ranks_where_that_sends_less() -> None:
    """By all_to_all of queries, keys, values and results, of which a rank keeps its own part."""
    inputs = draw(24, dtype=torch.float32)
    compiled = compile(Attending(), Mesh(cp=4), {"x": P(None, "cp")}, kwargs=inputs)
    assert kinds_sent(compiled) == ["all_to_all"] * 4 and kinds_sent(compiled, "backward") == ["all_to_all"] * 4
    activations = 4 * BATCH * 24 * WIDTH // 4
    assert {each.wire_bytes for each in compiled.collectives if each.kind == "all_to_all"} == {activations * 3 // 4}
    few_keys = compile(Attending(num_keys=1), Mesh(cp=4), {"x": P(None, "cp")}, kwargs=inputs)
    assert kinds_sent(few_keys) == RING


class Written(Attending):
    """Its softmax is written out."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return (q @ k.mT).softmax(-1) @ v


class Summed(Attending):
    """It has no attention."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return q * (k * v).cumsum(2)


@pytest.mark.parametrize("way", ["ring", "ulysses"])
@pytest.mark.parametrize(
    ("model", "spec", "said"),
    [
        (Attending(), P(None, "cp"), ""),
        (Attending(), P("cp"), "none has its positions cut"),
        (Written(), P(None, "cp"), "softmax is written out"),
        (Summed(), P(None, "cp"), "the model has none"),
    ],
    ids=["has an effect", "samples cut", "written out", "none"],
)
def test_a_way_that_has_no_effect_is_said(model: nn.Module, spec: P, said: str, way: str) -> None:
    compiled = compile(model, Mesh(cp=2), {"x": spec}, kwargs=draw(8, dtype=torch.float32), attention=way)
    notes = [note for note in compiled.program.notes if note.startswith(f"attention={way!r}")]
    assert len(notes) == bool(said) and all(said in note for note in notes)
    assert warnings_among(notes) == tuple(notes)


@settings(max_examples=20)
@given(
    st.sampled_from([(2, 3), (3, 2), (2, 2, 2), (4, 2)]), st.integers(3, 40), st.none() | st.integers(3, 40),
    st.sampled_from(["causal", "all", "window"]), st.sampled_from(["auto", "ring", "gather"]),
)  # fmt: skip
def test_a_length_that_the_ranks_of_several_axes_do_not_divide_goes_round(
    sizes: tuple[int, ...], queries: int, keys: int | None, kind: str, way: str
) -> None:
    """Each axis cuts the chunks that those before it left: of 34 positions on 2 x 3 ranks 6, 6, 5, 6, 6 and 5."""
    torch.manual_seed(0)
    axes = dict(zip("abc", sizes, strict=False))
    model = Banded(3, 2, False).double() if kind == "window" else Attending(is_causal=kind == "causal").double()
    inputs = draw(queries, None if kind == "window" else keys)
    cut = dict.fromkeys(inputs, P(None, tuple(axes)))
    compiled = compile(model, Mesh(**axes), cut, kwargs=inputs, attention=way)
    check_compiled(compiled, model, inputs, TOLERANCE)
    if way == "ring":
        assert kinds_sent(compiled) == RING * (len(compiled.collectives) > 1) and not compiled.program.notes


def test_heads_that_do_not_divide_are_an_error_where_they_are_asked_for() -> None:
    with pytest.raises(ShardingError, match="4 heads of keys(.|\n)*say attention='ring'"):
        compile(Attending(), Mesh(cp=3), {"x": P(None, "cp")}, kwargs=draw(9, dtype=torch.float32), attention="ulysses")


def test_a_way_that_there_is_not_is_an_error() -> None:
    with pytest.raises(ShardingError, match="did you mean ulysses"):
        compile(Attending(), Mesh(cp=3), {"x": P(None, "cp")}, kwargs=draw(9, dtype=torch.float32), attention="ulises")


@settings(max_examples=200)
@given(
    st.integers(1, 5), st.integers(1, 17), st.integers(1, 17), st.booleans(), st.tuples(st.booleans(), st.booleans()),
    st.booleans(),
)  # fmt: skip
def test_tiles_cover_what_each_query_sees_and_nothing_twice(
    count: int, queries: int, keys: int, is_causal: bool, is_zigzag: tuple[bool, bool], travels: bool
) -> None:
    ring = Ring("flash_attention_for_cpu", count, queries, keys, is_causal, None, travels, in_zigzag=is_zigzag)
    seen = torch.zeros(queries, keys)
    rows, columns = (
        torch.tensor([i for run in (in_zigzag(length, count) if is_own else [range(length)]) for i in run])
        for length, is_own in zip((queries, keys), is_zigzag, strict=True)
    )
    row_size, column_size = -(-queries // count), -(-keys // count)
    for index in range(count):
        for source in range(count) if travels else [None]:
            own = rows[index * row_size :][:row_size]
            others = columns if source is None else columns[source * column_size :][:column_size]
            for tile in ring.tiles(index, source):
                part = torch.ones(len(own[tile.rows]), len(others[tile.columns]))
                assert tile.start == others[tile.columns][0]
                seen[own[tile.rows].unsqueeze(1), others[tile.columns]] += part.tril() if tile.is_causal else part
    wanted = torch.ones(queries, keys)
    assert torch.equal(seen, wanted.tril() if is_causal else wanted)


@pytest.mark.parametrize("count", [2, 4, 64])
def test_a_causal_ring_in_zigzag_gives_all_ranks_the_same_work(count: int) -> None:
    length = 16 * count
    in_order, zigzag = (
        Ring("flash_attention_for_cpu", count, length, length, True, None, in_zigzag=(each, each))
        for each in (False, True)
    )
    assert zigzag.imbalance <= 1.05
    assert in_order.imbalance == pytest.approx(2 - 1 / count, rel=0.05)


def test_a_dump_says_what_the_busiest_rank_has_to_do() -> None:
    inputs = draw(64, dtype=torch.float32)
    for axis, is_said in (("cp", True), ("cp:zigzag", False)):
        compiled = compile(Attending(), Mesh(cp=4), {"x": P(None, axis)}, kwargs=inputs, attention="ring")
        assert ("the busiest rank does 1.74 of the mean" in compiled.dump()) == is_said


def test_a_causal_ring_takes_the_time_of_the_busiest_rank() -> None:
    inputs = {"x": torch.empty(1, 16384, WIDTH)}
    programs = [
        compile(Attending(num_keys=1), Mesh(cp=4), {"x": P(None, axis)}, kwargs=inputs).program
        for axis in ("cp", "cp:zigzag")
    ]
    in_order, in_zigzag = (
        next(call_seconds(program, node) for node in program.calls if node.name == RING[0]) for program in programs
    )
    assert in_order / in_zigzag == pytest.approx(1.75, rel=0.05)


# Masks that a model makes.


def _seen(n: int, kind: str) -> Tensor:
    """Which keys each query sees."""
    position, batch = torch.arange(n), torch.arange(BATCH).view(-1, 1, 1)
    row, column = position.unsqueeze(1), position.unsqueeze(0)
    match kind:
        case "window":
            return (column <= row) & (column > row - 3)
        case "prefix":
            return ((column <= row) | (column < 4))[None, None]
        case "documents":
            document = (position // 5)[None, None]
            return (document.unsqueeze(-1) == document.unsqueeze(-2)) & (column <= row)
        case "padding":
            return ((column <= row) & (column >= 2 * batch)).unsqueeze(1)
        case "cast":
            return torch.zeros(n, n).masked_fill(column > row, -torch.inf).double()
        case "near":
            return (row - column).abs() < 3
        case "numbers as truth":
            return torch.logical_and((row + 1 - column).clamp(min=0), column - 3)
        case "truth as positions":
            return (position - 3).bool().unsqueeze(1) & (column <= row)
        case "few bits":
            return row.to(torch.uint8) - 3 >= column.to(torch.uint8) - 2
        case "bits":
            return (~(row.clamp(max=1)) & 1).bool() | (column <= row)
    raise AssertionError(kind)


class Masking(Attending):
    """It makes its own mask."""

    def __init__(self, kind: str) -> None:
        super().__init__(is_causal=False)
        self.kind = kind

    def forward(self, x: Tensor, y: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        return super().forward(x, y, _seen(x.shape[1], self.kind))


@pytest.mark.parametrize("kind", ["numbers as truth", "truth as positions", "few bits", "bits"])
def test_what_is_no_position_is_not_taken_for_one(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardc.ops.attention.ring.TILE", 2)
    torch.manual_seed(0)
    check_step(Masking(kind).double(), Mesh(cp=4), draw(12), TOLERANCE)


class Lowering(Attending):
    """It hides keys by a number, all of them from its last queries, whose result is the mean of all values."""

    def __init__(self, number: float) -> None:
        super().__init__(is_causal=False)
        self.number = number

    def forward(self, x: Tensor, y: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        position = torch.arange(x.shape[1])
        seen = (position.unsqueeze(0) <= position.unsqueeze(1)) & (position.unsqueeze(1) < 8)
        return super().forward(x, y, torch.where(seen, x.new_zeros(()), x.new_full((), self.number)))


@pytest.mark.parametrize("number", [torch.finfo(torch.float64).min, -1e9])
def test_rows_that_a_number_hides_are_those_of_one_device(number: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardc.ops.attention.ring.TILE", 2)
    torch.manual_seed(0)
    for length in (11, 12):
        check_step(Lowering(number).double(), Mesh(cp=4), draw(length), 1e-6 if number == -1e9 else TOLERANCE)


@pytest.mark.parametrize("way", ["auto", "gather", "ulysses"])
@pytest.mark.parametrize("kind", ["window", "prefix", "documents", "padding", "near", "cast"])
def test_a_mask_made_of_positions_is_made_tile_by_tile(kind: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardc.ops.attention.ring.TILE", 2)
    torch.manual_seed(0)
    for count, length in ((4, 16), (2, 14)) if way == "ulysses" else ((4, 16), (3, 14)):
        compiled = check_step(Masking(kind).double(), Mesh(cp=count), draw(length), TOLERANCE, attention=way)
        types = [type_ for node in compiled.program.graph.nodes for type_ in compiled.program.types(node) if type_]
        assert not [each for each in types if each.shape[-1:] == (length,) and each.shape[-2:-1] >= (length // count,)]


TRIANGLES: dict[str, Callable[[int], Tensor]] = {
    "tril": lambda n: torch.ones(n, n, dtype=torch.bool).tril(),
    "triu": lambda n: torch.full((n, n), -torch.inf, dtype=torch.float64).triu(1),
    "not triu": lambda n: ~torch.ones(n, n, dtype=torch.bool).triu(1),
    "tril of numbers": lambda n: torch.ones(n, n).tril() > 0,
    "zeros of tril": lambda n: torch.zeros(n, n).masked_fill(torch.ones(n, n).tril() == 0, -torch.inf).double(),
    "window": lambda n: torch.ones(n, n, dtype=torch.bool).tril().triu(-2),
}


class Triangular(Attending):
    """It sees what a triangle of a matrix shows."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return scaled_dot_product_attention(q, k, v, TRIANGLES[self.kind](q.shape[2]))


@pytest.mark.parametrize(("axis", "way"), [("cp", "ring"), ("cp:zigzag", "ring"), ("cp", "ulysses")])
@pytest.mark.parametrize("kind", TRIANGLES)
def test_a_triangle_of_a_matrix_is_made_tile_by_tile(kind: str, axis: str, way: str) -> None:
    """No rank has a matrix with all positions, or a chunk of them by all; a window of two sends its rows alone."""
    torch.manual_seed(0)
    compiled = check_step(Triangular(kind).double(), Mesh(cp=4), draw(32), TOLERANCE, axis, attention=way)
    types = [type_ for node in compiled.program.graph.nodes for type_ in compiled.program.types(node) if type_]
    assert not [type_ for type_ in types if type_.shape[-1:] == (32,) and type_.numel > BATCH * 32]
    if way == "ring":
        assert kinds_sent(compiled) == RING and kinds_sent(compiled, "backward") == BACK
        rows = {"cp": 2, "cp:zigzag": 4}[axis] if kind == "window" else 3 * 8
        assert {each.wire_bytes for each in compiled.collectives if each.name == "ring_attention"} == {
            rows * 2 * 8 * BATCH * WIDTH
        }


def test_a_mask_of_three_dims_has_heads_and_leaves_attention_one_op() -> None:
    """As ALiBi is often written, ``[heads, rows, columns]``."""
    torch.manual_seed(0)
    inputs = draw(16) | {"mask": torch.randn(4, 16, 16, dtype=torch.float64)}
    model = Attending(is_causal=False).double()
    compiled = check_step(model, Mesh(cp=4), inputs, TOLERANCE, attention="ulysses")
    assert {*kinds_sent(compiled)} == {"all_to_all"}
    (note,) = check_step(model, Mesh(cp=4), inputs, TOLERANCE, attention="ring").program.notes
    assert "a mask adds numbers to scores, so that keys are gathered" in note


class Largest(TorchDispatchMode):
    """``elements``: those of the largest tensor that an op makes."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.elements = max([self.elements, *(x.numel() for x in tree_leaves(made) if isinstance(x, Tensor))])
        return made


@pytest.mark.parametrize("kind", ["window", "prefix", "documents", "padding", "near"])
def test_ranks_that_share_heads_make_no_mask_of_all_positions(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs, not what stands in the program, nor the whole step on one device."""
    monkeypatch.setattr("shardc.ops.attention.ring.TILE", 16)
    torch.manual_seed(0)
    inputs = draw(128, dtype=torch.float32)
    compiled = compile(Masking(kind), Mesh(cp=4), {"x": P(None, "cp")}, kwargs=inputs, attention="ulysses")
    with Largest() as largest:
        compiled.simulate(**inputs)
    assert largest.elements <= BATCH * 128 * WIDTH < 128 * 128


class Banded(Attending):
    """Queries see so many keys before and behind them, and perhaps the first two."""

    def __init__(self, before: int, behind: int, is_first_seen: bool, num_keys: int = 4) -> None:
        super().__init__(num_keys=num_keys)
        self.before, self.behind, self.is_first_seen = before, behind, is_first_seen

    def forward(self, x: Tensor, y: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        position = torch.arange(x.shape[1])
        row, column = position.unsqueeze(1), position.unsqueeze(0)
        seen = (column >= row - self.before) & (column <= row + self.behind)
        return super().forward(x, mask=seen | (column < 2) if self.is_first_seen else seen)


@settings(max_examples=25)
@given(
    st.sampled_from([2, 3, 4, 5]), st.integers(4, 24), st.integers(0, 6), st.integers(0, 6), st.booleans(),
    st.sampled_from(["cp", "cp:zigzag"]),
)  # fmt: skip
def test_ranks_send_the_rows_that_others_see(
    count: int, length: int, before: int, behind: int, is_first_seen: bool, axis: str
) -> None:
    """A band of positions, and perhaps the first two of all, by one mask for any number of keys before and behind."""
    torch.manual_seed(0)
    model = Banded(before, behind, is_first_seen).double()
    compiled = check_step(model, Mesh(cp=count), draw(length), TOLERANCE, axis, attention="ring")
    chunk = 2 * 8 * BATCH * WIDTH * -(-length // count)
    for each in compiled.collectives:
        if each.name == "ring_attention":
            assert each.wire_bytes <= (count - 1) * chunk
            if axis == "cp" and not is_first_seen:
                assert each.wire_bytes <= 2 * 8 * BATCH * WIDTH * (before + behind)


@pytest.mark.parametrize("count", [4, 8, 16])
@pytest.mark.parametrize(("before", "behind"), [(8, 8), (8, 4), (0, 8), (8, 0)])
def test_of_a_window_to_both_sides_each_neighbour_gets_the_rows_that_it_sees(
    before: int, behind: int, count: int
) -> None:
    """In backward keys and values go the same way, and their gradients come back: bytes do not grow with ranks."""
    model, inputs = Banded(before, behind, False, num_keys=2), draw(17 * count, dtype=torch.float32)
    compiled = compile(model, Mesh(cp=count), {"x": P(None, "cp")}, kwargs=inputs, attention="ring")
    rows, steps = 2 * 4 * BATCH * WIDTH // 2 * (before + behind), (before > 0) + (behind > 0)
    sent = {each.name: (each.steps, each.wire_bytes) for each in compiled.collectives if "ring" in each.name}
    assert sent == {"ring_attention": (steps, rows), "ring_attention_backward": (steps, 2 * rows)}


@pytest.mark.parametrize(("count", "length"), [(2, 18), (3, 20), (3, 33), (4, 21), (4, 32), (4, 48)])
@pytest.mark.parametrize(("before", "behind"), [(8, 8), (9, 9), (8, 4), (4, 8), (0, 8)])
@pytest.mark.parametrize("axis", ["cp", "cp:zigzag"])
def test_a_step_with_a_window_to_both_sides_is_that_of_one_device(
    before: int, behind: int, count: int, length: int, axis: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a window is wider than a chunk, and where chunks have several lengths."""
    monkeypatch.setattr("shardc.ops.attention.ring.TILE", 4)
    torch.manual_seed(0)
    model = Banded(before, behind, False, num_keys=2).double()
    check_step(model, Mesh(cp=count), draw(length), TOLERANCE, axis, attention="ring")


@pytest.mark.parametrize("axis", ["cp", "cp:zigzag"])
def test_keys_travel_as_far_as_they_are_seen(axis: str) -> None:
    """With windows of 3 positions 2 rows go to the next rank, and their gradients come back.

    In zigzag as many go to each neighbour: those of an early stretch to the next rank, of a late one to the one before.
    """
    torch.manual_seed(0)
    compiled = check_step(Masking("window").double(), Mesh(cp=4), draw(16), TOLERANCE, axis)
    row = 2 * 8 * BATCH * WIDTH
    sent = {each.name: (each.steps, each.wire_bytes) for each in compiled.collectives if "ring" in each.name}
    ways = 1 if axis == "cp" else 2
    assert sent == {"ring_attention": (ways, 2 * ways * row), "ring_attention_backward": (ways, 4 * ways * row)}


def test_a_dump_says_how_attention_goes_round_and_what_its_mask_is() -> None:
    inputs = draw(16, dtype=torch.float32)
    compiled = compile(Masking("window"), Mesh(cp=4), {"x": P(None, "cp")}, kwargs=inputs)
    seen = "where(bitwise_and(le(column, row), gt(column, row - 3)), 0.0, -inf)"
    assert f"4 chunks of 16 queries and 16 keys, mask {seen})" in compiled.dump()
    assert "cp cuts the positions, and ring_attention sees keys of others" in str(compiled.explain("ring_attention"))


# A slice of a padded value, as labels are shifted.


class Shifted(nn.Module):
    def __init__(self, pads: tuple[int, int], start: int, end: int, is_read_twice: bool) -> None:
        super().__init__()
        self.pads, self.start, self.end, self.is_read_twice = pads, start, end, is_read_twice

    def forward(self, x: Tensor) -> Tensor:
        padded = nn.functional.pad(x, self.pads, value=2.0)
        shifted = padded[:, self.start : self.end]
        return shifted.exp().sum() + (padded.sum() if self.is_read_twice else 0.0)


@settings(max_examples=40)
@given(st.integers(0, 3), st.integers(0, 3), st.integers(0, 12), st.integers(0, 12), st.booleans())
def test_a_slice_of_a_padded_value_is_that_of_one_device(
    before: int, after: int, start: int, end: int, is_read_twice: bool
) -> None:
    x = torch.arange(18, dtype=torch.float64).view(2, 9) / 9
    model = Shifted((before, after), start, end, is_read_twice)
    compiled = compile(model, Mesh(cp=3), {"x": P(None, "cp")}, args=(x,), train=False)
    torch.testing.assert_close(compiled.simulate(x)[0], model(x))


def test_a_shift_by_one_sends_one_position() -> None:
    x = torch.zeros(2, 9)
    compiled = compile(Shifted((0, 1), 1, 10, False), Mesh(cp=3), {"x": P(None, "cp")}, args=(x,), train=False)
    assert [each.wire_bytes for each in compiled.collectives if each.kind == "collective_permute"] == [2 * 4]
