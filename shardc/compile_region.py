"""A model compiled for many sizes at once: for a region of the sizes that some dims of its inputs may have.

Passes run on a program in which numbers that follow from sizes know how, up to the last program in global shapes. At
given sizes it is that program with their values in it; the last pass runs on values, and nothing after it knows
of symbols.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from shardc.capture.capture import Captured
from shardc.capture.signature import Signature, TensorLeaf
from shardc.capture.values.region import Symbols
from shardc.compiler import Compiled, Making, Request, capture_model, match_annotations
from shardc.language.errors import CaptureError
from shardc.passes.order import UNANNOTATED, WHOLE
from shardc.program.at_sizes import AtSizes, is_same_program

if TYPE_CHECKING:
    from torch import nn


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
        earlier = {name: partial(at.program, program) for name, program in before.kept.items()}
        making = Making(before.model, replace(before.request, args=args, kwargs=kwargs), earlier, unused=before.unused)
        making.run(at.program(before.kept[WHOLE.__name__]), after=WHOLE)
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
