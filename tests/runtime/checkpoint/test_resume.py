"""A job under torchrun whose ranks are killed at random moments ends with the losses of an undisturbed run."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from resumed import losses, losses_of_one_device

EXAMPLE = Path(__file__).parents[3] / "examples" / "resume.py"
SECONDS = 150
STEPS = 60


def job(path: Path, num_ranks: int, steps: int, restarts: int, printed: Path) -> subprocess.Popen[bytes]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    command = [*launcher, f"--max-restarts={restarts}", "--monitor-interval=0.05", str(EXAMPLE)]
    options = ["--path", str(path), "--steps", str(steps), "--every", "3"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with printed.open("wb") as file:
        return subprocess.Popen([*command, *options], stdout=file, stderr=subprocess.STDOUT, env=environment)


def kill_one(agent: int, generator: random.Random) -> bool:
    """Kill one of the ranks of a job; False if they are gone."""
    children = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
    if children:
        os.kill(int(generator.choice(children)), signal.SIGKILL)
    return bool(children)


def disturbed(path: Path, printed: Path, kills: int, seed: int) -> int:
    """Run a job and kill a rank of it a few times, some time after the job has printed further losses."""
    generator, end, killed = random.Random(seed), time.monotonic() + SECONDS, 0
    running, following = job(path, 2, STEPS, 4 * kills, printed), generator.randint(4, 12)
    try:
        while running.poll() is None:
            assert time.monotonic() < end, printed.read_text()
            if killed < kills and len(losses(printed.read_text())) >= following and kill_one(running.pid, generator):
                killed, following = killed + 1, len(losses(printed.read_text())) + generator.randint(4, 12)
            time.sleep(generator.uniform(0, 0.02))
    finally:
        running.kill()
    assert running.returncode == 0, printed.read_text()
    return killed


@pytest.mark.sweep
@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize("seed", [0])
def test_a_job_goes_on_after_deaths_and_with_fewer_ranks(tmp_path: Path, seed: int) -> None:
    wanted = losses_of_one_device(STEPS + 6, is_scheduled=True)
    killed = disturbed(tmp_path / "checkpoints", tmp_path / "printed", 3, seed)
    assert killed == 3
    printed = (tmp_path / "printed").read_text()
    assert printed.count("goes on after step") >= 1, printed
    last = job(tmp_path / "checkpoints", 1, STEPS + 6, 0, tmp_path / "last")
    assert last.wait(SECONDS) == 0, (tmp_path / "last").read_text()
    assert f"goes on after step {STEPS} with 1 ranks" in (tmp_path / "last").read_text()
    found = losses(printed) + losses((tmp_path / "last").read_text())
    assert {step for step, _ in found} == set(range(1, STEPS + 7)) and len(found) > STEPS + 6
    for step, loss in found:
        assert abs(loss - wanted[step - 1]) <= 2e-6, (step, loss, wanted[step - 1])
