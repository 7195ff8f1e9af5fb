"""Chooses the program of a call of new sizes: one compiled for the call alone, or one shared by a region of sizes.

Compiling for a region takes several times as long as compiling for a call. So the first two calls that differ in sizes
alone are compiled for themselves; at the third, the dims that differed get symbols. Before a region is used, its
program must equal that of a call compiled for itself, at the sizes of that call; a region that differs is dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from shardc.capture.signature import Signature, symbols_of
from shardc.program.program import Pin

from .compiled_call import Compilation
from .request import CallRequest

LOG = logging.getLogger("shardc")
NUM_ALONE = 2  # calls compiled for themselves before a region is tried
MAX_REGIONS = 3  # for calls that differ in sizes alone


class CompiledRegion(Protocol):
    """A model compiled for a region of sizes. ``is_one_call``: whether the region has the sizes of one call only."""

    @property
    def is_one_call(self) -> bool: ...

    def at(self, args: Sequence[Any], kwargs: Mapping[str, Any], signature: Signature) -> Compilation | None:
        """The compilation for a call; None for sizes that are not in the region."""

    def agrees(self, compilation: Any) -> bool | None:
        """Whether its program equals that of a call compiled for itself; None if that cannot be decided."""


@dataclass(slots=True)
class Region:
    """A region, and whether its program has equalled one that was compiled for a call alone."""

    compiled: CompiledRegion
    is_confirmed: bool = False


@dataclass(slots=True)
class CallSizes:
    """The compiled programs of calls that differ only in the sizes of tensors.

    State: ``alone``, the latest calls compiled for themselves; ``regions``; ``num_tried``, the number of regions
    tried, in which a useless one counts twice; ``num_compiled``, how often the model was compiled.
    """

    alone: list[Any] = field(default_factory=list)
    regions: list[Region] = field(default_factory=list)
    num_tried: int = 0
    num_compiled: int = 0

    def compilation(
        self, request: CallRequest, fixed: tuple[Pin, ...], compile_call: Callable[[], Compilation]
    ) -> tuple[Compilation, bool]:
        """The compilation of a call, and whether a region made it. ``compile_call``: compiles for the call alone."""
        for region in self.regions:
            here = _at(region, request)
            if here is not None and region.is_confirmed:
                return here, True
            if here is not None:
                self._compile_alone(compile_call)
                self._confirm(region)
                return self.alone[-1], False
        if len(self.alone) >= NUM_ALONE and self.num_tried < MAX_REGIONS:
            here = self._try_region(request, fixed)
            if here is not None:
                return here, True
        self._compile_alone(compile_call)
        return self.alone[-1], False

    def _compile_alone(self, compile_call: Callable[[], Compilation]) -> None:
        self.alone = [*self.alone[-NUM_ALONE:], compile_call()]
        self.num_compiled += 1

    def _try_region(self, request: CallRequest, fixed: tuple[Pin, ...]) -> Compilation | None:
        """The compilation of a call by a new region; None if there is no such region, or it is wrong."""
        symbols = symbols_of([*(each.convention.signature for each in self.alone), request.key[0]])
        if not symbols:  # all dims that have changed are of size 0 or 1 here
            return None
        compiled = _tried(partial(self.alone[-1].compile_region, request.args, request.kwargs, fixed, symbols))
        is_in_vain = compiled is None or compiled.is_one_call  # the model loops over a dim, or has a size twice
        self.num_tried += 2 if is_in_vain else 1
        if compiled is None:
            return None
        self.num_compiled += 1
        region = Region(compiled)
        self.regions.append(region)
        self._confirm(region)
        return _at(region, request) if region in self.regions else None

    def _confirm(self, region: Region) -> None:
        """Compare a region with the calls compiled for themselves; drop it if it differs."""
        found = [_tried(partial(region.compiled.agrees, each), False) for each in self.alone]
        region.is_confirmed = True in found
        if False in found:
            self.regions.remove(region)


def _at(region: Region, request: CallRequest) -> Compilation | None:
    found: Compilation | None = _tried(partial(region.compiled.at, request.args, request.kwargs, request.key[0]))
    return found


def _tried(make: Callable[[], Any], otherwise: Any = None) -> Any:
    """Return ``make()``, or ``otherwise`` if it raises: an error of a region, of any kind, is no error of the call.

    The call is then compiled for itself, and the logger ``shardc`` reports the error at the level DEBUG.
    """
    try:
        return make()
    except Exception as error:
        LOG.debug("no program for many sizes: %s", error, exc_info=True)
        return otherwise
