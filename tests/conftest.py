"""What every test stands on: one thread a process, hypothesis without chance or clock, and shared gloo processes."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from gloo_pool import gloo as gloo
from hypothesis import settings

settings.register_profile("shardc", derandomize=True, deadline=None, database=None)
settings.load_profile("shardc")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All users of the gloo processes run in one worker of pytest-xdist (with ``--dist loadgroup``)."""
    for item in items:
        if "gloo" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("gloo"))


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--write-golden``."""
    parser.addoption("--write-golden", action="store_true", help="write what is printed now to tests/golden")
