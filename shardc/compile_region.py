"""A model compiled for many sizes at once: for a region of the sizes that some dims of its inputs may have.

Passes run on a program in which numbers that follow from sizes know how, up to the last program in global shapes. At
given sizes it is that program with their values in it; the last pass runs on values, and nothing after it knows
of symbols.
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
    """A model compiled for a region of sizes. ``kind``: the class of what it is at some of them."""

    captured: Captured
    making: Making
    kind: type[Compiled]

    @property
    def is_one_call(self) -> bool:
        """Whether it holds for no other sizes than those that it was compiled for."""
        return self.captured.region is None or self.captured.region.is_one_call

    def at(self, args: Sequence[Any], kwargs: Mapping[str, Any], signature: Signature) -> Compiled | None:
        """The compiled model for a call of this signature; None for sizes that are not in the region.

        Its program is verified as one that passes have made. Raises an InternalError where that fails.
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
        """Whether it is the same at the sizes of a model that was compiled for them alone.

        None where they are not in the region, or where prices have chosen another plan for them.
        """
        assert compiled.request is not None
        here = self.at(compiled.request.args, compiled.request.kwargs, compiled.convention.signature)
        if here is None:
            return None
        if is_same_program(here.program, compiled.program):
            return True
        return None if is_same_program(here.at(UNANNOTATED), compiled.at(UNANNOTATED)) else False


def compile_region(model: nn.Module, request: Request, symbols: Symbols, kind: type[Compiled]) -> CompiledRegion:
    """Compile a model for a region of sizes of the dims that have symbols, in which those of the request are.

    What prices choose, they choose at those. Raises what ``compile_request`` raises, torch's own errors for ops that
    cannot have symbolic sizes, and a CaptureError where there can be no region.
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
    """Gives values of any kind with numbers in place of what follows from sizes; others are given back themselves."""

    def __init__(self, sizes: Sizes) -> None:
        self._sizes = sizes
        self._known: dict[int, tuple[Any, Any]] = {}  # by identity: a value, which is kept alive, and what it is here

    def __call__(self, value: Any) -> Any:
        """A value here."""
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
        """A tuple or list with its entries as they are here."""
        entries = [self(entry) for entry in value]
        is_same = all(entry is before for entry, before in zip(entries, value, strict=True))
        return value if is_same else type(value)(entries)

    def _once(self, value: Any, make: Callable[[], Any]) -> Any:
        if id(value) not in self._known:
            self._known[id(value)] = value, make()
        return self._known[id(value)][1]

    def _replaced(self, value: Any) -> Any:
        """A dataclass with its fields as they are here."""
        before = {each.name: getattr(value, each.name) for each in fields(value) if each.init}
        after = {name: self(entry) for name, entry in before.items()}
        changed = {name: entry for name, entry in after.items() if entry is not before[name]}
        return replace(value, **changed) if changed else value


def is_same_program(one: Program, other: Program) -> bool:
    """Whether two programs compute and send the same, node by node, whatever the names of nodes are."""
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
