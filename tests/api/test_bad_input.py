"""What a user did wrong is said in four parts: who, what is, what does not fit, and what to type.

Errors of patterns, of placements and of two annotations of one value are in test_annotations.py, those of processes in
test_distributed.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc import Mesh, P, ShardingError

MESH = Mesh(dp=2, tp=4)


class Net(nn.Module):
    def __init__(self, spec: P | None = None) -> None:
        super().__init__()
        self.up, self.down, self.spec = nn.Linear(8, 16), nn.Linear(16, 6), spec

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        y = self.down(self.up(x).relu()) * scale
        return y if self.spec is None else shardc.annotate(y, self.spec)


def compile(
    annotations: dict[str, Any] | None = None, model: nn.Module | None = None, mesh: Any = MESH, **options: Any
):
    return shardc.compile(model or Net(), mesh, annotations, args=(torch.zeros(4, 8),), **options)


def text(action: Callable[[], object]) -> str:
    """The error as a user reads it."""
    with pytest.raises(ShardingError) as raised:
        action()
    error = raised.value
    assert all((error.who, error.what, error.problem, error.remedy))
    return str(error)


ANNOTATIONS: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "an unknown axis": (
        lambda: {"up.weight": P("tq")},
        "parameter 'up.weight': P('tq') on shape [16, 8], dim 0: the mesh is Mesh(dp=2, tp=4)\n"
        "  it has no such axis\n"
        "  did you mean tp?",
    ),
    "a pattern that is no string": (
        lambda: {3: P()},
        "annotation 3: of type int\n  a pattern is a string, a glob over names\n  write for example '*.weight'",
    ),
    "an axis unlike all others": (
        lambda: {"input:x": P("model")},
        "input 'x': P('model') on shape [4, 8], dim 0: the mesh is Mesh(dp=2, tp=4)\n"
        "  it has no such axis\n"
        "  use one of dp, tp",
    ),
    "an unknown axis in blocks": (
        lambda: {"up.weight": P(shardc.blocks(2, "tq"))},
        "parameter 'up.weight': P(blocks(2, 'tq')) on shape [16, 8], dim 0: the mesh is Mesh(dp=2, tp=4)\n"
        "  it has no such axis\n"
        "  did you mean tp?",
    ),
    "an axis on two dims": (
        lambda: {"up.weight": P("tp", "tp")},
        "parameter 'up.weight': P('tp', 'tp') on shape [16, 8]: axis 'tp' of Mesh(dp=2, tp=4)\n"
        "  an axis can cut one dim of a value, once\n"
        "  write 'tp' in one place only",
    ),
    "an axis twice on a dim": (
        lambda: {"up.weight": P(("tp", "dp", "tp"))},
        "parameter 'up.weight': P(('tp', 'dp', 'tp')) on shape [16, 8]: axis 'tp' of Mesh(dp=2, tp=4)\n"
        "  an axis can cut one dim of a value, once\n"
        "  write 'tp' in one place only",
    ),
    "an axis and a part of it": (
        lambda: {"up.weight": P("tp", "tp:(1)2")},
        "parameter 'up.weight': P('tp', 'tp:(1)2') on shape [16, 8]: axis 'tp' of Mesh(dp=2, tp=4)\n"
        "  an axis can cut one dim of a value, once\n"
        "  write 'tp' in one place only",
    ),
    "a part that the axis does not have": (
        lambda: {"up.weight": P("tp:(1)3")},
        "parameter 'up.weight': P('tp:(1)3') on shape [16, 8]: Mesh(dp=2, tp=4), tp=4\n"
        "  the axis does not split that way\n"
        "  write 'tp', or tp:(pre)size where pre * size divides 4",
    ),
    "a part that is none": (
        lambda: {"up.weight": P("tp:2")},
        "parameter 'up.weight': P('tp:2') on shape [16, 8], dim 0: axis part 'tp:2'\n"
        "  a part reads axis:(pre)size\n"
        "  write for example 'tp:(2)2', or 'cp:zigzag' for positions",
    ),
    "an output without a match": (
        lambda: {"output:out": P("dp")},
        "annotation 'output:out': a pattern over 1 name (output)\n"
        "  it matches nothing\n"
        "  did you mean output?",
    ),
    "more entries than dims": (
        lambda: {"up.bias": P(None, "tp")},
        "parameter 'up.bias': P(None, 'tp') on shape [16]\n"
        "  2 entries for 1 dim\n"
        "  write at most 1 entry",
    ),
    "a dim that has no such blocks": (
        lambda: {"down.weight": P(shardc.blocks(4, "tp"))},
        "parameter 'down.weight': P(blocks(4, 'tp')) on shape [6, 16], dim 0: size 6\n"
        "  6 does not split in 4 equal blocks\n"
        "  use a block count that divides 6",
    ),
    "a string for a P": (
        lambda: {"up.weight": "tp"},
        "annotation 'up.weight': 'tp'\n"
        "  an annotation is a P or a sequence of DTensor placements\n"
        "  write P('tp')",
    ),
    "dots before the end": (
        lambda: {"up.weight": P(..., "tp")},
        "P(..., 'tp'): entry 0 is '...', and others follow\n"
        "  '...' stands for all further dims\n"
        "  write P.OPEN for one open dim",
    ),
    "a number for an axis": (
        lambda: {"up.weight": P(None, 0)},
        "P(None, 0): entry 1 is 0\n"
        "  an entry is the name of a mesh axis, a tuple of names, blocks(...), None or P.OPEN\n"
        "  write P('dp', None)",
    ),
    "no blocks": (
        lambda: {"up.weight": P(shardc.blocks(0, "tp"))},
        "blocks(0, 'tp'): 0 blocks\n"
        "  blocks takes a count, 1 or more, and axes\n"
        "  write blocks(3, 'tp')",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ANNOTATIONS)
def test_an_annotation_that_does_not_fit_is_refused(name: str) -> None:
    annotations, expected = ANNOTATIONS[name]
    assert text(lambda: compile(annotations())) == expected


def test_all_annotations_in_the_model_that_do_not_fit_are_named_at_once_with_their_lines() -> None:
    """The gradient of an annotated value would say the same again, and does not."""
    line = Net.forward.__code__.co_firstlineno + 2
    inner = Net(P(None, None, "tp"))
    found = text(lambda: compile(model=nn.Sequential(inner, nn.Linear(6, 8), Net(P("tq")))))
    assert found == (
        "2 problems:\n"
        f"annotate in 0 (test_bad_input.py:{line}): P(None, None, 'tp') on shape [4, 6]\n"
        "  3 entries for 2 dims\n"
        "  write at most 2 entries\n"
        f"annotate in 2 (test_bad_input.py:{line}): P('tq') on shape [4, 6], dim 0: the mesh is Mesh(dp=2, tp=4)\n"
        "  it has no such axis\n"
        "  did you mean tp?"
    )


MESHES: dict[str, tuple[Callable[[], object], str]] = {
    "no axes": (
        Mesh,
        "Mesh(): no axes\n"
        "  a mesh needs at least one axis\n"
        "  write Mesh(dp=2)",
    ),
    "an empty axis": (
        lambda: Mesh(dp=2, tp=0),
        "Mesh: axis 'tp' has size 0\n"
        "  a size is a whole number of ranks, 1 or more\n"
        "  write Mesh(tp=2)",
    ),
    "a rank twice": (
        lambda: Mesh(dp=2, device_ids=[0, 0]),
        "Mesh: device_ids=(0, 0)\n"
        "  Mesh(dp=2, device_ids=(0, 0)) has 2 ranks, each must appear once\n"
        "  list each of 0..1 once",
    ),
    "no mesh": (
        lambda: compile(mesh=(2, 4)),
        "mesh: of type tuple\n"
        "  shardc needs a shardc.Mesh or a DeviceMesh with mesh_dim_names\n"
        "  write Mesh(dp=2, tp=4) or init_device_mesh(device, (2, 4), mesh_dim_names=('dp', 'tp'))",
    ),
    "a mesh larger than the world": (
        lambda: shardc.parallelize(Net(), MESH, runtime="distributed"),
        "mesh: Mesh(dp=2, tp=4) has 8 ranks\n"
        "  the job has 1\n"
        "  start it with torchrun --nproc-per-node 8, or make the mesh smaller",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MESHES)
def test_a_mesh_that_is_invalid_or_does_not_fit_is_refused(name: str) -> None:
    action, expected = MESHES[name]
    assert text(action) == expected


@pytest.fixture(scope="module")
def compiled() -> shardc.Compiled:
    return compile({"x": P("dp")})


CALLS: dict[str, tuple[Callable[[shardc.Compiled], object], str]] = {
    "another shape": (
        lambda compiled: compiled.simulate(torch.zeros(6, 8)),
        "input 'x': f32[6, 8]\n"
        "  the program was captured for f32[4, 8]\n"
        "  pass an input like the captured one, or compile again for this one",
    ),
    "another dtype": (
        lambda compiled: compiled.simulate(torch.zeros(4, 8).double()),
        "input 'x': f64[4, 8]\n"
        "  the program was captured for f32[4, 8]\n"
        "  pass an input like the captured one, or compile again for this one",
    ),
    "an argument more": (
        lambda compiled: compiled.simulate(torch.zeros(4, 8), scale=2.0),
        "input 'scale': given as 2.0\n"
        "  the program was captured without it\n"
        "  leave it out, or compile again with 'scale'",
    ),
    "the gradient of no output": (
        lambda compiled: compiled.simulate(torch.zeros(4, 8), grad_outputs={"outpt": torch.ones(4, 6)}),
        "grad_outputs['outpt']: given f32[4, 6]\n"
        "  no output of this name has a gradient\n"
        "  did you mean output?",
    ),
    "a gradient of another shape": (
        lambda compiled: compiled.simulate(torch.zeros(4, 8), grad_outputs={"output": torch.ones(6)}),
        "grad_outputs['output']: given f32[6]\n"
        "  the output is f32[4, 6]\n"
        "  pass f32[4, 6]",
    ),
    "no such pass": (
        lambda compiled: compiled.at("propagte"),
        "pass 'propagte': the passes are capture, cut_stages, canonicalize, keep_dims, order_positions, cut_blocks, "
        "propagate, decompose, insert_reshards, store, accumulate, lower_reshards, fuse_collectives, mask_padding, "
        "offload, rematerialize, cut_saved, bucket_collectives, encode_collectives, chunk_dots, "
        "overlap_collectives, localize\n"
        "  there is no such pass\n"
        "  did you mean propagate?",
    ),
    "no such format": (
        lambda compiled: compiled.dump("txt"),
        "format 'txt': dump knows text, json, dot, html\n"
        "  there is no such format\n"
        "  did you mean text?",
    ),
    "no such differentiable output": (
        lambda compiled: compile(model=compiled.model, differentiable=("logits",)),
        "differentiable='logits': the outputs are output\n"
        "  no output of this name has a gradient\n"
        "  use one of output",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_does_not_fit_the_compiled_program_is_refused(name: str, compiled: shardc.Compiled) -> None:
    action, expected = CALLS[name]
    assert text(lambda: action(compiled)) == expected


def test_inputs_that_forward_does_not_take_are_refused_with_its_signature() -> None:
    x = torch.zeros(4, 8)
    assert text(lambda: shardc.compile(Net(), MESH, {}, args=x)) == (
        "the inputs: forward takes (x: 'Tensor', scale: 'float' = 1.0) -> 'Tensor'\n"
        "  too many positional arguments\n"
        "  give what forward takes: args=(x,) for a single tensor, kwargs={'name': y} for those by name"
    )
    assert "got an unexpected keyword argument 'y'" in text(
        lambda: shardc.compile(Net(), MESH, {}, args=(x,), kwargs={"y": x})
    )


def test_annotations_that_are_no_mapping_and_models_that_are_no_module_are_refused() -> None:
    assert text(lambda: compile([("up.weight", P())])) == (  # type: ignore[arg-type]
        "annotations: of type list\n  annotations map patterns to specs\n  write {'*.weight': P('tp')}"
    )
    assert text(lambda: shardc.compile(lambda x: x, MESH, {}, args=(torch.zeros(2),))) == (  # type: ignore[arg-type]
        "model: of type function\n  shardc compiles an nn.Module\n  put the function in a module's forward"
    )


@pytest.mark.parametrize("spec", ["blocks(0,tp)", "blocks(2,)", "dp,,tp"])
def test_a_spec_with_an_entry_that_says_nothing_is_refused(spec: str) -> None:
    text(lambda: P.parse(spec))


def test_axes_of_blocks_come_one_by_one() -> None:
    assert "write blocks(3, 'tp')" in text(lambda: shardc.blocks(2, ("dp", "tp")))  # type: ignore[arg-type]
