"""Run a conformance suite: ``python -m tests.conformance SUITE [--only NAME] [--every N] [--jobs N] [--json FILE]``.

Exits with 1 if a case is wrong, refused or late. ``all`` runs the suites of ``make conformance`` one after another, on
two processes each. A suite is a module of this package with ``add_arguments(parser)``, which adds its options, and
``main(options) -> int``.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

SUITES = {
    "draws": "initial parameters, dropout masks and 20 steps of Adam on every mesh of at most 16 ranks",
    "op_db": "PyTorch's own operator samples, forward and gradients, under random shardings",
    "gspmd": "cases of openxla's partitioners: values, local shapes and bytes on the wire",
    "programs": "random programs of many ops, sizes, meshes and annotations, after every pass",
    "pipelines": "models that pipelines are bad at, under every schedule, beside one device",
    "suggest": "suggested plans beside hand plans and random plans of models of real sizes",
    "zoo": "small models of transformers and others: numbers, collectives, operations done twice",
}


# Of the zoo, every seventh case, which takes meshes and variants in turn, and none with dropout: the whole zoo takes
# eight minutes, and with dropout some processors round the batch norms of mobilenet differently in float32.
ALL = (
    "gspmd", "op_db --samples 1", "programs --examples 200", "pipelines", "draws --steps 5",
    "zoo --variant even --variant uneven --every 7",
)  # fmt: skip


def main() -> int:
    """Run the suite that the command line names, or all suites; returns the exit code."""
    tests = Path(__file__).parents[1]
    paths = (tests, tests / "support", tests.parent / "examples")
    sys.path[:0] = map(str, paths)  # modules that tests share are imported by their bare names
    if sys.argv[1:] == ["all"]:
        return max(run(each.split()) for each in ALL)
    return run(sys.argv[1:])


def run(words: list[str]) -> int:
    """Run the suite that the first word names, with the options that follow."""
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    suites = parser.add_subparsers(dest="suite", required=True)
    modules = {name: importlib.import_module(f".{name}", __package__) for name in SUITES if name in words[:1]}
    for name, text in SUITES.items():
        suite = suites.add_parser(name, help=text)
        suite.add_argument("--only", metavar="NAME", help="only cases whose name matches this glob")
        suite.add_argument("--every", metavar="N", type=int, default=1, help="every Nth case alone")
        suite.add_argument("--jobs", type=int, default=2, help="processes (default 2)")
        suite.add_argument("--json", metavar="FILE", help="write each case's result")
        if name in modules:
            modules[name].add_arguments(suite)
    options = parser.parse_args(words)
    return modules[options.suite].main(options)


if __name__ == "__main__":
    raise SystemExit(main())
