"""The gate of a module: all ranks pass it together before the module runs collectives, or all raise the same error."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest

from shardc.language.errors import RankError, ShardingError

from .agreement import Agreement
from .batch import BatchCheck
from .entry import DIGEST, Entry, Flag, Kind

Texts = Mapping[str, Callable[[], str]]  # the text behind each digest of an entry, by the field of the entry
MODULE_DIGEST = 8
COMMENT = "\t"  # the rest of a line after it is shown, but not compared
NOTHING = "nothing in its place"
LONGEST = 200  # characters of a line that are shown
WITH_BATCH = (Kind.FORWARD, Kind.BACKWARD)  # entries that compare inputs

DOES = {
    Kind.CONSTRUCT: "makes {} with parallelize",
    Kind.COMPILE: "compiles {} for the args= of parallelize",
    Kind.COMPILED: "compares its program of {}",
    Kind.FORWARD: "calls forward of {}",
    Kind.BACKWARD: "calls backward of {}",
    Kind.REDUCE: "reads gradients of {}, as an optimizer's step and clipping do",
    Kind.CLIP: "calls clip_grad_norm_ of {}",
    Kind.UNSCALE: "unscales gradients in a GradScaler",
    Kind.GUARD: "runs {}, whose program depends on values",
    Kind.READ: "reads {}",
    Kind.EPOCH: "begins an epoch of {}",
    Kind.CHECKPOINT: "saves, loads or exports {}",
}


@dataclass(frozen=True, slots=True)
class Passed:
    """The result of passing, equal on all ranks: whether one of them must compile, or gather its parameters."""

    compiles: bool
    gathers: bool


class Gate:
    """The gate of one module. ``key``: its number among the modules on these ranks; ``calls``: forward calls so far.

    A call counts once all ranks have agreed on it, so that the count is equal on all of them even after an error.
    """

    def __init__(self, agreement: Agreement, name: str, key: str) -> None:
        self.agreement, self.name, self.key, self.calls = agreement, name, key, 0
        self.batches = BatchCheck("never")
        self.digest = digest(f"{key} {name}", MODULE_DIGEST)

    def of_copy(self) -> Gate:
        """The gate of a copy of the module, numbered in the order in which copies are made."""
        self.agreement.num_modules[self.key] += 1
        gate = Gate(self.agreement, self.name, f"{self.key}.{self.agreement.num_modules[self.key]}")
        gate.batches = BatchCheck(self.batches.mode)
        return gate

    def enter(self, entry: Entry, texts: Texts | None = None) -> Passed:
        """Pass together with all other ranks.

        Raises a ShardingError on every rank if their entries differ, and a RankError if another rank has failed on its
        way here. ``texts``: the texts behind digests, for error messages.
        """
        batch = self.batches.take(entry.kind == Kind.FORWARD) if entry.kind in WITH_BATCH else None
        if batch is not None and batch.numbers:
            entry, texts = replace(entry, batch=batch.digest), {**(texts or {}), "batch": batch.__str__}
        sent = entry.pack()
        received = self.agreement.exchange(sent, lambda: self.doing(entry))
        if received.count(sent) == len(received):
            return Passed(not entry.program, entry.gathers)
        entries = list(map(Entry.unpack, received))
        for difference in DIFFERENCES:
            if (pair := difference.first_pair(entries)) is not None:
                raise self._refusal(difference, pair, entry, texts or {})
        return Passed(not all(each.program for each in entries), any(each.gathers for each in entries))

    def compare_result(self, result: str) -> None:
        """Compare the result of an op on which the choice of the program depends: all ranks must run the same one."""
        entry = Entry(Kind.GUARD, self.digest, request=digest(result))
        self.enter(entry, {"request": lambda: f"result: {result}"})

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Tell the other ranks of an error in the block: they raise it when they enter next."""
        try:
            yield
        except RankError:  # all ranks know
            raise
        except Exception as error:
            self.agreement.tell(error)
            raise

    def doing(self, entry: Entry) -> str:
        """The action as text, ``calls forward of GPT (call 4)``; with the module's number unless it is the first."""
        numbers = [f"module {self.key}"] * (self.key != "1") + [f"call {entry.call}"] * (entry.call > 0)
        return DOES[entry.kind].format(f"{self.name} ({', '.join(numbers)})" if numbers else self.name)

    def _refusal(self, difference: Difference, pair: tuple[int, int], own: Entry, texts: Texts) -> ShardingError:
        """The error for entries that differ; both ranks of the pair send their texts to all."""
        text = self.doing(own) if difference.name == "place" else ""
        if difference.name in texts and self.agreement.index in pair:
            text = texts[difference.name]()
        found = self.agreement.exchange(text.encode() if self.agreement.index in pair else b"")
        ranks = [self.agreement.ranks[i] for i in pair]
        return difference.error(ranks, [found[i].decode() for i in pair], self.doing(own))


def digest(text: str, size: int = DIGEST) -> bytes:
    """A digest of a text, of ``size`` bytes."""
    return hashlib.blake2b(text.encode(), digest_size=size).digest()


def first_difference(texts: Sequence[str]) -> tuple[str, str]:
    """The first line in which two texts differ, in the version of each."""
    lines = [{line.partition(COMMENT)[0]: line for line in text.splitlines()} for text in texts]
    pairs = zip_longest(*lines, fillvalue=NOTHING)
    one, other = next(((one, other) for one, other in pairs if one != other), (NOTHING, NOTHING))
    if one in lines[1] and other not in lines[0]:  # the other text has an additional line
        one = NOTHING
    elif other in lines[0] and one not in lines[1]:
        other = NOTHING
    one, other = lines[0].get(one, one), lines[1].get(other, other)
    same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), 0)
    return _shown(one, same), _shown(other, same)


def _shown(line: str, at: int) -> str:
    """A line and its comment; a long line is cut to the part around the character ``at``."""
    text, _, comment = line.partition(COMMENT)
    start = max(0, min(at - LONGEST // 2, len(text) - LONGEST))
    cut = text[start : start + LONGEST]
    text = f"{'...' if start else ''}{cut}{'...' if start + LONGEST < len(text) else ''}"
    return f"{text}  # {comment}" if comment else text


@dataclass(frozen=True, slots=True)
class Difference:
    """A part of entries that must be equal: ``value`` of an entry, None if the rank does not know it.

    ``problem`` and ``remedy``: the error's texts if it differs. ``has_lines``: whether ranks send many lines, of which
    the first that differs is shown; else they send a phrase each. ``reason``: the likely cause, given both texts.
    """

    name: str
    value: Callable[[Entry], object]
    problem: str
    remedy: str
    has_lines: bool = True
    reason: Callable[[Sequence[str]], str] = lambda phrases: ""
    remedies: Mapping[str, str] = field(default_factory=dict)  # by the first word of a line

    def first_pair(self, entries: Sequence[Entry]) -> tuple[int, int] | None:
        """The indices of the first entry with a value and of the first one whose value differs from it."""
        values = [(i, value) for i, each in enumerate(entries) if (value := self.value(each)) is not None]
        return next(((values[0][0], i) for i, value in values if value != values[0][1]), None)

    def error(self, ranks: Sequence[int], texts: Sequence[str], doing: str) -> ShardingError:
        """The error for two ranks that sent these texts; ``doing``: the action of all ranks."""
        who, what = f"ranks {ranks[0]} and {ranks[1]}", self.problem.format(doing)
        if self.has_lines:
            one, other = first_difference(texts)
            shown = f"rank {ranks[0]} has\n    {one}\n  where rank {ranks[1]} has\n    {other}"
            words = (line.split(" ")[0] for line in (one, other))
            remedy = next((self.remedies[word] for word in words if word in self.remedies), self.remedy)
        else:
            remedy = self.remedy
            shown = "; ".join(f"rank {rank} {text}" for rank, text in zip(ranks, texts, strict=True))
        return ShardingError(who, what, shown + self.reason(texts), remedy)


class BatchDifference(Difference):
    """Plain inputs that differ: the error names the first of them, which a line of text has before the colon."""

    def error(self, ranks: Sequence[int], texts: Sequence[str], doing: str) -> ShardingError:
        one, other = (dict(line.rsplit(": ", 1) for line in text.splitlines()) for text in texts)
        who = next(name for name in {**one, **other} if one.get(name) != other.get(name))
        return ShardingError(who, f"it differs on rank {ranks[0]} and rank {ranks[1]}", self.problem, self.remedy)


def _reason_for_places(phrases: Sequence[str]) -> str:
    """The most likely reason why two ranks are at different places."""
    begins = {phrase.partition(" of ")[0] for phrase in phrases}
    if begins == {"calls backward", "calls forward"}:
        return ": a backward was skipped, or a forward made on one rank alone"
    if begins == {"calls forward"} or begins == {"calls backward"}:
        return ": calls were made in another order, or one was skipped"
    if any(each.startswith("reads `") for each in begins):
        return ": a tensor was read on one rank alone, as under `if rank == 0:`"
    if any(each.startswith("begins an epoch") for each in begins):
        return ": an epoch ended early on one rank, or a loader was used on one rank alone"
    if any(each.startswith("saves, loads or exports") for each in begins):
        return ": a checkpoint is every rank's work, and not for `if rank == 0:`"
    if "reads gradients" in begins:
        return ": a step was skipped, or gradients were read on one rank alone"
    return ""


def _reason_for_changes(phrases: Sequence[str]) -> str:
    skipped = "zero_grad" if "gradients" in phrases[0] else "an optimizer's step"
    return f": {skipped} was skipped on one rank"


def difference_of(name: str, ranks: Sequence[int], texts: Sequence[str], doing: str) -> ShardingError:
    """The error for two ranks that sent these texts, and differ in the part of entries called ``name``."""
    difference = next(each for each in DIFFERENCES if each.name == name)
    return difference.error(ranks, texts, doing)


SAME_CALLS = "let every rank make the same calls in the same order, none of them on some ranks alone"
DIFFERENCES = (
    Difference(
        "place", lambda entry: (entry.kind, entry.module, entry.call), "they are at different places in the program",
        SAME_CALLS, has_lines=False, reason=_reason_for_places,
    ),
    Difference(
        "request", lambda entry: entry.request, "each {}, and they differ in what it gets",
        SAME_CALLS, remedies={
            "arguments": "give every rank the same arguments: as many, and of a dict the same keys",
            "input": "give every rank an input of the same shape and dtype; of a DataLoader say drop_last=True",
            "value": "give every rank the same value, or pass what may differ as a tensor",
            "module": "call train() or eval() on every rank", "gradients": "set gradients on or off on every rank",
            "parameter": "give every rank the same model", "buffer": "give every rank the same model",
            "class": "give every rank the same model", "version": "install the same versions on every rank",
            "mesh": "give every rank the same mesh", "annotation": "give every rank the same annotations",
            "option": "give every rank the same options", "result:": "give every rank the same values",
        },
    ),
    Difference(
        "is_changed", lambda entry: None if entry.is_changed == Flag.UNKNOWN else entry.is_changed, "each {}",
        SAME_CALLS, has_lines=False, reason=_reason_for_changes,
    ),
    Difference(
        "draw", lambda entry: (entry.seed, entry.step), "each {}, and they would draw different random numbers",
        "set seed and step of the module to the same numbers on every rank",
    ),
    Difference(
        "program", lambda entry: entry.program or None, "each {}, and they have different programs",
        "give every rank the same model, annotations, options and inputs, and install the same versions",
    ),
    BatchDifference(
        "batch", lambda entry: entry.batch.rstrip(b"\0") or None, "a plain input is the whole batch, on every rank",
        "for each rank's own rows write shardc.shard_batch(batch, mesh, P('dp')), or for a DataLoader "
        "shardc.shard_loader(loader, mesh, P('dp'))",
    ),
)  # fmt: skip
