"""Devices: how long one rank computes, by the operations and the bytes of a call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardc.error import OptionError, raise_all


@dataclass(frozen=True, slots=True)
class Device:
    """What one rank computes on.

    ``flops``: floating-point operations a second of contractions, by dtype; one that is not named runs as float32.
    ``attention``: which part of that fused attention reaches. ``memory``: bytes a second that are read and written by
    all else. ``update``: bytes a second of the optimizer's step; those of ``memory`` where it is 0.
    ``call``: seconds of the shortest call.
    """

    flops: Mapping[str, float]
    memory: float
    call: float = 0.0
    attention: float = 1.0
    update: float = 0.0
    name: str = field(default="a device", compare=False)

    def __post_init__(self) -> None:
        rates = {"memory": self.memory, "attention": self.attention, **self.flops}
        wrong = [f"{name}={rate!r}" for name, rate in rates.items() if not rate > 0]
        wrong += [f"{name}={each!r}" for name in ("call", "update") if not (each := getattr(self, name)) >= 0]
        wrong += [] if "float32" in self.flops else [f"flops={dict(self.flops)!r}"]
        remedy = "say Device(flops={'float32': 1e13}, memory=1e12), rates a second and above 0, or name a preset"
        raise_all([OptionError("Device", what, "no time can be told by it", remedy) for what in wrong])

    def seconds(self, flops: int, nbytes: int, dtype: str = "float32", is_attention: bool = False) -> float:
        """The longer of computing and of moving operands and results; nothing where there is nothing to do."""
        if not flops and not nbytes:
            return 0.0
        rate = self.flops.get(dtype, self.flops["float32"]) * (self.attention if is_attention else 1)
        return max(self.call, flops / rate, nbytes / self.memory)

    def update_seconds(self, nbytes: int) -> float:
        """Of an optimizer's step that reads and writes so many bytes."""
        return nbytes / (self.update or self.memory)


# What kernels reach, not what the data sheet says. ``cpu`` is one core.
DEVICES = {
    "a100": Device({"float32": 1.5e13, "bfloat16": 2.2e14, "float16": 2.2e14, "float64": 1.5e13}, 1.4e12, 5e-6, 0.6),
    "h100": Device({"float32": 4.5e13, "bfloat16": 6.0e14, "float16": 6.0e14, "float64": 4.5e13}, 2.6e12, 5e-6, 0.6),
    "cpu": Device({"float32": 1.0e11, "float64": 5.0e10}, 8e9, 5e-6, 0.6, 2.5e10),
}
