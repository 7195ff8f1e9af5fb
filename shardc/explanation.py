"""What ``explain`` answers: the way from annotations to a value, as data and as text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Kind = Literal["parameter", "buffer", "input", "value", "output", "module", "collective"]
REPLICATED = "default: replicated"


@dataclass(frozen=True, slots=True)
class Step:
    """A value that an axis came to cut, or over which a reduction came to be open.

    ``value`` reads as in the dump, ``type`` with its sharding. ``via``: the op that it came through, whose name in the
    dump ``call`` is; empty on the annotated value. ``module`` and ``location``: the op's in the user's model.
    """

    value: str
    type: str
    via: str = ""
    call: str = ""
    module: str = ""
    location: str = ""


@dataclass(frozen=True, slots=True)
class Chain:
    """How an axis came from an annotation, or from what else ``end`` names, to a value: first the annotated one."""

    axis: str
    end: str
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why something of a program is as it is.

    ``name`` reads as in the dump. ``chains``: one for each axis that cuts it, or over which a reduction is open.
    ``placed``: the annotation that is about it itself, if there is one. ``parts``: of a module what it returns and then
    its collectives, of a bucket its members.
    """

    name: str
    kind: Kind
    type: str = ""
    module: str = ""
    location: str = ""
    chains: tuple[Chain, ...] = ()
    placed: str = ""
    parts: tuple[Explanation, ...] = field(default=())

    @property
    def ends(self) -> tuple[str, ...]:
        """The annotations, or options, that it comes from; ``default: replicated`` where there is none."""
        found = [chain.end for chain in self.chains] + [self.placed] * bool(self.placed)
        found += [end for part in self.parts for end in part.ends if end != REPLICATED]
        return tuple(dict.fromkeys(found)) or (REPLICATED,)

    def text(self) -> str:
        """For a reader."""
        return "\n".join(self._lines()) + "\n"

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "parts": [part.record() for part in self.parts], "ends": self.ends}

    def _lines(self) -> Iterator[str]:
        place = ", ".join(filter(None, (self.module, self.location)))
        yield " ".join(filter(None, (f"{self.kind} {self.name}:", self.type, f"({place})" if place else "")))
        if self.placed:
            yield f"  annotated {self.placed}"
        for chain in self.chains:
            yield f"  {chain.axis} comes from {chain.end}"
            yield from (f"    {_step_text(step)}" for step in chain.steps)
        if self.ends == (REPLICATED,):
            yield f"  {REPLICATED}: no annotation reaches it"
        for part in self.parts:
            yield from (f"  {line}" for line in part._lines())


def _step_text(step: Step) -> str:
    place = ", ".join(filter(None, (step.module, step.location)))
    way = f"  by {step.via}" + (f" ({place})" if place else "") if step.via else ""
    return f"{step.value} {step.type}{way}"
