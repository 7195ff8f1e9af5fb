"""The key of a compiled model: the same in every process, and another for all that may make another program."""

from __future__ import annotations

import importlib
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardc import Mesh, P, Remat, Zero
from shardc.cache.key import NoKeyError, key_of
from shardc.compiler import Request
from shardc.options import Options

X = torch.ones(4, 6)


class Model(nn.Module):
    """Attributes of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.table, self.number, self.names = torch.arange(6.0), 3, {"a": [1, 2.5], "b": (None, "text")}
        self.function: Callable[[Tensor], Tensor] = scaled(2.0)
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.function(self.second(self.first(x)) + self.table).sum()


def scaled(factor: float) -> Callable[[Tensor], Tensor]:
    """A function with a closure."""
    return lambda x: x * factor


def request(**changes: Any) -> Request:
    """What is asked of the model."""
    given: dict[str, Any] = {"mesh": Mesh(dp=2, tp=2), "annotations": {"x": P("dp")}, "args": (X,)}
    return Request(**given | changes)


def test_values_of_parameters_and_inputs_make_no_difference() -> None:
    first, second = Model(), Model()
    assert key_of(first, request()) == key_of(second, request(args=(torch.zeros(4, 6),)))
    with torch.no_grad():
        first.first.weight.add_(1)
        first.steps.add_(1)
    assert key_of(first, request()) == key_of(second, request())


def test_meshes_remember_what_they_compute_and_have_one_key() -> None:
    mesh = Mesh(dp=2, tp=2)
    before = key_of(Model(), request(mesh=mesh))
    _ = mesh.size, mesh.axis_names, repr(mesh)
    assert key_of(Model(), request(mesh=mesh)) == before


def set_attribute(name: str, value: Any) -> Callable[[Model], Any]:
    """A change of a model."""
    return lambda model: setattr(model, name, value)


CHANGES: dict[str, Callable[[Model], Any]] = {
    "a number": set_attribute("number", 4),
    "a number's type": set_attribute("number", 3.0),
    "in a list": lambda model: model.names["a"].append(0),
    "a constant": set_attribute("table", torch.arange(6.0) + 1),
    "a closure": set_attribute("function", scaled(3.0)),
    "a function": set_attribute("function", torch.tanh),
    "a new attribute": set_attribute("another", None),
    "training": lambda model: model.second.eval(),
    "frozen": lambda model: model.first.weight.requires_grad_(False),
    "dtype": lambda model: model.second.double(),
    "tied": lambda model: setattr(model.second, "weight", model.first.weight),
    "a module": set_attribute("second", nn.Sequential(nn.Linear(6, 6))),
    "a hook": lambda model: model.first.register_forward_hook(lambda module, args, output: output * 2),
    "a buffer": lambda model: model.register_buffer("steps", torch.zeros(2)),
}


@pytest.mark.parametrize("what", CHANGES)
def test_another_model_has_another_key(what: str) -> None:
    model = Model()
    CHANGES[what](model)
    assert key_of(model, request()) != key_of(Model(), request())


OTHERS: dict[str, dict[str, Any]] = {
    "mesh": {"mesh": Mesh(dp=4)},
    "axes": {"mesh": Mesh(tp=2, dp=2)},
    "annotations": {"annotations": {"x": P("tp")}},
    "sizes": {"args": (torch.ones(8, 6),)},
    "an argument": {"args": (X, torch.ones(4))},
    "by name": {"args": (), "kwargs": {"x": X, "mask": X}},
    "no gradients": {"train": False},
    "strict": {"strict": True},
    "zero": {"options": Options(Zero("dp", 2))},
    "remat": {"options": Options(remat=Remat("first"))},
    "outputs": {"differentiable": ("output",)},
}


@pytest.mark.parametrize("what", OTHERS)
def test_another_request_has_another_key(what: str) -> None:
    assert key_of(Model(), request(**OTHERS[what])) != key_of(Model(), request())


def test_modes_of_torch_are_part_of_it() -> None:
    model, keys = Model(), [key_of(Model(), request())]
    with torch.autocast("cpu", torch.bfloat16):
        keys.append(key_of(model, request()))
    torch.set_default_dtype(torch.float64)
    keys.append(key_of(model, request()))
    torch.set_default_dtype(torch.float32)
    assert len(set(keys)) == 3


@pytest.mark.parametrize("value", [threading.Lock(), torch.zeros(1, device="meta"), nn.ReLU, open], ids=repr)
def test_what_says_nothing_of_itself_has_no_key_or_a_name(value: Any) -> None:
    model = Model()
    object.__setattr__(model, "hidden", [value])
    if isinstance(value, type) or value is open:
        assert key_of(model, request()) != key_of(Model(), request())
        return
    with pytest.raises(NoKeyError, match="hidden"):
        key_of(model, request())


SHIFT, SCALES = torch.zeros(2), {"a": 1.0}


def shifted(x: Tensor) -> Tensor:
    """Reads globals."""
    return (x + SHIFT) * SCALES["a"]


class Shifting(nn.Module):
    """Calls what reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return shifted(x * self.weight).sum()


def test_what_the_users_code_reads_of_globals_is_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [key_of(Shifting(), request(args=(torch.ones(2, 2),)))]
    monkeypatch.setitem(SCALES, "a", 2.0)
    keys.append(key_of(Shifting(), request(args=(torch.ones(2, 2),))))
    monkeypatch.setitem(globals(), "SHIFT", torch.ones(2))
    keys.append(key_of(Shifting(), request(args=(torch.ones(2, 2),))))
    assert len(set(keys)) == 3


CODE = """
import torch
from helper import double
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.words = torch.nn.Linear(2, 2), {"some", "words", "in", "a", "set"}
    def forward(self, x):
        return double(self.layer(x)).sum()
"""
PRINT = """
import torch
from shardc import Mesh, P
from shardc.cache.key import key_of
from shardc.compiler import Request
"""
KEY = "print(key_of(Net(), Request(Mesh(dp=2), {'x': P('dp')}, (torch.ones(2, 2),))))"


def printed(folder: Path, text: str, *, is_file: bool = True) -> str:
    """What a process prints that runs a file, or a text at the prompt."""
    (folder / "train.py").write_text(text)
    given = [str(folder / "train.py")] if is_file else ["-c", text]
    environment = {"PYTHONPATH": f"{folder}:{Path(__file__).parents[2]}", "PATH": "", "PYTHONDONTWRITEBYTECODE": "1"}
    run = subprocess.run([sys.executable, *given], env=environment, capture_output=True, text=True, cwd=folder)
    return run.stdout.strip() or run.stderr.strip().splitlines()[-1]


@pytest.mark.slow
def test_it_is_one_in_all_processes_until_the_users_code_changes(tmp_path: Path) -> None:
    text = f"{PRINT}from net import Net\n{KEY}"
    (tmp_path / "net.py").write_text(CODE)
    (tmp_path / "helper.py").write_text("def double(x):\n    return x * 2\n")
    first, again = printed(tmp_path, text), printed(tmp_path, text)
    assert first == again and len(first) == 64
    (tmp_path / "helper.py").write_text("def double(x):\n    return x * 3\n")
    assert printed(tmp_path, text) not in (first, "")
    defined = f"{PRINT}{CODE}{KEY}"
    assert len(printed(tmp_path, defined)) == 64
    assert "in a notebook or at the prompt" in printed(tmp_path, defined, is_file=False)


def test_a_file_that_changes_while_the_process_runs_is_read_again(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "layers_of_a_test.py"
    path.write_text("import torch\nclass Layer(torch.nn.Linear):\n    pass\n")
    layers = importlib.import_module("layers_of_a_test")
    model = nn.Sequential(layers.Layer(6, 6))
    before = key_of(model, request(annotations={"input": P("dp")}))
    path.write_text(f"{path.read_text()}\n    scale = 3\n")
    assert key_of(model, request(annotations={"input": P("dp")})) != before
    del sys.modules["layers_of_a_test"]
