"""Settings for every test: one thread a process, deterministic hypothesis, shared gloo processes, golden files."""

import os
import re

os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Callable, Generator, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
from captured_once import captured_once, is_about_capture
from collector import exempt_imports
from gloo_pool import POOL
from gloo_pool import gloo as gloo
from hypothesis import settings

settings.register_profile("shardc", derandomize=True, deadline=None, database=None)
settings.load_profile("shardc")


TESTS = Path(__file__).parent
SOAKED = tuple(f"runtime/{room}" for room in (
    "agreement/", "checkpoint/", "tensor/", "comm/test_failure.py", "comm/test_torchrun.py", "module/test_initial.py",
    "module/test_loader.py",
))  # fmt: skip


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Put all tests of the gloo processes into one group, hence one worker of pytest-xdist; mark what is a soak.

    In that group those that start processes of their own come last, when the shared ones have ended. Long ones come
    first, so that no worker is left with one at the end. xdist writes the group into each test's name, where pytest 9.2
    no longer reads it.
    """
    for item in items:
        if "gloo" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("gloo"))
        if item.get_closest_marker("sweep") and item.path.relative_to(TESTS).as_posix().startswith(SOAKED):
            item.add_marker(pytest.mark.soak)
    items.sort(key=lambda item: (_starts_its_own(item), not _is_long(item)))
    yield
    for item in items:
        if "_nodeid" in vars(item):
            item._id = type(item._id).parse(item._nodeid)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Check that the group is in the name: else every worker would start gloo processes of its own."""
    if getattr(item.config.option, "loadgroup", False) and "gloo" in getattr(item, "fixturenames", ()):
        assert "gloo" in item.nodeid.rpartition("@")[2], item.nodeid


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Let tests share what they capture, but for those of capture and those that patch something."""
    is_patched = "monkeypatch" in getattr(item, "fixturenames", ())
    with nullcontext() if is_patched or is_about_capture(item.path) else captured_once():
        return (yield)


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the gloo processes after the last test that uses them: idle, their threads take a part of a processor."""
    if nextitem is not None and _group(item) == "gloo" and "gloo" not in getattr(nextitem, "fixturenames", ()):
        POOL.close()


def _is_long(item: pytest.Item) -> bool:
    is_search = item.path.is_relative_to(TESTS / "search")
    return is_search or any(item.get_closest_marker(name) for name in ("sweep", "slow"))


def _starts_its_own(item: pytest.Item) -> bool:
    """Whether it is of the group of the gloo processes, and uses others; False without ``--dist loadgroup``."""
    if not getattr(item.config.option, "loadgroup", False) or "gloo" in getattr(item, "fixturenames", ()):
        return False
    return any("gloo" in mark.args for mark in item.iter_markers("xdist_group"))


def _group(item: pytest.Item) -> str:
    """The group in the name of a test; empty without ``--dist loadgroup``."""
    return item.nodeid.rpartition("@")[2] if getattr(item.config.option, "loadgroup", False) else ""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--write-golden``."""
    parser.addoption("--write-golden", action="store_true", help="write what is printed now to tests/golden")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Compare a text with a file of tests/golden; with ``--write-golden`` write it there first.

    What matches the pattern ``but`` may differ: it depends on the version of torch.
    """

    def compare(name: str, text: str, but: str = "(?!)") -> None:
        path = Path(__file__).parent / "golden" / name
        if request.config.getoption("--write-golden"):
            path.write_text(text)
        assert re.sub(but, "...", text) == re.sub(but, "...", path.read_text())

    return compare


def pytest_collection_finish() -> None:
    """Let the collector pass over what all test files have imported."""
    exempt_imports()
