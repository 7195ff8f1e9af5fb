"""The network that ranks talk over: a loopback interface of their own, slowed down where that is asked for."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from shardc.runtime.comm.messages import loopback, private_loopback


@contextmanager
def network(mbit: int | None = None) -> Iterator[None]:
    """Processes started in the block share a network with no one else; at so many Mbit/s, by ``tc``'s token bucket.

    Where the system does not allow the first, the block runs as it is and says so; the second is then an error.
    """
    with private_loopback() as is_private:
        if not is_private:
            print("no private network here: what others send on loopback is counted too", file=sys.stderr)
            if mbit is not None:
                raise SystemExit("--mbit needs a private network: Linux, and root's rights (unshare -n)")
        if mbit is not None:
            bucket = ("tbf", "rate", f"{mbit}mbit", "burst", "256kb", "latency", "200ms")
            subprocess.run(["tc", "qdisc", "add", "dev", loopback(), "root", *bucket], check=True)
        yield
