"""A change of annotations, options or the mesh that might remove a collective, in words, Python and flags."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from shardc.language.partition import P
from shardc.options import Pipeline, Zero


@dataclass(frozen=True, slots=True)
class Edit:
    """One annotation before and after a change: None where there is none."""

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
    """Edits of annotations that go together, and changes of options.

    ``zero``: the option after the change, if ``is_zero``. ``removed_calls``: calls of ``shardc.annotate`` in the model,
    as origins name them. ``pipeline_fields``: fields of the option ``pipeline`` with their new values. ``mesh``: the
    axes and sizes of another mesh.
    """

    edits: tuple[Edit, ...] = ()
    zero: Zero | None = None
    is_zero: bool = False
    removed_calls: tuple[str, ...] = ()
    pipeline_fields: tuple[tuple[str, Any], ...] = ()
    mesh: tuple[tuple[str, int], ...] = ()

    def annotations_after(self, annotations: Mapping[str, P]) -> dict[str, P]:
        """The annotations after the change; those that stay keep their order."""
        edited = {edit.pattern: edit.after for edit in self.edits}
        after = {pattern: edited.get(pattern, spec) for pattern, spec in {**annotations, **edited}.items()}
        return {pattern: spec for pattern, spec in after.items() if spec is not None}

    def pipeline_after(self, before: Pipeline | None) -> Pipeline | None:
        """The option ``pipeline`` after the change."""
        return before if before is None else replace(before, **dict(self.pipeline_fields))

    @property
    def text(self) -> str:
        """In words and Python."""
        parts = [edit.text for edit in self.edits]
        for call in self.removed_calls:
            parts.append(f"take out of the model shardc.{call.replace('annotate(', 'annotate(..., ')}")
        if self.is_zero:
            parts.append(f"say zero={self.zero!r}" if self.zero else "leave zero= out")
        if self.pipeline_fields:
            parts.append(f"say {', '.join(f'{name}={each!r}' for name, each in self.pipeline_fields)} in pipeline=")
        if self.mesh:
            parts.append(f"compile for {_axes_text(self.mesh, ', ')}")
        return ", ".join(parts)

    def python(self, annotations: Mapping[str, P], pipeline: Pipeline | None) -> str:
        """As one types it in Python, after the annotations and the option ``pipeline`` before the change."""
        if self.pipeline_fields or self.mesh:
            after = self.pipeline_after(pipeline)
            assert after is not None, self
            settings = ", ".join(
                f"{name}={value!r}" for name, value in {"axis": after.axis, **_settings(after)}.items()
            )
            mesh = [f"mesh = Mesh({_axes_text(self.mesh, ', ')})"] * bool(self.mesh)
            return "; ".join([*mesh, *[f"pipeline = Pipeline({settings})"] * bool(self.pipeline_fields)])
        after_edits = self.annotations_after(annotations).items()
        entries = ", ".join(f"{pattern!r}: {spec!r}" for pattern, spec in after_edits)
        return f"annotations = {{{entries}}}" + (f", zero={self.zero!r}" if self.is_zero else "")

    def flags(self, annotations: Mapping[str, P], pipeline: Pipeline | None, replaces: bool) -> str:
        """As one types it on the command line.

        ``replaces``: ``--annotate`` replaces all annotations of the target, as for ``hf:``. Otherwise it adds to them,
        and an annotation that is dropped is left open, which comes to the same.
        """
        if self.pipeline_fields or self.mesh:
            after = self.pipeline_after(pipeline)
            assert after is not None, self
            words = [f"{k}={'+'.join(v) if isinstance(v, tuple) else v}" for k, v in _settings(after).items()]
            mesh = [f"--mesh {_axes_text(self.mesh, ',')}"] * bool(self.mesh)
            return " ".join([*mesh, *[f"--pipeline {','.join([after.axis, *words])}"] * bool(self.pipeline_fields)])
        dropped = {edit.pattern: P(...) for edit in self.edits if edit.after is None}
        kept = {edit.pattern: edit.after for edit in self.edits if edit.after is not None}
        specs = self.annotations_after(annotations) if replaces else dropped | kept
        flags = [f"--annotate '{pattern}={spec}'" for pattern, spec in specs.items()]
        if self.is_zero:
            flags.append(f"--zero {self.zero.axis}={self.zero.stage}" if self.zero else "without --zero")
        return " ".join(flags)


def _axes_text(axes: tuple[tuple[str, int], ...], separator: str) -> str:
    return separator.join(f"{name}={size}" for name, size in axes)


def _settings(pipeline: Pipeline) -> dict[str, Any]:
    """The fields that differ from their defaults, and the number of microbatches."""
    default = Pipeline(pipeline.axis)
    values = {each.name: getattr(pipeline, each.name) for each in fields(pipeline)}
    return {name: value for name, value in values.items() if name == "microbatches" or value != getattr(default, name)}
