"""Compile a model once for a region: many sizes that some dims of its inputs may have.

Numbers that follow from sizes are symbolic in the captured program. The passes run on it, up to the last program in
global shapes. A call with given sizes takes that program with plain numbers in place of symbolic ones. The last pass
runs on plain numbers, and nothing after it knows of symbols.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import fx
from torch.fx.immutable_collections import immutable_dict, immutable_list

from shardc.capture.capture import Captured
from shardc.capture.signature import Signature, TensorLeaf
from shardc.capture.values.region import Symbols
from shardc.capture.values.symbols import Sizes, value_at
from shardc.compiler import Compiled, Making, Request, capture_model, match_annotations
from shardc.language.errors import CaptureError
from shardc.language.mesh import Mesh
from shardc.language.size import Symbolic
from shardc.passes.order import UNANNOTATED, WHOLE
from shardc.program.program import Program
from shardc.program.provenance import Origin, Source

if TYPE_CHECKING:
    from torch import nn

WITHOUT_SIZES = (type, Mesh, Origin, Source)


@dataclass(frozen=True, slots=True)
class CompiledRegion:
    """A model compiled for a region of sizes. ``kind``: the class of the compiled model that ``at`` returns."""

    captured: Captured
    making: Making
    kind: type[Compiled]

    @property
    def is_one_call(self) -> bool:
        """Whether the region has no other sizes than those that it was compiled for."""
        return self.captured.region is None or self.captured.region.is_one_call

    def at(self, args: Sequence[Any], kwargs: Mapping[str, Any], signature: Signature) -> Compiled | None:
        """The compiled model for a call of this signature; None for sizes outside the region.

        Its local program is verified. Raises an InternalError if that fails.
        """
        captured, before = self.captured, self.making
        assert captured.region is not None
        types = {name: leaf.type for name, leaf in signature.leaves if isinstance(leaf, TensorLeaf)}
        sizes = captured.region.values(types)
        if sizes is None:
            return None
        at = AtSizes(sizes)
        earlier = {name: partial(program.mapped, at) for name, program in before.kept.items()}
        request = replace(before.request, args=args, kwargs=kwargs)
        making = Making(before.model, request, earlier, unused=before.unused, idle=before.idle)
        making.run(before.kept[WHOLE.__name__].mapped(at), after=WHOLE)
        outputs, objects = at(captured.convention.outputs), at(captured.convention.objects)
        convention = replace(captured.convention, outputs=outputs, objects=objects, signature=signature)
        compiled = making.end(convention, None, {})
        return self.kind(**{each.name: getattr(compiled, each.name) for each in fields(compiled)})

    def agrees(self, compiled: Compiled) -> bool | None:
        """Whether the region gives the program of ``compiled``, which was compiled for its own sizes alone.

        None if those sizes are outside the region, or if estimated costs chose another plan for them.
        """
        assert compiled.request is not None
        here = self.at(compiled.request.args, compiled.request.kwargs, compiled.convention.signature)
        if here is None:
            return None
        if is_same_program(here.program, compiled.program):
            return True
        return None if is_same_program(here.at(UNANNOTATED), compiled.at(UNANNOTATED)) else False


def compile_region(model: nn.Module, request: Request, symbols: Symbols, kind: type[Compiled]) -> CompiledRegion:
    """Compile a model for a region of sizes of the dims that have symbols. The sizes of the request are in it.

    Choices by cost are made at the sizes of the request. Raises what ``compile_request`` raises, torch's own errors for
    ops that cannot have symbolic sizes, and a CaptureError for a pipeline and for a program that depends on values.
    """
    if request.options.pipeline:
        raise CaptureError("a region of sizes", "it is asked of a pipeline", "compile a pipeline for each size")
    making = Making(model, request)
    matched = match_annotations(model, request)
    captured = capture_model(model, request, matched, symbols)
    if captured.has_guards:  # its programs differ by values, and not by sizes alone
        raise CaptureError("a region of sizes", "the program depends on values", "compile it for each size")
    making.run(making.begin(captured, matched), until=WHOLE)
    return CompiledRegion(captured, making, kind)


class AtSizes:
    """Replaces symbolic numbers in values of any kind by their numbers at given sizes."""

    def __init__(self, sizes: Sizes) -> None:
        self._sizes = sizes
        self._known: dict[int, tuple[Any, Any]] = {}  # by id: a value, which is kept alive, and its result

    def __call__(self, value: Any) -> Any:
        """The value at these sizes."""
        if isinstance(value, Symbolic):
            return value_at(value, self._sizes)
        if type(value) in (tuple, list, immutable_list):
            return self._once(value, lambda: self._mapped(value))
        if type(value) in (dict, immutable_dict):
            return self._once(value, lambda: {self(key): self(entry) for key, entry in value.items()})
        if is_dataclass(value) and not isinstance(value, WITHOUT_SIZES):
            return self._once(value, lambda: self._replaced(value))
        return value

    def _mapped(self, value: Any) -> Any:
        """A tuple or list with its entries at these sizes; the same object if none changes."""
        entries = [self(entry) for entry in value]
        is_same = all(entry is before for entry, before in zip(entries, value, strict=True))
        return value if is_same else type(value)(entries)

    def _once(self, value: Any, make: Callable[[], Any]) -> Any:
        if id(value) not in self._known:
            self._known[id(value)] = value, make()
        return self._known[id(value)][1]

    def _replaced(self, value: Any) -> Any:
        """A dataclass with its fields at these sizes; the same object if none changes."""
        before = {each.name: getattr(value, each.name) for each in fields(value) if each.init}
        after = {name: self(entry) for name, entry in before.items()}
        changed = {name: entry for name, entry in after.items() if entry is not before[name]}
        return replace(value, **changed) if changed else value


def is_same_program(one: Program, other: Program) -> bool:
    """Whether two programs compute and send the same, node by node. Names of nodes may differ."""
    if (one.inputs, one.outputs) != (other.inputs, other.outputs):
        return False
    return _described(one) == _described(other)


def _described(program: Program) -> list[Any]:
    places = {node: f"%{i}" for i, node in enumerate(program.graph.nodes)}
    return [
        (node.op, node.target if node.op == "call_function" else "", fx.map_arg((node.args, node.kwargs), places.get),
         program.types(node), program.shardings(node))
        for node in places
    ]  # fmt: skip
