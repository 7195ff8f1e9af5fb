"""A change of annotations or options as one would make it, and what a plan costs before and after."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from shardc.mesh import Mesh
from shardc.options import Pipeline, Zero
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

    ``taken_out``: calls of ``shardc.annotate`` in the model, as an origin names them. ``stages``: fields of the option
    ``pipeline`` and what they become. ``mesh``: its axes and sizes, where these change.
    """

    edits: tuple[Edit, ...] = ()
    zero: Zero | None = None
    is_zero: bool = False
    taken_out: tuple[str, ...] = ()
    stages: tuple[tuple[str, Any], ...] = ()
    mesh: tuple[tuple[str, int], ...] = ()

    def applied(self, annotations: Mapping[str, P]) -> dict[str, P]:
        """The annotations after the change, those that are kept in their order."""
        after = {edit.pattern: edit.after for edit in self.edits}
        found = {pattern: after.get(pattern, spec) for pattern, spec in {**annotations, **after}.items()}
        return {pattern: spec for pattern, spec in found.items() if spec is not None}

    def zero_after(self, before: Zero | None) -> Zero | None:
        """The option after the change."""
        return self.zero if self.is_zero else before

    def pipeline_after(self, before: Pipeline | None) -> Pipeline | None:
        """The option after the change."""
        return replace(before, **dict(self.stages)) if before is not None and self.stages else before

    def mesh_after(self, before: Mesh) -> Mesh:
        """The mesh after the change."""
        return Mesh(device_ids=None, **dict(self.mesh)) if self.mesh else before

    @property
    def text(self) -> str:
        """In words and Python."""
        option = [f"say zero={self.zero!r}" if self.zero else "leave zero= out"] if self.is_zero else []
        calls = [
            f"take out of the model shardc.{call.replace('annotate(', 'annotate(..., ')}" for call in self.taken_out
        ]
        stages = [f"say {', '.join(f'{name}={value!r}' for name, value in self.stages)} in pipeline="] * bool(
            self.stages
        )
        mesh = [f"compile for {_axes_text(self.mesh, ', ')}"] * bool(self.mesh)
        return ", ".join([*(edit.text for edit in self.edits), *calls, *option, *stages, *mesh])

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

    def stage_flags(self, pipeline: Pipeline) -> str:
        """On the command line, of a change of stages or of the mesh; all else stays as it was typed."""
        flags = [f"--mesh {_axes_text(self.mesh, ',')}"] * bool(self.mesh)
        return " ".join([*flags, *[f"--pipeline {_typed(pipeline)}"] * bool(self.stages)])

    def stage_python(self, pipeline: Pipeline) -> str:
        """In Python, likewise."""
        mesh = [f"mesh = Mesh({_axes_text(self.mesh, ', ')})"] * bool(self.mesh)
        return "; ".join([*mesh, *[f"pipeline = {_said(pipeline)}"] * bool(self.stages)])


def _axes_text(axes: tuple[tuple[str, int], ...], sign: str) -> str:
    return sign.join(f"{name}={size}" for name, size in axes)


def _given(option: Pipeline) -> dict[str, Any]:
    """What of an option is not as it is by default."""
    plain = Pipeline(option.axis)
    values = {each.name: getattr(option, each.name) for each in fields(option)}
    return {name: value for name, value in values.items() if name == "microbatches" or value != getattr(plain, name)}


def _said(option: Pipeline) -> str:
    """An option as one types it in Python."""
    given = {"axis": option.axis, **_given(option)}
    return f"Pipeline({', '.join(f'{name}={value!r}' for name, value in given.items())})"


def _typed(option: Pipeline) -> str:
    """An option as one types it after ``--pipeline``."""
    words = {name: "+".join(value) if isinstance(value, tuple) else value for name, value in _given(option).items()}
    return ",".join([option.axis, *(f"{name}={value}" for name, value in words.items())])


@dataclass(frozen=True, slots=True)
class Figures:
    """What a step of a plan costs one rank.

    ``wire_bytes`` sent, ``peak`` bytes alive at once with Adam's state left out, which is ``optimizer``; ``flops``.
    Of a pipeline bytes are those of one rank of each stage together, of which ``crossing`` go between stages; all else
    is of the rank that has most of it.
    """

    wire_bytes: int
    peak: int
    optimizer: int
    flops: int
    num_collectives: int
    crossing: int = 0

    def is_free_after(self, before: Figures) -> bool:
        """Whether less is sent, and neither peak memory, with and without Adam's state, nor operations grow."""
        is_no_larger = self.peak <= before.peak and self.peak + self.optimizer <= before.peak + before.optimizer
        return self.wire_bytes < before.wire_bytes and is_no_larger and self.flops <= before.flops

    def excess(self, before: Figures) -> float:
        """How much more it costs in all: the sum of what each figure grows by, relative to what it was."""
        pairs = [(self.wire_bytes, before.wire_bytes), (self.peak + self.optimizer, before.peak + before.optimizer)]
        pairs.append((self.flops, before.flops))
        return sum(max(0, now - then) / max(1, then) for now, then in pairs)
