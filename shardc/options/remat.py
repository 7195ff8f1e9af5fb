"""Rematerialization: the activations that backward computes again."""

from __future__ import annotations

from dataclasses import dataclass

from shardc.language.errors import OptionError


@dataclass(frozen=True, slots=True)
class Remat:
    """Backward computes some activations again, just before it reads them, from fewer that are saved.

    ``blocks``: a glob over module paths, ``h.*``. Of the outermost modules that match, the first and every ``every``-th
    after it save only their inputs; ``every=2`` halves both the memory saved and the work repeated.
    ``budget``: the bytes that a rank may save, in a pipeline for all microbatches in flight. A minimum cut chooses the
    activations that are cheapest to repeat. A repeated activation lives until its last reader, so the peak rises again
    if the budget is far below the inputs of all blocks. Results of collectives are saved and never sent again, unless
    ``collectives`` allows it: less memory, more communication. Sources: Chen et al. 2016; Korthikanti et al. 2022.
    """

    blocks: str = ""
    every: int = 1
    budget: int | None = None
    collectives: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.blocks, str):
            problem, remedy = (
                "it is a glob over the paths of modules",
                "say blocks='h.*', or budget= for a number of bytes",
            )
            raise OptionError("Remat", f"blocks={self.blocks!r}", problem, remedy)
        if bool(self.blocks) == (self.budget is not None):
            what = "both blocks and budget" if self.blocks else "neither blocks nor budget"
            remedy = "say blocks='h.*', or budget=10**9 for a gigabyte"
            raise OptionError("Remat", what, "one of them says what is saved", remedy)
        if type(self.every) is not int or self.every < 1:
            raise OptionError("Remat", f"every={self.every}", "it counts blocks from 1", "say 1 for all, 2 for half")
        if self.budget is not None and (type(self.budget) is not int or self.budget < 0):
            what, problem = f"budget={self.budget!r}", "it is a whole number of bytes, 0 or more"
            raise OptionError("Remat", what, problem, "say budget=10**9 for a gigabyte")
