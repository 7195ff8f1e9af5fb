"""The example for Ray Train has the losses of one device, under torchrun and in workers of Ray, one of which is killed.

Ray is no part of the test environment, since it is large: ``make ray`` installs it and runs this file.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import ray_train
from resumed import losses, losses_of_one_device

SECONDS = 400
STEPS, FURTHER = 40, 42  # Ray's output comes late: most of them are after the death


def fit(folder: Path, workers: int, steps: int, printed: Path, is_killed: bool = False) -> list[tuple[int, float]]:
    """The steps and losses that a run prints; with ``is_killed`` its first worker is killed after a few steps."""
    options = ["--workers", str(workers), "--steps", str(steps), "--every", "3", "--folder", str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "RAY_TRAIN_ENABLE_PRINT_PATCH": "0"}
    with printed.open("wb") as file:
        command = [sys.executable, ray_train.__file__, *options]
        running = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
    end = time.monotonic() + SECONDS
    try:
        while running.poll() is None:
            assert time.monotonic() < end, printed.read_text()
            if is_killed and (worker := re.search(r"pid=(\d+)\)\S* step 5 ", printed.read_text())):
                os.kill(int(worker[1]), signal.SIGKILL)
                is_killed = False
            time.sleep(0.05)
    finally:
        running.terminate()  # Ray ends its processes
        running.wait()
    assert running.returncode == 0 and not is_killed, printed.read_text()
    return losses(printed.read_text())


@pytest.mark.slow
@pytest.mark.xdist_group("gloo")
def test_ranks_of_torchrun_train_as_one_device_and_go_on(tmp_path: Path) -> None:
    found = []
    for num_ranks, steps in ((2, 4), (1, 5)):
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
        options = [ray_train.__file__, "--steps", str(steps), "--folder", str(tmp_path)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run([*launcher, *options], env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        found += losses(done.stdout)
    assert "goes on after step 4 with 1 ranks" in done.stdout
    assert found == [(step, pytest.approx(loss, abs=2e-6)) for step, loss in enumerate(losses_of_one_device(5), 1)]


@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed; make ray installs it")
@pytest.mark.sweep
@pytest.mark.xdist_group("gloo")
def test_workers_of_ray_train_as_one_device_after_a_death_and_on_fewer_workers(tmp_path: Path) -> None:
    expected = losses_of_one_device(FURTHER)
    found = fit(tmp_path / "run", 2, STEPS, tmp_path / "first", is_killed=True)
    resumed = re.search(r"goes on after step (\d+) with 2 ranks", (tmp_path / "first").read_text())
    assert resumed is not None and int(resumed[1]) in range(3, STEPS, 3)

    found += fit(tmp_path / "run", 1, FURTHER, tmp_path / "second")
    assert f"goes on after step {STEPS} with 1 ranks" in (tmp_path / "second").read_text()
    assert {step for step, _ in found} == set(range(1, FURTHER + 1))
    for step, loss in found:
        assert loss == pytest.approx(expected[step - 1], abs=2e-6), step
