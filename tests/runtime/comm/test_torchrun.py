"""A rank of a job under torchrun fails, or Ctrl-C is pressed: all ranks end, and the first error is reported."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = """
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record

import shardc
from shardc import P


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x, y):
        return (self.down(self.up(x).relu()) - y).square().mean()


@record
def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    module = shardc.parallelize(Model(), mesh, {"x": P("dp"), "down.weight": P(None, "tp")})
    x = torch.ones(8, 8)
    try:
        for step in range(1000):
            loss = module(x, x)
            loss.backward()
            if step == 3 and dist.get_rank() == 1:
                print(f"fails at {time.time()}", flush=True)
                if sys.argv[1] == "raises":
                    raise ValueError("this rank has a problem")
                time.sleep(100)
    finally:
        print(f"rank {dist.get_rank()} ends at {time.time()}", flush=True)


main()
"""


def start(tmp_path: Path, how: str) -> subprocess.Popen[str]:
    (tmp_path / "train.py").write_text(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.Popen(
        [*torchrun, "train.py", how], cwd=tmp_path, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def seconds_to_end(text: str) -> list[float]:
    """For each rank the seconds from the failure to its end."""
    failed_at = float(re.findall(r"fails at ([\d.]+)", text)[0])
    return [float(each) - failed_at for each in re.findall(r"rank \d ends at ([\d.]+)", text)]


@pytest.mark.sweep
@pytest.mark.xdist_group("gloo")
def test_torchrun_reports_the_error_of_the_rank_that_failed_and_the_other_names_it(tmp_path: Path) -> None:
    text, _ = start(tmp_path, "raises").communicate(timeout=120)
    assert len(seconds_to_end(text)) == 2 and max(seconds_to_end(text)) < 3
    assert (
        "CommunicationError: the agreement of all ranks before this rank calls forward of Model (call 5), ranks 0, 1: "
        "rank 1 failed: ValueError: this rank has a problem"
    ) in text
    cause = text.partition("Root Cause")[2]
    assert "ValueError: this rank has a problem" in cause
    assert "rank      : 1 (local_rank: 1)" in text  # the root cause, unless rank 0 ended in the same second


@pytest.mark.sweep
@pytest.mark.xdist_group("gloo")
def test_ctrl_c_ends_a_job_under_torchrun_whose_ranks_wait_for_each_other(tmp_path: Path) -> None:
    job = start(tmp_path, "sleeps")
    assert job.stdout is not None
    try:
        next(line for line in job.stdout if line.startswith("fails at"))
        time.sleep(0.5)  # the other rank waits
        pressed = time.time()
        os.killpg(job.pid, signal.SIGINT)
        text, _ = job.communicate(timeout=60)
    finally:
        job.kill()
    ends = [float(each) - pressed for each in re.findall(r"rank \d ends at ([\d.]+)", text)]
    assert len(ends) == 2 and max(ends) < 3  # torchrun itself kills ranks that wait after 30
