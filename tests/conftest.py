"""What every test stands on: one thread a process, hypothesis without chance or clock, and shared gloo processes."""

import gc
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from gloo_pool import POOL
from gloo_pool import gloo as gloo
from hypothesis import settings

settings.register_profile("shardc", derandomize=True, deadline=None, database=None)
settings.load_profile("shardc")


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """All users of the gloo processes run in one worker of pytest-xdist (with ``--dist loadgroup``).

    It reads the marks and writes the group into each test's name, where pytest 9.2 no longer reads it.
    """
    for item in items:
        if "gloo" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("gloo"))
    yield
    for item in items:
        if "_nodeid" in vars(item):
            item._id = type(item._id).parse(item._nodeid)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """The mark was there when xdist read marks: else every worker would start gloo processes of its own."""
    if getattr(item.config.option, "loadgroup", False) and "gloo" in getattr(item, "fixturenames", ()):
        assert "gloo" in item.nodeid.rpartition("@")[2], item.nodeid


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """After the last of the group its processes end: idle they take half a processor, for threads that wake often."""
    if nextitem is not None and _group(item) == "gloo" and _group(nextitem) != "gloo":
        POOL.close()


def _group(item: pytest.Item) -> str:
    """The group that stands in a test's name; nothing without ``--dist loadgroup``."""
    return item.nodeid.rpartition("@")[2] if getattr(item.config.option, "loadgroup", False) else ""


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--write-golden``."""
    parser.addoption("--write-golden", action="store_true", help="write what is printed now to tests/golden")


@pytest.fixture
def as_read(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Holds a text against the file of a name in tests/golden; with ``--write-golden`` writes it there first."""

    def held(name: str, text: str) -> None:
        path = Path(__file__).parent / "golden" / name
        if request.config.getoption("--write-golden"):
            path.write_text(text)
        assert text == path.read_text()

    return held


def pytest_collection_finish() -> None:
    """What is there now stays to the end: a look for garbage at all of torch takes a quarter of a compile.

    Looks at all else come seldom: after each compile, as it would be, they take a tenth of the time of all tests.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*gc.get_threshold()[:2], 100)
