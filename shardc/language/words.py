"""Names that programs and their JSON forms share: levels of lowering, and the parts of a pipeline stage's work."""

from __future__ import annotations

from typing import Literal

Level = Literal["captured", "canonical", "annotated", "agreed", "lowered", "localized"]
LEVELS: tuple[Level, ...] = ("captured", "canonical", "annotated", "agreed", "lowered", "localized")
Part = Literal["once", "count", "settle", "forward", "input_gradient", "weight_gradient", "after"]
PARTS: tuple[Part, ...] = ("once", "count", "settle", "forward", "input_gradient", "weight_gradient", "after")
