"""Checkpoints of one process: all values come back, damaged ones are refused by name, and the latest stays whole."""

from __future__ import annotations

import errno
import json
import os
import pickle
import random
import resource
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.nn import functional as F

import shardc
from shardc import CheckpointError, Mesh
from shardc.runtime.checkpoint import file, save
from shardc.runtime.checkpoint.file import CODES, Header, OpenFile, write_file
from shardc.runtime.checkpoint.folder import published_in
from shardc.runtime.checkpoint.index import Index, sealed

RANK = "rank-00000.safetensors"


class Model(nn.Module):
    """A tied embedding, two dtypes, a batch norm with buffers, a buffer that is not saved, dropout."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, width)
        self.norm = nn.BatchNorm1d(width)
        self.mixed = nn.Parameter(torch.randn(width, dtype=torch.bfloat16))
        self.head = nn.Linear(width, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = F.dropout(self.norm(self.embedding(ids)), 0.2, self.training) * self.mixed.float()
        return F.cross_entropy(self.head(x), ids)


def adafactor(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(parameters, lr=0.01)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda each: torch.optim.AdamW(each, lr=torch.tensor(0.01)),
    "Adam, amsgrad": lambda each: torch.optim.Adam(each, amsgrad=True),
    "fused": lambda each: torch.optim.AdamW(each, fused=True),
    "SGD": lambda each: torch.optim.SGD(each, lr=0.1, momentum=0.9),
    "SGD without state": lambda each: torch.optim.SGD(each, lr=0.1),
    "Adafactor": adafactor,
    "NAdam": lambda each: torch.optim.NAdam(each),
    "ASGD": lambda each: torch.optim.ASGD(each),
    "Rprop": lambda each: torch.optim.Rprop(each),
    "LBFGS": lambda each: torch.optim.LBFGS(each, max_iter=2),
}


class Run:
    def __init__(self, seed: int = 0, kind: str = "AdamW") -> None:
        torch.manual_seed(seed)
        self.model = Model().double() if kind == "LBFGS" else Model()
        self.optimizer = OPTIMIZERS[kind](self.model.parameters())
        self.rates = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [3, 5])

    def step(self, seed: int) -> float:
        torch.manual_seed(seed)

        def loss() -> torch.Tensor:
            self.optimizer.zero_grad()
            found = self.model(torch.arange(10) % 5)
            found.backward()
            return found

        found = self.optimizer.step(loss)
        self.rates.step()
        return float(found.detach())


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_run_goes_on_bit_for_bit(kind: str, tmp_path: Path) -> None:
    one = Run(0, kind)
    for seed in range(3):
        one.step(seed)
    path = shardc.save(tmp_path, one.model, one.optimizer, scheduler=one.rates, step=3).wait()
    other = Run(1, kind)
    if kind == "SGD":
        other.step(7)  # it has a state of its own already
    loaded = shardc.load(tmp_path, other.model, other.optimizer, scheduler=other.rates)
    assert loaded == {"step": 3, "extra": None, "path": path}
    assert other.rates.state_dict() == one.rates.state_dict()
    assert isinstance(other.rates.milestones, Counter)
    assert [other.step(seed) for seed in range(3, 6)] == [one.step(seed) for seed in range(3, 6)]
    for (name, mine), theirs in zip(one.model.state_dict().items(), other.model.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs), name


def test_virtual_ranks_and_a_plain_module_read_each_others_checkpoints(tmp_path: Path) -> None:
    one = shardc.parallelize(Model(), Mesh(dp=2))
    one.seed, one.step = 5, 7
    shardc.save(tmp_path / "a", one).wait()
    plain = Model()
    shardc.load(tmp_path / "a", plain)
    assert torch.equal(plain.head.weight, one.head.weight)
    shardc.save(tmp_path / "b", plain).wait()
    other = shardc.parallelize(Model(), Mesh(tp=3))
    shardc.load(tmp_path / "a" / "step-00000007", other)
    assert (other.seed, other.step) == (5, 7)
    shardc.load(tmp_path / "b", other)
    assert torch.equal(other.mixed, one.mixed)


def test_without_a_module_all_that_was_saved_comes_as_plain_tensors(tmp_path: Path) -> None:
    run, scaler = Run(), torch.amp.GradScaler("cpu")
    run.step(0)
    extra = {"epoch": 3, "best": float("inf"), "shape": (2, [None, True]), "rng": torch.get_rng_state(), 5: "five"}
    extra |= {"kind": torch.bfloat16, "a/b": torch.arange(3), "a%2Fb": torch.ones(1), "empty": torch.zeros(0, 2)}
    shardc.save(tmp_path, run.model, run.optimizer, scheduler=run.rates, scaler=scaler, extra=extra, step=1).wait()
    found = shardc.load(tmp_path)
    assert set(found) == {"model", "optimizer", "scheduler", "scaler", "extra", "step", "path"}
    for name, value in run.model.state_dict().items():
        assert torch.equal(found["model"][name], value) and type(found["model"][name]) is torch.Tensor
    assert found["model"]["head.weight"] is found["model"]["embedding.weight"]
    state = run.optimizer.state[run.model.mixed]
    assert torch.equal(found["optimizer"]["state"]["mixed"]["exp_avg"], state["exp_avg"])
    assert found["scaler"] == scaler.state_dict()
    for key, value in extra.items():
        same = (
            torch.equal(found["extra"][key], value) if isinstance(value, torch.Tensor) else found["extra"][key] == value
        )
        assert same, key


def test_the_files_are_those_of_safetensors_and_json(tmp_path: Path) -> None:
    run = Run()
    run.step(0)
    folder = shardc.save(tmp_path, run.model, run.optimizer).wait()
    content = json.loads((folder / "index.json").read_text())
    tensors = safetensors.torch.load_file(folder / "rank-00000.safetensors")
    assert set(tensors) == {piece["key"] for each in content["tensors"].values() for piece in each["pieces"]}
    assert torch.equal(tensors["model/mixed"], run.model.mixed)
    for each in folder.iterdir():
        with pytest.raises(pickle.UnpicklingError):
            pickle.loads(each.read_bytes())
        assert b"torch._utils" not in each.read_bytes()


@pytest.mark.parametrize("dtype", CODES)
def test_every_dtype_is_written_as_the_library_reads_it(dtype: torch.dtype, tmp_path: Path) -> None:
    value = torch.randint(0, 2, (3, 40)).to(torch.uint8).repeat(1, dtype.itemsize).view(dtype)
    key = 'a "key"'
    write_file(
        tmp_path / "x", {"empty": Header("F64", (0, 2)), key: Header(CODES[dtype], (3, 40))}, [torch.zeros(0), value]
    )
    theirs = safetensors.torch.load_file(tmp_path / "x")
    ours = OpenFile(tmp_path / "x")
    for found in (theirs[key], ours.tensor(key)):
        assert found.dtype == dtype and torch.equal(found.view(torch.uint8), value.view(torch.uint8))
    assert theirs["empty"].shape == ours.tensor("empty").shape == (0, 2)
    safetensors.torch.save_file({"b": value, "c": torch.arange(5)}, tmp_path / "y")
    assert torch.equal(OpenFile(tmp_path / "y").tensor("b").view(torch.uint8), value.view(torch.uint8))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: Any) -> Path:
    run = Run()
    run.step(0)
    extra = {"note": "x" * 40, "rows": torch.arange(30)}
    path = tmp_path_factory.mktemp("saved")
    shardc.save(path, run.model, run.optimizer, scheduler=run.rates, extra=extra, step=4).wait()
    return path


@pytest.fixture
def damaged(saved: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def refused(path: Path, *names: str) -> CheckpointError:
    """The error of a load, which has changed nothing."""
    run = Run(3)
    run.step(1)
    before = [each.clone() for each in run.model.state_dict().values()]
    state = [value.clone() for each in run.optimizer.state.values() for value in each.values()]
    with pytest.raises(CheckpointError) as caught:
        shardc.load(path, run.model, run.optimizer, scheduler=run.rates)
    assert all(map(torch.equal, before, run.model.state_dict().values()))
    now = [value for each in run.optimizer.state.values() for value in each.values()]
    assert all(map(torch.equal, state, now)) and run.rates.last_epoch == 1
    assert all(name in str(caught.value) for name in names), caught.value
    assert str(caught.value).count("\n") >= 2
    return caught.value


def flips(saved: Path, count: int) -> Iterator[tuple[str, int]]:
    """Bits of all files, as many of each file."""
    generator = random.Random(0)
    files = sorted(each.relative_to(saved) for each in saved.rglob("*") if each.is_file())
    assert [str(each) for each in files] == [
        "latest",
        "step-00000004/index.json",
        "step-00000004/rank-00000.safetensors",
    ]
    for i in range(count):
        name = files[i % len(files)]
        yield str(name), generator.randrange((saved / name).stat().st_size * 8)


@pytest.mark.parametrize("count", [24, pytest.param(600, marks=pytest.mark.sweep)])
def test_every_flipped_bit_is_refused_by_the_name_of_its_file(damaged: Path, saved: Path, count: int) -> None:
    for name, bit in flips(saved, count):
        data = bytearray((damaged / name).read_bytes())
        data[bit // 8] ^= 1 << bit % 8
        (damaged / name).write_bytes(data)
        refused(damaged, name)
        data[bit // 8] ^= 1 << bit % 8
        (damaged / name).write_bytes(data)
    shardc.load(damaged)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b" ")


def replace_by(make: Callable[[Path], Any]) -> Callable[[Path], None]:
    def replace(path: Path) -> None:
        path.rename(path.with_name("elsewhere"))
        make(path)

    return replace


DAMAGES = {
    "missing": (lambda path: path.unlink(), "no such file"),
    "cut short": (truncate, "it was cut short or changed"),
    "too long": (lengthen, "the index says"),
    "a link": (replace_by(lambda path: path.symlink_to(path.with_name("elsewhere"))), "a symbolic link"),
    "a pipe": (replace_by(os.mkfifo), "a folder, a pipe or a device"),
    "a folder": (replace_by(Path.mkdir), "a folder, a pipe or a device"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_refused_by_its_name(damage: str, damaged: Path) -> None:
    act, text = DAMAGES[damage]
    act(damaged / "step-00000004" / RANK)
    refused(damaged, f"step-00000004/{RANK}", text)


@pytest.mark.parametrize("damage", ["missing", "cut short", "a link", "a pipe", "a folder"])
@pytest.mark.parametrize("name", ["step-00000004/index.json", "latest"])
def test_a_damaged_index_or_pointer_is_refused_by_its_name(name: str, damage: str, damaged: Path) -> None:
    DAMAGES[damage][0](damaged / name)
    if (name, damage) == ("latest", "missing"):
        shardc.load(damaged)  # as after a death before the first pointer was written
    else:
        refused(damaged, name)


def forged(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change an index and seal it again, as someone who means harm can."""
    content = json.loads((folder / "index.json").read_text())
    del content["sha256"]
    change(content)
    body = json.dumps(content)[:-1].encode()
    (folder / "index.json").write_bytes(sealed(body))
    (folder.parent / "latest").unlink()


def piece(content: dict[str, Any]) -> dict[str, Any]:
    return content["tensors"]["model/mixed"]["pieces"][0]


def rename_file(name: str) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        content["files"] = {name: content["files"][RANK]}
        for each in content["tensors"].values():
            for block in each["pieces"]:
                block["file"] = name

    return change


FORGERIES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a path out of the folder": (rename_file("../../secret.safetensors"), "no name of a file in the checkpoint's own"),
    "an absolute path": (rename_file("/etc/passwd"), "no name of a file in the checkpoint's own"),
    "a hidden file": (rename_file(".x.safetensors"), "no name of a file in the checkpoint's own"),
    "a file that is not listed": (lambda c: piece(c).update(file="rank-00001.safetensors"), "not among its files"),
    "a key that is not there": (lambda c: piece(c).update(key="model/nothing"), "'model/mixed'\n  the index says None"),
    "a huge tensor": (lambda c: c["tensors"].update(
        {"model/huge": {"dtype": "F32", "shape": [2**40, 2**20], "pieces": []}}), "do not cover"),
    "a huge block": (lambda c: c["tensors"].update({"model/huge": {"dtype": "F32", "shape": [2**40], "pieces": [
        {"offsets": [0], "sizes": [2**40], "file": RANK, "key": "x"}]}}), "bytes of tensors are in rank-00000"),
    "a negative size": (lambda c: piece(c).update(sizes=[-1]), "are no sizes"),
    "a size that is no number": (lambda c: piece(c).update(sizes=[True]), "are no sizes"),
    "an unknown dtype": (lambda c: c["tensors"]["model/mixed"].update(dtype="F33"), "did you mean F32"),
    "an unknown version": (lambda c: c.update(version=2), "this shardc reads 'shardc checkpoint' version 1"),
    "an unknown tag": (lambda c: c["values"].update(extra={"$object": "os"}), "a value of unknown kind '$object'"),
    "no dtype": (lambda c: c["values"].update(extra={"$dtype": "load"}), "'load' is no dtype"),
    "a list for a table": (lambda c: c.update(tensors=[]), "AttributeError"),
    "no aliases": (lambda c: c.pop("aliases"), "KeyError: 'aliases'"),
    "a tie to nothing": (lambda c: c.update(aliases={"head.weight": "x"}), "tied to 'x', which is not there"),
    "tensors of another shape": (lambda c: c["tensors"]["model/mixed"].update(shape=[2, 3], pieces=[
        {**piece(c), "offsets": [0, 0], "sizes": [2, 3]}]), "BF16 [2, 3] in the checkpoint"),
}  # fmt: skip


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_index_is_refused(name: str, damaged: Path) -> None:
    change, text = FORGERIES[name]
    forged(damaged / "step-00000004", change)
    refused(damaged, "step-00000004", text)


@pytest.mark.parametrize(("text", "problem"), [
    (b'{"a": 1, "a": 2', "a name stands twice"),
    (b'{"a": NaN', "NaN is no JSON"),
    (b'{"a": ' + b"[" * 10**5 + b"]" * 10**5, "RecursionError"),
    (b'{"a": ' + b"9" * 10**5, "ValueError"),
    (b'{"format": "other", "version": 1', "of format 'other'"),
    (b"\xff\xfe", "UnicodeDecodeError"),
    (b"", "Error"),
])  # fmt: skip
def test_json_that_is_made_to_harm_is_refused(text: bytes, problem: str, damaged: Path) -> None:
    (damaged / "step-00000004" / "index.json").write_bytes(sealed(text))
    refused(damaged / "step-00000004", "index.json", problem)


def test_an_index_without_its_seal_is_refused() -> None:
    with pytest.raises(ValueError, match="its last line is not the SHA-256"):
        Index.parse(b'{"format": "shardc checkpoint"}')


def test_what_does_not_fit_the_module_is_refused(saved: Path) -> None:
    run = Run()
    with pytest.raises(CheckpointError, match=r"'mixed': BF16 \[6\] in the checkpoint\n.*BF16 \[8\]"):
        shardc.load(saved, Model(8))
    with pytest.raises(CheckpointError, match=r"'mixed': BF16 \[6\] in the checkpoint\n  the module's is F64 \[6\]"):
        model = Model()
        model.mixed = nn.Parameter(torch.zeros(6, dtype=torch.float64))
        shardc.load(saved, model)
    run.model.heat = nn.Parameter(torch.zeros(1))
    with pytest.raises(
        CheckpointError, match=r"'heat': a parameter or buffer\n  the checkpoint does not have it\n.*head"
    ):
        shardc.load(saved, run.model)
    del run.model.heat, run.model.mixed
    with pytest.raises(CheckpointError, match="'mixed': a parameter or buffer\n  the module does not have it"):
        shardc.load(saved, run.model)
    with pytest.raises(CheckpointError, match="saved without scaler="):
        shardc.load(saved, Model(), scaler=torch.amp.GradScaler("cpu"))
    untied = Model()
    untied.norm.register_parameter("twin", untied.mixed)
    with pytest.raises(CheckpointError, match="'norm.twin'"):
        shardc.load(saved, untied)
    with pytest.raises(CheckpointError, match="on meta in the module"):
        shardc.load(saved, Model().to("meta"))
    grouped = Model()
    half = torch.optim.AdamW([grouped.mixed], lr=torch.tensor(0.01))
    shardc.load(saved, grouped, half)
    with pytest.raises(CheckpointError, match="is not a parameter of the module"):
        shardc.load(saved, Model(), half)


def test_untied_weights_get_the_tied_value_and_two_values_do_not_fit_a_tied_one(saved: Path, tmp_path: Path) -> None:
    untied = Model()
    untied.head.weight = nn.Parameter(torch.zeros(5, 6))
    shardc.load(saved, untied)
    assert torch.equal(untied.head.weight, untied.embedding.weight)
    shardc.save(tmp_path, untied).wait()
    with pytest.raises(CheckpointError, match=r"'head.weight': tied to 'embedding.weight' in the module"):
        shardc.load(tmp_path, Model())


def test_what_cannot_be_saved_is_refused_by_its_path(tmp_path: Path) -> None:
    class Other:
        pass

    model = Model()
    with pytest.raises(CheckpointError, match=r"extra.a.1: a value of type .*Other\n.*runs no code"):
        shardc.save(tmp_path, model, extra={"a": [1, Other()]})
    with pytest.raises(CheckpointError, match="extra/x: complex128"):
        shardc.save(tmp_path, model, extra={"x": torch.zeros(2, dtype=torch.complex128)})
    with pytest.raises(CheckpointError, match="model/mixed: bfloat16, strided, on meta"):
        model.mixed = nn.Parameter(model.mixed.to("meta"))
        shardc.save(tmp_path, model)
    with pytest.raises(CheckpointError, match="step: -1"):
        shardc.save(tmp_path, model, step=-1)
    with pytest.raises(CheckpointError, match="keep: 0"):
        shardc.save(tmp_path, model, keep=0)
    with pytest.raises(CheckpointError, match="module: of type dict"):
        shardc.save(tmp_path, {})
    with pytest.raises(CheckpointError, match="optimizer: of type dict"):
        shardc.save(tmp_path, model, {})
    assert not published_in(tmp_path)


def test_a_path_without_a_checkpoint_says_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no such folder"):
        shardc.load(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="no checkpoint is there"):
        shardc.load(tmp_path)
    with pytest.raises(CheckpointError, match="without a module"):
        shardc.load(tmp_path, None, Run().optimizer)


def test_the_last_k_are_kept_and_latest_names_the_last(tmp_path: Path) -> None:
    model = Model()
    for step in (1, 2, 7, 8, 3):  # 3: a run that was resumed from 2
        shardc.save(tmp_path, model, step=step, keep=2).wait()
    assert sorted(published_in(tmp_path)) == ["step-00000003", "step-00000008"]
    assert shardc.load(tmp_path)["step"] == 3
    assert shardc.save(tmp_path, model, step=3, keep=2).wait().name == "step-00000003.1"
    assert sorted(published_in(tmp_path)) == ["step-00000003", "step-00000003.1"]
    assert shardc.save(tmp_path, model).wait().name == "step-00000004"
    assert sorted(each.name for each in tmp_path.iterdir())[0] == "latest"


def test_leftovers_of_a_killed_save_are_removed_and_other_files_are_not(tmp_path: Path) -> None:
    for name in (".saving-0123456789abcdef", ".removing-0123456789abcdef", ".saving-mine", "step-notes"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").write_text("x")
    (tmp_path / ".latest-0123456789abcdef").write_text("x")
    shardc.save(tmp_path, Model(), step=1, keep=1).wait()
    assert sorted(each.name for each in tmp_path.iterdir()) == [".saving-mine", "latest", "step-00000001", "step-notes"]


def test_a_save_that_goes_on_is_not_taken_for_a_leftover(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def save_twice(*args: Any) -> Any:
        monkeypatch.setattr(save, "write_file", write_file)
        shardc.save(tmp_path, Model(), step=2).wait()
        return write_file(*args)

    monkeypatch.setattr(save, "write_file", save_twice)
    shardc.save(tmp_path, Model(), step=1).wait()
    assert sorted(published_in(tmp_path)) == ["step-00000001", "step-00000002"]


def test_a_full_disk_is_named_and_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    shardc.save(tmp_path, Model(), step=1).wait()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"rank-00000.safetensors: file too large\n  it cannot be written"):
            shardc.save(tmp_path, nn.Linear(100, 100), step=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["latest", "step-00000001"]
    assert shardc.load(tmp_path)["step"] == 1


@pytest.mark.parametrize("call", ["fsync", "mkdir", "rename", "replace"])
def test_every_failure_on_the_way_leaves_the_old_checkpoint(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shardc.save(tmp_path, Model(), step=1).wait()

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(CheckpointError, match="no space left on device"):
            shardc.save(tmp_path, Model(), step=2)
    assert shardc.load(tmp_path)["step"] in (1, 2)  # 2: it was published, and only its pointer is missing
    shardc.save(tmp_path, Model(), step=3).wait()
    assert shardc.load(tmp_path)["step"] == 3


def test_a_save_in_the_background_has_the_values_of_its_call(tmp_path: Path) -> None:
    run = Run()
    run.step(0)
    expected = run.model.mixed.detach().clone()
    handle = shardc.save(tmp_path, run.model, run.optimizer, step=1, asynchronous=True)
    with torch.no_grad():
        run.model.mixed.zero_()
    assert torch.equal(shardc.load(handle.wait())["model"]["mixed"], expected)
    assert handle.is_done


def test_errors_of_a_save_in_the_background_are_raised_by_wait_or_by_the_next_save(tmp_path: Path) -> None:
    model, path = Model(), tmp_path / "file"
    path.write_text("")
    handle = shardc.save(path, model, asynchronous=True)
    with pytest.raises(CheckpointError, match="file exists"):
        handle.wait()
    shardc.save(path, model, asynchronous=True)
    with pytest.raises(CheckpointError, match="file exists"):
        shardc.save(tmp_path / "good", model)
    shardc.save(tmp_path / "good", model)  # an error is raised once
    slow = shardc.save(tmp_path / "good", model, step=5, asynchronous=True)
    shardc.save(tmp_path / "good", model, step=6)
    assert slow.is_done and shardc.load(tmp_path / "good")["step"] == 6


def killed(path: Path, count: int, seed: int, latest: float) -> list[int]:
    """Save in child processes, each killed within ``latest`` seconds; the step of the checkpoint after each."""
    generator, steps = random.Random(seed), []
    for _ in range(count):
        child = os.fork()
        if not child:
            try:
                model, first = nn.Linear(64, 64), shardc.load(path)["step"] + 1
                for step in range(first, first + 1000):
                    nn.init.constant_(model.weight, step)
                    nn.init.constant_(model.bias, step)
                    shardc.save(path, model, step=step, keep=2)
            finally:
                os._exit(1)
        time.sleep(generator.uniform(0.01, latest))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        found = shardc.load(path)
        assert bool(
            (found["model"]["weight"] == found["step"]).all() and (found["model"]["bias"] == found["step"]).all()
        )
        steps.append(found["step"])
    return steps


@pytest.mark.parametrize("count", [8, pytest.param(150, marks=pytest.mark.sweep)])
def test_after_a_kill_at_a_random_moment_the_latest_loads_whole(count: int, tmp_path: Path) -> None:
    model = nn.Linear(64, 64)
    nn.init.constant_(model.weight, 0)
    nn.init.constant_(model.bias, 0)
    start = time.monotonic()
    shardc.save(tmp_path, model, step=0)
    steps = killed(tmp_path, count, seed=0, latest=max(0.06, 10 * (time.monotonic() - start)))
    assert steps == sorted(steps) and steps[-1] > 0, steps
    shardc.save(tmp_path, model, step=10**6, keep=2)
    left = [each.name for each in tmp_path.iterdir() if each.name.startswith(".")]
    assert not left, left


def test_writing_needs_no_library_but_torch(tmp_path: Path) -> None:
    assert not {"numpy", "safetensors"} & {name for name in vars(file) if not name.startswith("_")}
