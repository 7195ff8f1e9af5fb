"""The ledger of memory: the blocks that one rank allocates and frees over a step, in order.

The curve, the peak, the classes of bytes and the blocks alive at the peak are all read off the same entries.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, islice

from torch import fx

from shardc.program.program import Value


@dataclass(eq=False, slots=True)
class Block:
    """Memory that some values share, allocated for ``value``; alive as long as it has holders.

    ``value``: a node and the number of its result, or ``WORKSPACE`` for memory that its call holds while it runs.
    ``kind``: a class of bytes, see ``memory_curve``. ``below``: its bytes in the tier below the device's memory.
    """

    value: Value
    nbytes: int
    kind: str
    holders: int = 0
    below: int = 0


WORKSPACE = -1
Blocks = tuple[Block, ...]
Env = dict[fx.Node, Blocks]  # the blocks of each node's results


class Ledger:
    """One rank's step, as a replay writes it.

    ``entries``: each block that is allocated or, if it is alive, freed, in order. ``calls`` and ``ends``: each call and
    the number of entries at its end, before its dead operands are freed. ``actions``: each with the number of entries
    at its end. ``saved``: the blocks of forward that backward reads; in a pipeline the most that microbatches under way
    keep between two actions. ``saved_below``: the same in the tier below, with the bytes there. ``gathered``: copies of
    parameters, the most at a time; in a pipeline all, which live for the whole step. ``parameters``: the names of those
    that the rank stores.
    """

    def __init__(self, parameters: Collection[str]) -> None:
        self.parameters = parameters
        self.entries: list[Block] = []
        self.calls: list[fx.Node] = []
        self.ends: list[int] = []
        self.actions: list[tuple[str, int]] = []
        self.saved: Collection[Block] = ()
        self.saved_below: Collection[Block] = ()
        self.gathered: Collection[Block] = ()

    def hold(self, blocks: Blocks) -> None:
        """Add a holder to each block."""
        for block in blocks:
            if not block.holders:
                self.entries.append(block)
            block.holders += 1

    def drop(self, blocks: Blocks) -> None:
        """Remove a holder from each block."""
        for block in blocks:
            block.holders -= 1
            if not block.holders:
                self.entries.append(block)

    def put(self, env: Env, node: fx.Node, blocks: Blocks) -> None:
        """Replace the blocks of a node."""
        self.hold(blocks)
        self.drop(env.get(node, ()))
        env[node] = blocks

    def free(self, env: Env, nodes: Iterable[fx.Node]) -> None:
        """Remove nodes from an env."""
        for node in nodes:
            self.drop(env.pop(node, ()))

    def note_saved(self, blocks: Collection[Block]) -> None:
        """Note the blocks that are saved for backward at one time."""
        below = [replace(block, nbytes=block.below) for block in blocks if block.below]
        self.saved = max(self.saved, blocks, key=bytes_of)
        self.saved_below = max(self.saved_below, below, key=bytes_of)

    def end_call(self, node: fx.Node) -> None:
        """Note that a call has its results."""
        self.calls.append(node)
        self.ends.append(len(self.entries))

    def end_action(self, name: str) -> None:
        """Note that an action is done."""
        self.actions.append((name, len(self.entries)))

    def changes(self) -> Iterator[tuple[Block, int]]:
        """Each block that is allocated (1) or freed (-1), in order."""
        alive = set[Block]()
        for block in self.entries:
            sign = -1 if block in alive else 1
            (alive.remove if sign < 0 else alive.add)(block)
            yield block, sign

    def balances(self, counts: Callable[[Block], bool] | None = None) -> list[int]:
        """The bytes alive before the first entry and after each, of all blocks or of those that count."""
        entries = ((block.nbytes if counts is None or counts(block) else 0, sign) for block, sign in self.changes())
        return list(accumulate((sign * nbytes for nbytes, sign in entries), initial=0))

    def most(self, counts: Callable[[Block], bool] | None = None) -> Collection[Block]:
        """The blocks that are alive when their bytes are most: at the peak, if all count."""
        balances, alive = self.balances(counts), dict[Block, None]()
        for block, sign in islice(self.changes(), balances.index(max(balances))):
            if sign < 0:
                alive.pop(block, None)
            elif counts is None or counts(block):
                alive[block] = None
        return alive.keys()

    def highs(self) -> list[tuple[str, int]]:
        """Each action with the most bytes that are alive while it runs."""
        balances, start, highs = self.balances(), 0, []
        for name, end in self.actions:
            highs.append((name, max(balances[start : end + 1])))
            start = end
        return highs

    def curve(self, kind: str) -> list[int]:
        """The bytes of a class that are alive at the end of each call, and then at the end of the step."""
        balances = self.balances(lambda block: block.kind == kind)
        return [*map(balances.__getitem__, self.ends), balances[-1]]


def bytes_of(blocks: Iterable[Block]) -> int:
    """The bytes of blocks."""
    return sum(block.nbytes for block in blocks)
