"""Blocks of memory on a rank of a pipeline, without values: who holds them, and how many bytes live."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import fx


@dataclass(eq=False, slots=True)
class Block:
    """Memory, and how many hold it."""

    nbytes: int
    holders: int = 0


Blocks = tuple[Block, ...]
Env = dict[fx.Node, Blocks]


@dataclass(slots=True)
class Memory:
    """What is held ``now``; its ``peak``; ``high``, the most since that was last asked for."""

    now: int = 0
    peak: int = 0
    high: int = 0

    def take_high(self) -> int:
        """The most bytes since this was last asked."""
        high, self.high = self.high, self.now
        return high

    def hold(self, blocks: Blocks) -> None:
        """One more holds each of them."""
        for block in blocks:
            self.now += 0 if block.holders else block.nbytes
            block.holders += 1
        self.high = max(self.high, self.now)
        self.peak = max(self.peak, self.now)

    def drop(self, blocks: Blocks) -> None:
        """One less holds each of them."""
        for block in blocks:
            block.holders -= 1
            self.now -= 0 if block.holders else block.nbytes

    def put(self, env: Env, node: fx.Node, blocks: Blocks) -> None:
        """In place of what was there."""
        self.hold(blocks)
        self.drop(env.get(node, ()))
        env[node] = blocks

    def free(self, env: Env, nodes: Iterable[fx.Node]) -> None:
        """What an env itself holds of them."""
        for node in nodes:
            self.drop(env.pop(node, ()))
