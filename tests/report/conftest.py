"""A headless Chromium, spoken to as W3C WebDriver says: what a page shows, does and complains of."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1280,900",
)


class Browser:
    """One window. ``run`` returns what JavaScript returns."""

    def __init__(self, port: int) -> None:
        self.root = f"http://127.0.0.1:{port}"
        self.session = ""

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """A WebDriver command's value."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.root}{self.session}{path}", data, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(json.load(error)["value"]["message"]) from error

    def start(self, profile: Path) -> None:
        """Open the window once the driver listens."""
        options = {"binary": CHROMIUM, "args": [*FLAGS, f"--user-data-dir={profile}"]}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        self.session = (
            f"/session/{self.call('POST', '/session', {'capabilities': {'alwaysMatch': wanted}})['sessionId']}"
        )

    def open(self, path: Path) -> float:
        """Load a page; the seconds from navigation until it says that it is ready."""
        self.call("POST", "/url", {"url": "about:blank"})
        started = time.perf_counter()
        self.call("POST", "/url", {"url": path.as_uri()})
        self.wait("return document.documentElement.dataset.ready")
        return time.perf_counter() - started

    def wait(self, script: str, *args: Any) -> None:
        """Return once ``script`` returns true, as after a promise of the page is kept; an error after 20 seconds."""
        started = time.perf_counter()
        while not self.run(script, *args):
            assert time.perf_counter() - started < 20, f"never true: {script}; the console has {self.complaints()}"
            time.sleep(0.01)

    def run(self, script: str, *args: Any) -> Any:
        """The body of a function of ``arguments``."""
        return self.call("POST", "/execute/sync", {"script": script, "args": args})

    def texts(self, selector: str) -> list[str]:
        """The text of each element."""
        found: list[str] = self.run(
            "return [...document.querySelectorAll(arguments[0])].map(each => each.textContent)", selector
        )
        return found

    def click(self, selector: str) -> None:
        """Click an element, as a person does."""
        found = self.call("POST", "/element", {"using": "css selector", "value": selector})
        self.call("POST", f"/element/{next(iter(found.values()))}/click", {})

    def press(self, keys: str) -> None:
        """Press keys, one after another, where the focus is."""
        actions = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self.call("POST", "/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": actions}]})

    def complaints(self) -> list[str]:
        """What was written to the console since this was last asked."""
        return [entry["message"] for entry in self.call("POST", "/se/log", {"type": "browser"})]


@contextmanager
def browsing(profile: Path) -> Iterator[Browser]:
    """A browser with an empty profile, ended with the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    driver = subprocess.Popen([str(DRIVER), f"--port={port}"], **quiet)  # type: ignore[call-overload]
    browser = Browser(port)
    try:
        _await(browser)
        browser.start(profile)
        yield browser
        browser.call("DELETE", "")
    finally:
        driver.terminate()
        driver.wait()


def _await(browser: Browser) -> None:
    for _ in range(200):
        try:
            browser.call("GET", "/status")
            return
        except OSError:
            time.sleep(0.05)
    raise TimeoutError("chromedriver does not answer")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("no chromium and chromedriver: apt-get install chromium chromium-driver")
    with browsing(tmp_path_factory.mktemp("profile")) as found:
        yield found
