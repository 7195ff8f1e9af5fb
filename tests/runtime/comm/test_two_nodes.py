"""A job on two nodes, each a network namespace of its own with one cable between them, trains as one process does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import finetune_llama_lora
import pytest

NODES = """
set -e
ip link set lo up
unshare --net sleep 120 >/dev/null 2>&1 & other=$!
trap "kill $other" EXIT
sleep 0.5
ip link add name node0 type veth peer name node1 netns $other
ip address add 10.9.0.1/24 dev node0
ip link set node0 up
nsenter --net --target $other sh -c "ip link set lo up; ip address add 10.9.0.2/24 dev node1; ip link set node1 up"
GLOO_SOCKET_IFNAME=node1 nsenter --net --target $other "$@" --node-rank 1 $SCRIPT >/dev/null & second=$!
GLOO_SOCKET_IFNAME=node0 "$@" --node-rank 0 $SCRIPT
wait $second
"""


def may_make_networks() -> bool:
    """Whether this user may make network namespaces and cables, as root may where nothing forbids it."""
    command = "ip link set lo up && ip link add name node0 type veth peer name node1"
    try:
        return subprocess.run(["unshare", "--net", "sh", "-c", command], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(not may_make_networks(), reason="needs network namespaces")
def test_two_nodes_train_as_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    script = [finetune_llama_lora.__file__, "--steps", "4", "--output"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    address = ["--master-addr", "10.9.0.1", "--master-port", "29400"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "SCRIPT": " ".join([*script, str(tmp_path / "nodes")])}
    done = subprocess.run(
        ["unshare", "--net", "bash", "-c", NODES, "nodes", *torchrun, *address], env=environment,
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    monkeypatch.setattr(sys, "argv", [*script, str(tmp_path / "alone")])
    finetune_llama_lora.main()
    expected = capfd.readouterr().out.splitlines()[-1]
    assert expected.startswith("eval_loss") and done.stdout.splitlines()[-1] == expected
