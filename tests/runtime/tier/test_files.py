"""Reads and writes of files in large blocks are those of the memory that is mapped, and files are closed at the end."""

from __future__ import annotations

import errno
import os
import random
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardc.runtime.tier import files
from shardc.runtime.tier.files import empty_in, folder_of, is_open, read, write

NUMEL, PAGE = 300_001, 1024  # of float32; elements of a page
LARGE = NUMEL * 4


def refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system whose files cannot be transferred past the page cache, as tmpfs."""
    opened = os.open

    def open_cached(path: str, flags: int, *args: Any) -> int:
        if flags & files.DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return opened(path, flags, *args)

    monkeypatch.setattr(files.os, "open", open_cached)


def in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that transfers at most so many bytes in a call."""
    for name in ("preadv", "pwritev"):
        call = getattr(os, name)
        monkeypatch.setattr(files.os, name, lambda fd, data, at, call=call: call(fd, [data[0][:100_000]], at))


def with_few_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files.resource, "getrlimit", lambda what: (4, 4))


def as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    pass


@pytest.mark.parametrize("system", [as_it_is, refused, in_pieces, with_few_descriptors])
def test_reads_writes_and_changes_in_place_in_any_order_are_those_of_a_plain_tensor(
    system: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system(monkeypatch)
    chosen, generator = random.Random(0), torch.Generator().manual_seed(0)
    x, plain = empty_in(str(tmp_path), (NUMEL,), torch.float32), torch.zeros(NUMEL)
    assert is_open(x) == (system is not with_few_descriptors)
    for _ in range(120):
        step = chosen.choice((1, PAGE))  # pages are transferred past the cache, others are not
        begin, end = sorted(step * chosen.randrange(NUMEL // step) for _ in range(2))
        part, memory, is_cached = slice(begin, end), aligned(end - begin), chosen.random() < 0.3
        match chosen.randrange(4):
            case 0:
                assert torch.equal(read(x[part], memory, is_cached), plain[part])
            case 1:
                write(x[part], memory.normal_(generator=generator), is_cached)
                plain[part] = memory
            case 2:
                x[part].mul_(0.5)  # by the user
                plain[part].mul_(0.5)
            case 3:
                assert torch.equal(x[part], plain[part])
    assert torch.equal(read(x, torch.empty(NUMEL)), plain) and plain.count_nonzero() > NUMEL // 2


def aligned(numel: int) -> Tensor:
    memory = torch.empty(numel + PAGE)
    return memory[-memory.data_ptr() % (4 * PAGE) // 4 :][:numel]


def test_tensors_of_other_strides_shapes_and_types_are_copied_as_ever(tmp_path: Path) -> None:
    x = empty_in(str(tmp_path), (600, 512), torch.float32)
    values = torch.randn(512, 600)
    write(x, values.t())
    assert torch.equal(x, values.t()) and torch.equal(read(x.t(), torch.empty(512, 600)), values)
    assert torch.equal(read(x, torch.empty(600, 512, dtype=torch.bfloat16)), values.t().bfloat16())
    assert torch.equal(read(x[3], torch.empty(2, 512)), values.t()[3].expand(2, 512))
    y, values = empty_in(str(tmp_path), (NUMEL,), torch.complex64), torch.randn(NUMEL, dtype=torch.complex64)
    assert torch.equal(write(y, values.conj()), values.conj()) and torch.equal(read(y.conj(), y.clone()), values)


def test_an_error_of_the_disk_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = empty_in(str(tmp_path), (NUMEL,), torch.float32)

    def fail(*args: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(files.os, "preadv", fail)
    for is_cached in (True, False):
        with pytest.raises(OSError, match="Input/output"):
            read(x, torch.empty(NUMEL), is_cached)


def open_files(folder: Path) -> int:
    """How many files of a folder the process has open."""
    found = 0
    for each in Path("/proc/self/fd").iterdir():
        try:
            found += os.readlink(each).startswith(str(folder))
        except FileNotFoundError:  # that of the folder itself, which has been read
            pass
    return found


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="/proc is of Linux")
def test_a_file_is_open_as_long_as_a_tensor_in_it_lives(tmp_path: Path) -> None:
    x, small = empty_in(str(tmp_path), (NUMEL,), torch.float32), empty_in(str(tmp_path), (3,), torch.float32)
    assert open_files(tmp_path) == 1 and not is_open(small) and folder_of(small) == str(tmp_path)
    weight = torch.nn.Parameter(x.view(-1)[: NUMEL - 1])
    del x
    loss = (weight * weight).sum()  # saves it
    del weight
    assert open_files(tmp_path) == 1
    loss.backward()
    del loss
    assert open_files(tmp_path) == 0


def test_half_of_the_descriptors_stay_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    probe = os.open(tmp_path, os.O_RDONLY)
    os.close(probe)
    monkeypatch.setattr(files.resource, "getrlimit", lambda what: (2 * probe, most))
    made = [empty_in(str(tmp_path), (NUMEL,), torch.float32) for _ in range(3)]
    assert [is_open(each) for each in made] == [True, False, False]
    del made[0]
    assert is_open(empty_in(str(tmp_path), (NUMEL,), torch.float32))
