"""Values that tensors of a model get when they are placed; a rank reads only its shard of each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from torch import Tensor

from shardc.language.sharding import Sharding, TensorType

from ..comm.dtensor import shard


class Value(ABC):
    """The value of a tensor, which need not be in memory."""

    @property
    @abstractmethod
    def type(self) -> TensorType:
        """The type of the whole tensor."""

    @abstractmethod
    def write(self, piece: Tensor, sharding: Sharding, position: int) -> None:
        """Write the shard of the rank at ``position``, without padding, to ``piece``."""


class WholeValue(Value):
    """A value that is available as a whole tensor, in memory or in a memory map."""

    @abstractmethod
    def reading(self) -> AbstractContextManager[Tensor]:
        """Context with the whole tensor."""

    def write(self, piece: Tensor, sharding: Sharding, position: int) -> None:
        with self.reading() as whole:
            piece.copy_(shard(whole, sharding, position))


@dataclass(frozen=True)
class TensorValue(WholeValue):
    """The value of a tensor in memory."""

    tensor: Tensor

    @property
    def type(self) -> TensorType:
        return TensorType.of(self.tensor)

    def reading(self) -> AbstractContextManager[Tensor]:
        return nullcontext(self.tensor)
