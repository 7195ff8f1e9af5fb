"""A change of annotations as one would make it, and what a plan costs before and after."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardc.options import Zero
from shardc.partition import P


@dataclass(frozen=True, slots=True)
class Edit:
    """One annotation before and after: None where there is none."""

    pattern: str
    before: P | None
    after: P | None

    @property
    def text(self) -> str:
        """In words and Python."""
        if self.after is None:
            return f"drop {self.pattern!r}: {self.before!r}"
        if self.before is None:
            return f"add {self.pattern!r}: {self.after!r}"
        return f"change {self.pattern!r} from {self.before!r} to {self.after!r}"


@dataclass(frozen=True, slots=True)
class Change:
    """Edits that go together, and the option ``zero`` where ``is_zero`` says that it changes.

    ``taken_out``: calls of ``shardc.annotate`` in the model, as an origin names them.
    """

    edits: tuple[Edit, ...] = ()
    zero: Zero | None = None
    is_zero: bool = False
    taken_out: tuple[str, ...] = ()

    def applied(self, annotations: Mapping[str, P]) -> dict[str, P]:
        """The annotations after the change, those that are kept in their order."""
        after = {edit.pattern: edit.after for edit in self.edits}
        found = {pattern: after.get(pattern, spec) for pattern, spec in {**annotations, **after}.items()}
        return {pattern: spec for pattern, spec in found.items() if spec is not None}

    def zero_after(self, before: Zero | None) -> Zero | None:
        """The option after the change."""
        return self.zero if self.is_zero else before

    @property
    def text(self) -> str:
        """In words and Python."""
        option = [f"say zero={self.zero!r}" if self.zero else "leave zero= out"] if self.is_zero else []
        calls = [
            f"take out of the model shardc.{call.replace('annotate(', 'annotate(..., ')}" for call in self.taken_out
        ]
        return ", ".join([*(edit.text for edit in self.edits), *calls, *option])

    def flags(self, annotations: Mapping[str, P], is_whole: bool) -> str:
        """On the command line; ``is_whole``: ``--annotate`` stands in place of all that there is, as for an hf target.

        Else what is dropped is left open, which comes to the same.
        """
        after = self.applied(annotations)
        open_ = {edit.pattern: P(...) for edit in self.edits if edit.after is None}
        said = after if is_whole else open_ | {e.pattern: e.after for e in self.edits if e.after is not None}
        flags = [f"--annotate '{pattern}={spec}'" for pattern, spec in said.items()]
        if self.is_zero:
            flags += [f"--zero {self.zero.axis}={self.zero.stage}" if self.zero else "without --zero"]
        return " ".join(flags)


@dataclass(frozen=True, slots=True)
class Figures:
    """What a step of a plan costs one rank.

    ``wire_bytes`` sent, ``peak`` bytes alive at once with Adam's state left out, which is ``optimizer``; ``flops``.
    """

    wire_bytes: int
    peak: int
    optimizer: int
    flops: int
    num_collectives: int

    def is_free_after(self, before: Figures) -> bool:
        """Whether less is sent, and neither peak memory, with and without Adam's state, nor operations grow."""
        is_no_larger = self.peak <= before.peak and self.peak + self.optimizer <= before.peak + before.optimizer
        return self.wire_bytes < before.wire_bytes and is_no_larger and self.flops <= before.flops

    def excess(self, before: Figures) -> float:
        """How much more it costs in all: the sum of what each figure grows by, relative to what it was."""
        pairs = [(self.wire_bytes, before.wire_bytes), (self.peak + self.optimizer, before.peak + before.optimizer)]
        pairs.append((self.flops, before.flops))
        return sum(max(0, now - then) / max(1, then) for now, then in pairs)
