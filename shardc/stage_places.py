"""Where the user says that stages begin: at modules that globs match, and at ``stage_boundary`` in the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import accumulate, pairwise

from shardc.error import OptionError, did_you_mean
from shardc.forward_flow import Flow


def places_of_cuts(flow: Flow, cuts: Sequence[str], num_stages: int) -> list[int]:
    """The places of the ops with which the user lets a stage begin, rising, the very first left out.

    ``cuts``: globs of module paths. An OptionError for one that matches nothing and for more places than cuts.
    """
    places = sorted({*_matched(flow, cuts), *_marked(flow)})
    if len(places) >= num_stages:
        raise _too_many(cuts, [flow.program.source(flow.ops[i]).module for i in places], num_stages)
    return places


def places_of_homes(flow: Flow, homes: Mapping[str, frozenset[int]]) -> list[int]:
    """The places where units begin so that stages may hold what they hold: ``homes`` of parameters by name.

    Between two ops of which other stages hold the parameters it is where the fewest bytes cross.
    """
    held = [frozenset(homes[name] for name in names if name in homes) for names in flow.parameters]
    readers = [i for i, stages in enumerate(held) if stages]
    return [min(range(a + 1, b + 1), key=flow.crossing.__getitem__) for a, b in pairwise(readers) if held[a] != held[b]]


def _matched(flow: Flow, cuts: Sequence[str]) -> set[int]:
    """The places at which modules that the globs match begin, of nested ones the outermost; not the very first."""
    begin: dict[str, int] = {}
    for i in reversed(range(len(flow.ops))):
        path = flow.program.source(flow.ops[i]).module
        begin.update({path[:end]: i for end, letter in enumerate(f"{path}.") if letter == "."})
    found: set[int] = set()
    for pattern in cuts:
        matched = {path for path in begin if fnmatchcase(path, pattern)}
        if not matched:
            who, known = f"Pipeline(cuts={tuple(cuts)!r})", [path for path in dict.fromkeys(reversed(begin)) if path]
            remedy = did_you_mean(pattern, known) or f"use one of {', '.join(known[:8])}"
            raise OptionError(who, f"{pattern!r} is a glob over {len(known)} modules", "it matches nothing", remedy)
        found |= {begin[path] for path in matched if not any(path.startswith(f"{above}.") for above in matched)}
    return found - {0}


def _marked(flow: Flow) -> set[int]:
    """The places of the first ops after the model's own marks; not the very first."""
    marks = list(accumulate((flow.program.source(node).marks for node in flow.ops), max))
    return {i for i in range(1, len(marks)) if marks[i] > marks[i - 1]}


def _too_many(cuts: Sequence[str], modules: Sequence[str], num_stages: int) -> OptionError:
    return OptionError(
        f"Pipeline(cuts={tuple(cuts)!r})",
        f"with the model's stage_boundary stages begin in {', '.join(modules)}, and at the start",
        f"there are {num_stages} stages for these {len(modules) + 1} beginnings",
        f"say {len(modules) + 1} stages or more, or cut less",
    )
