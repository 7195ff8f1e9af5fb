"""What forward keeps for backward, as the allocator of real ranks counts it, is what is announced."""

from __future__ import annotations

import ctypes
import gc
import time

import pytest
from gloo_pool import GlooPool
from gpt import Config
from small_gpt import drawn_gpt
from torch.distributed.device_mesh import init_device_mesh

from shardc import P, parallelize

pytestmark = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="the C library has no mallinfo2")


class Heap(ctypes.Structure):
    """The result of ``mallinfo2``."""

    _fields_ = [(name, ctypes.c_size_t) for name in "arena a b c mapped d e used f g".split()]


def allocated() -> int:
    """Bytes that the process has allocated and not freed, in any thread."""
    read = ctypes.CDLL(None).mallinfo2
    read.restype = Heap
    heap = read()
    return int(heap.mapped + heap.used)


def kept(axis: str, attention: str) -> tuple[int, int]:
    """Bytes that are announced as saved, and those that the heap has more after forward than before."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
    model, (ids, targets) = drawn_gpt(Config(vocab=64, context=1024, width=128, heads=8, layers=4), batch=1)
    inputs = {"ids": ids, "targets": targets}
    parallel = parallelize(model, mesh, dict.fromkeys(inputs, P(None, axis)), attention=attention)
    found = 0
    for _ in range(3):  # the first steps compile, and make what is kept between steps
        parallel.zero_grad()
        gc.collect()
        before = allocated()
        loss = parallel(**inputs)
        time.sleep(0.2)  # what is sent is freed in a thread of gloo
        found = allocated() - before
        loss.backward()
    return parallel.program.memory["saved"], found


@pytest.mark.parametrize(
    ("axis", "attention"), [("cp", "ring"), ("cp:zigzag", "ring"), ("cp", "ulysses"), ("cp", "gather")]
)
def test_what_is_saved_is_what_the_heap_has(gloo: GlooPool, axis: str, attention: str) -> None:
    for announced, found in gloo.run(kept, axis, attention):
        assert found == pytest.approx(announced, rel=0.03)
