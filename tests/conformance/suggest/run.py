"""``shardc.suggest`` compared with hand plans and random plans: no plan that fits the same memory may be faster.

Eleven models at real sizes, on meta, on 2 to 64 ranks, with only fast links and with slow links between nodes. All
plans are compiled whole and priced alike; the price of a suggestion must be the one that it states. Each model has an
additional line with less memory: halfway between the peaks of ZeRO 3 and of plain data parallelism.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import shardc
from shardc.language.machine import Machine
from shardc.language.text import bytes_text, seconds_text, table

from ..suite import Result, chosen, exit_code, print_counts, run_cases, write_json
from .hand import NODE, hand_plans
from .judge import Candidate, fastest, problems
from .models import MODELS, Target, target
from .plan import OPTIMIZER, Plan, Price, Pricer
from .random_plans import Priced, priced, random_plans

RANKS = (2, 4, 8, 16, 64)
LINKS = ("fast", "slow")
FAST, SLOW, DEVICE = "nvlink", "infiniband", "h100"
MEMORY = 80e9
OTHERS = ("overlap", "saved", "precision")  # options of suggestions that no hand plan has
NUM_PLANS = 8  # random plans of a model for each number of ranks
TIGHT_RANKS, TIGHT_LINKS = 8, "slow"


@dataclass(frozen=True)
class Case:
    """A model on a number of ranks, with one or both kinds of links."""

    model: str
    ranks: int
    links: tuple[str, ...]
    num_plans: int
    seed: int
    is_tight: bool

    def __str__(self) -> str:
        return f"{self.model} {self.ranks}"

    @property
    def nodes(self) -> int:
        """The number of nodes with slow links between them: at least two, of at most 8 ranks each."""
        return max(2, self.ranks // NODE)

    def machine(self, links: str) -> Machine:
        """The machine of a line."""
        if links == "fast":
            return Machine({"*": FAST}, DEVICE)
        return Machine({"*": FAST}, DEVICE, node=self.ranks // self.nodes, between=SLOW)

    def of_suggest(self, links: str) -> dict[str, Any]:
        """The machine of a line as arguments of ``shardc.suggest``."""
        slow = {"links": (FAST, SLOW), "nodes": self.nodes}
        return {"device": DEVICE, **({"links": FAST} if links == "fast" else slow)}


@dataclass(frozen=True)
class Line:
    """The plans to compare on one machine within one memory limit."""

    case: Case
    links: str
    limit: float
    is_tight: bool
    hand: tuple[Candidate, ...]
    drawn: tuple[Candidate, ...]

    def __str__(self) -> str:
        return f"{self.case} {self.links}{' tight' * self.is_tight}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this suite: models, ranks, links, and random plans."""
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="by default all eleven")
    parser.add_argument("--ranks", nargs="+", type=int, default=list(RANKS), help="by default 2 4 8 16 64")
    parser.add_argument("--links", nargs="+", choices=LINKS, default=list(LINKS), help="by default both")
    parser.add_argument(
        "--plans", type=int, default=NUM_PLANS, help=f"random plans of a model on so many ranks (default {NUM_PLANS})"
    )
    parser.add_argument("--seed", type=int, default=0, help="which random plans (default 0)")


def main(options: argparse.Namespace) -> int:
    """Compare; print a row for each line, the plans that cannot be compiled, and wrong results."""
    tight = TIGHT_RANKS if TIGHT_RANKS in options.ranks else max(options.ranks)
    cases = [
        Case(model, ranks, tuple(options.links), options.plans, options.seed, ranks == tight)
        for model in options.models
        for ranks in options.ranks
    ]

    def watch(results: Sequence[Result]) -> None:
        print(f"{len(results)} of {len(cases)}", file=sys.stderr, flush=True)
        write_json(options.json, flat(results))

    by_case = run_cases(compare, chosen(cases, options), options.jobs, watch=watch)
    results = flat(by_case)
    print(table(HEADER, [result.facts["row"] for result in results if "row" in result.facts]))
    for note in [note for result in by_case for note in result.facts.get("notes", ())]:
        print(note)
    print_counts("suggest", results)
    return exit_code(results)


def flat(by_case: Sequence[Result]) -> list[Result]:
    """The results of all lines; a case whose process ended has only its own result."""
    return [
        line
        for result in by_case
        for line in ([Result(**each) for each in result.facts["lines"]] if "lines" in result.facts else [result])
    ]


def compare(case: Case) -> Result:
    """The results of all lines of a case, and of each plan on which the compiler fails."""
    made = target(case.model)
    pricer = Pricer(made.model, made.inputs)
    machines = [case.machine(links) for links in case.links]
    hand = [priced(pricer, plan, machines) for plan in hand_plans(made, case.ranks)]
    drawn = random_plans(pricer, made, case.ranks, case.num_plans, case.seed, machines)
    found = [compare_line(line, made, pricer) for line in lines_of(case, hand, drawn)]
    found += [
        Result(f"{case} {each.plan.name}", "wrong", f"the compiler fails: {each.reason[:300]}, with {each.plan.text}")
        for each in (*hand, *drawn)
        if each.is_defect
    ]
    notes = [f"{case}: {each.plan.name} cannot be compiled: {each.reason[:120]}" for each in hand if each.reason]
    return Result(str(case), "right", facts={"lines": list(map(vars, found)), "notes": notes})


def lines_of(case: Case, hand: Sequence[Priced], drawn: Sequence[Priced]) -> Iterator[Line]:
    """A line for each kind of links, and in a tight case the line with little memory."""
    for number, links in enumerate(case.links):
        by_hand, random = (
            tuple(Candidate(each.plan, each.prices[number]) for each in several if each.prices)
            for several in (hand, drawn)
        )
        yield Line(case, links, MEMORY, False, by_hand, random)
        if case.is_tight and (links == TIGHT_LINKS or len(case.links) == 1):
            yield Line(case, links, tight_limit(case.ranks, by_hand), True, by_hand, random)


def tight_limit(ranks: int, hand: Sequence[Candidate]) -> float:
    """Bytes halfway between the peaks of ZeRO 3 and of plain data parallelism."""
    peaks = {each.plan.name: each.price.peak for each in hand}
    return (peaks[f"dp={ranks}"] + peaks[f"dp={ranks} zero3"]) / 2


def compare_line(line: Line, made: Target, pricer: Pricer) -> Result:
    """The result of judging the first suggestion of a line."""
    case, begun = line.case, time.process_time()
    try:
        first = shardc.suggest(
            made.model, case.ranks, kwargs=made.inputs, memory=int(line.limit), optimizer=OPTIMIZER,
            **case.of_suggest(line.links),
        )[0]  # fmt: skip
        took = time.process_time() - begun
        plan = plan_of(first)
        own = pricer.prices(plan, [case.machine(line.links)])[0]
    except Exception as error:  # no error of one line stops the others
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        return Result(str(line), "refused", reason, {"row": row_of(line, None, None, 0.0)})
    said = {"seconds": first.seconds, "peak": first.memory["peak"]}
    wrong = problems(said, own, (*line.hand, *line.drawn), line.limit)
    facts = {"row": row_of(line, plan, own, took), "plan": plan.text}
    if not wrong:
        return Result(str(line), "right", facts=facts)
    return Result(str(line), "wrong", "; ".join([*wrong, f"suggested: {plan.text}"]), facts)


def plan_of(suggestion: Any) -> Plan:
    """A suggestion as a plan."""
    zero, remat = suggestion.zero, suggestion.remat
    words = [",".join(f"{axis}={size}" for axis, size in suggestion.mesh.sizes.items())]
    words += [f"zero{zero.stage}"] if zero else []
    words += ["remat"] if remat else []
    others = {name: value for name in OTHERS if (value := getattr(suggestion, name)) is not None}
    words += [f"{name} {value}" for name, value in others.items()]
    return Plan(" ".join(words), suggestion.mesh, suggestion.annotations, zero, remat, suggestion.pipeline, others)


# The table.

HEADER = ("model", "ranks", "links", "memory", "suggestion", "step", "peak", "best by hand", "step", "ratio",
          "random", "best step", "ratio", "search s")  # fmt: skip


def row_of(line: Line, plan: Plan | None, own: Price | None, took: float) -> tuple[str, ...]:
    """A row of the table. A ratio above 1 means that the other plan takes longer."""
    hand, drawn = fastest(line.hand, line.limit), fastest(line.drawn, line.limit)
    fitting = sum(each.price.peak <= line.limit for each in line.drawn)
    return (
        *(line.case.model, str(line.case.ranks), line.links, bytes_text(round(line.limit))),
        *(plan.name if plan else "none", _seconds(own), bytes_text(own.peak) if own else ""),
        *(hand.plan.name if hand else "none fits", _seconds(hand and hand.price), _ratio(hand, own)),
        *(f"{fitting} of {len(line.drawn)}", _seconds(drawn and drawn.price), _ratio(drawn, own), f"{took:.1f}"),
    )


def _seconds(price: Price | None) -> str:
    return seconds_text(price.seconds) if price else ""


def _ratio(other: Candidate | None, own: Price | None) -> str:
    return f"{other.price.seconds / own.seconds:.4f}" if other and own else ""
