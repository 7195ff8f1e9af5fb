"""Gives each rank on one host a link of its own to a switch, like the hosts of a cluster."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from bench import limit, private_network
from torch.distributed import FileStore  # type: ignore[attr-defined]

BRIDGE, PORT, LINK = "switch", "port", "link0"
NEW_NETWORK = 0x40000000  # CLONE_NEWNET; ``os.unshare`` is in Python 3.12 and later


@contextmanager
def switch(mbit: int | None) -> Iterator[None]:
    """A network for processes started in the block; if ``mbit`` is given, with a switch that they ``plug_in`` to."""
    with private_network(is_needed=mbit is not None):
        if mbit is not None:
            _ip("link", "add", BRIDGE, "type", "bridge")
            _ip("link", "set", BRIDGE, "up")
        yield


def plug_in(mbit: int, directory: str) -> None:
    """Move this rank to a network whose only link leads to the switch, ``mbit`` Mbit/s in each direction.

    The process group is created again over that link. ``directory``: an empty one, the same on all ranks.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    if ctypes.CDLL(None).unshare(NEW_NETWORK):
        raise OSError("this rank can have no network of its own")
    _ip("link", "add", LINK, "type", "veth", "peer", "name", f"{PORT}{rank}", "netns", f"{os.getppid()}")
    _ip("addr", "add", f"10.0.0.{rank + 1}/24", "dev", LINK)
    _ip("link", "set", LINK, "up")
    limit(mbit, LINK)
    at_the_switch = ("nsenter", f"--net=/proc/{os.getppid()}/ns/net")
    _ip("link", "set", f"{PORT}{rank}", "master", BRIDGE, "up", within=at_the_switch)
    limit(mbit, f"{PORT}{rank}", within=at_the_switch)
    os.environ["GLOO_SOCKET_IFNAME"] = LINK
    store = FileStore(str(Path(directory) / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)


def _ip(*words: str, within: tuple[str, ...] = ()) -> None:
    subprocess.run([*within, "ip", *words], check=True)
