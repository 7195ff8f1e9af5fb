"""The key of a compiled model: a digest of all that its program depends on, the same in every process.

That is the model's classes and attributes, the code of the user's own files, what is installed, the call, and what was
asked. Values of parameters, buffers and inputs are no part of it: programs with guards of values are not kept.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import platform
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache, partial
from pathlib import Path
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from shardc.cache.packed import NotPackedError, tensor_bytes
from shardc.capture.call import call_leaves
from shardc.capture.containers import Tree
from shardc.capture.model import state_names
from shardc.capture.signature import attributes_of, leaf_of, signature_of
from shardc.compiler import Request
from shardc.language.mesh import Mesh

PACKAGE = Path(__file__).parents[1]
HOOKS = "_hooks"  # with which the names of attributes end that hold functions by number
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, torch.memory_format)
RANDOM = ("_original_object_hash",)  # of a GenerationConfig of transformers: another number in every process
TABLES = ("_parameters", "_buffers", "_modules")  # of a module: by name and type alone
SDP = ("flash_sdp_enabled", "mem_efficient_sdp_enabled", "math_sdp_enabled", "cudnn_sdp_enabled")


class NoKeyError(Exception):
    """A model that has no key; the message says why."""


def key_of(model: nn.Module, request: Request) -> str:
    """The key of a model compiled as requested. Raises a NoKeyError."""
    writer = _Writer(model)
    writer.add("asked", request.mesh, request.annotations, request.options, request.fixed, request.differentiable)
    writer.add("asked", request.train, request.strict)
    writer.add_call(request)
    writer.add_model()
    writer.add_code()
    return _hashed(writer.parts).hex()


class _Writer:
    """Writes digests of values. ``modules`` and ``tensors``: of the model, by id.

    State: ``parts``, what is written; ``files``, the Python modules that classes and functions in it are defined in.
    """

    def __init__(self, model: nn.Module) -> None:
        self.parts, self.model = list[bytes](), model
        self.modules = {id(module): path for path, module in model.named_modules()}
        parameters, buffers, self.aliases = state_names(model)
        self.tensors = {id(tensor): name for name, tensor in {**parameters, **buffers}.items()}
        self.files = set[str]()
        self._known: dict[int, tuple[Any, bytes]] = {}  # by id, with the object, which is kept alive

    def add(self, what: str, *values: Any) -> None:
        """Write some values. ``what``: they are, for errors."""
        self.parts += [what.encode(), *(self._digest(value, what) for value in values)]

    def add_call(self, request: Request) -> None:
        """Write the call, and the modes of torch in which it is captured."""
        leaves, tree = call_leaves(self.model.forward, request.args, request.kwargs)
        signature = signature_of(leaves, tree, request.train, ())
        for name, value in leaves:
            leaf = leaf_of(value)
            self.add(f"input {name!r}", leaf if isinstance(value, Tensor) else value)
        tensors = [*self.model.parameters(), *(value for _, value in leaves if isinstance(value, Tensor))]
        self.add("the call", tree, signature.default_dtype, signature.autocast, torch.is_grad_enabled())
        self.add("devices", sorted({str(tensor.device) for tensor in tensors}))
        self.add("modes", torch.are_deterministic_algorithms_enabled(), torch.backends.mkldnn.enabled)
        self.add("modes", *(getattr(torch.backends.cuda, name)() for name in SDP))

    def add_model(self) -> None:
        """Write the types of parameters and buffers, and what each module is and has."""
        parameters, buffers, _ = state_names(self.model)
        for name, tensor in {**parameters, **buffers}.items():
            self.add(name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
        self.add("tied", self.aliases)
        for path, module in self.model.named_modules():
            self.add(path, type(module), [(name, list(getattr(module, name))) for name in TABLES])
            for name, value in vars(module).items():
                if name not in TABLES:
                    values = list(value.values()) if name.endswith(HOOKS) else value
                    self.add(f"{path}.{name}" if path else name, values)

    def add_code(self) -> None:
        """Write the code that may run, and the versions of all that is installed."""
        self.add("versions", platform.python_version(), torch.__version__, _installed())
        main = sys.modules.get("__main__")
        if not getattr(main, "__file__", None) and "__main__" in self.files:
            raise NoKeyError("the model is defined in a notebook or at the prompt, and in no file")
        paths = {str(path) for path in PACKAGE.rglob("*.py")}
        for name, module in list(sys.modules.items()):
            path = getattr(module, "__file__", None)
            if path and (name in self.files or not _is_installed(path)):
                paths.add(os.path.realpath(path))
        for path in sorted(paths):
            self.parts.append(_content(path, *_stamp(path)))
        for name, value in read_globals(_functions_of(*map(type, self.model.modules()))):
            try:
                self.add(f"the global {name}", value)
            except NoKeyError:
                if type(value).__module__.split(".")[0] not in sys.stdlib_module_names:  # a logger tells nothing
                    raise

    def _digest(self, value: Any, what: str) -> bytes:
        """A digest of a value: of its type, and its contents or its name."""
        kind = type(value)
        if kind in PLAIN:
            return _hashed([kind.__name__.encode(), repr(value).encode()])
        if id(value) not in self._known:
            self._known[id(value)] = value, b"inside of itself"
            parts = [kind.__module__.encode(), kind.__qualname__.encode()]
            for entry in self._contents(value, what):
                parts.append(entry.encode() if isinstance(entry, _Text) else self._digest(entry, what))
            self._known[id(value)] = value, _hashed(parts)
        return self._known[id(value)][1]

    def _contents(self, value: Any, what: str) -> Iterator[Any]:
        """What a value consists of: texts, and values."""
        if isinstance(value, Tensor):
            yield from self._tensor(value, what)
        elif isinstance(value, nn.Module):
            if id(value) not in self.modules:
                raise NoKeyError(f"{what} holds a {type(value).__name__} that is no module of the model")
            yield _Text(self.modules[id(value)])
        elif isinstance(value, Mapping):
            yield from (part for pair in value.items() for part in pair)
            yield from (attributes_of(value).values() if type(value) is not dict else ())
        elif isinstance(value, (set, frozenset)):
            yield from sorted(value, key=repr)
        elif isinstance(value, (list, tuple, Tree)):
            yield from (value if not isinstance(value, Tree) else (value.kind, value.keys, value.children))
        elif isinstance(value, Enum):
            yield _Text(value.name)
        elif isinstance(value, type):
            yield from (_Text(self._home(each)) for each in value.__mro__)
        elif isinstance(value, FunctionType):
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            yield _Text(self._home(value))
            yield from (value.__code__, value.__defaults__, value.__kwdefaults__, cells)
        elif isinstance(value, CodeType):
            yield from (value.co_code, value.co_names, value.co_consts)
        elif isinstance(value, MethodType):
            yield from (value.__func__, value.__self__)
        elif isinstance(value, partial):
            yield from (value.func, value.args, value.keywords)
        elif isinstance(value, (BuiltinFunctionType, ModuleType, torch._ops.OpOverload)):
            yield _Text(f"{getattr(value, '__module__', '')}.{value.__name__}")
        else:
            yield from self._attributes(value, what)

    def _tensor(self, value: Tensor, what: str) -> Iterator[Any]:
        """A tensor among attributes: a parameter's or buffer's name, else its values, which a program may hold."""
        if id(value) in self.tensors:
            yield _Text(self.tensors[id(value)])
            return
        try:
            yield from (tuple(value.shape), value.dtype, value.requires_grad, tensor_bytes(value))
        except NotPackedError as error:
            raise NoKeyError(f"{what} is {error}") from error

    def _attributes(self, value: Any, what: str) -> Iterator[Any]:
        """A plain object: its class and attributes; of shardc's own, which remember what they compute, the fields."""
        if isinstance(value, Mesh):
            yield _Text(repr(value))
            return
        attributes = attributes_of(value)
        if type(value).__module__.split(".")[0] == "shardc" and is_dataclass(value):
            attributes = {each.name: getattr(value, each.name) for each in fields(value)}
        if not attributes and not _is_empty(value):
            raise NoKeyError(
                f"{what} is a {type(value).__module__}.{type(value).__qualname__}, whose contents are hidden"
            )
        yield type(value)
        yield from (part for pair in attributes.items() for part in pair if pair[0] not in RANDOM)

    def _home(self, value: Any) -> str:
        """The name of a class or function; its file is written too."""
        self.files.add(value.__module__)
        return f"{value.__module__}.{value.__qualname__}"


def _functions_of(*classes: type) -> list[FunctionType]:
    """The functions of classes and of those that they inherit from, in the order of their names."""
    kinds = {each for kind in classes for each in kind.__mro__}
    found = {value for kind in kinds for value in vars(kind).values() if isinstance(value, FunctionType)}
    return sorted(found, key=lambda each: (each.__module__, each.__qualname__))


def read_globals(functions: Sequence[FunctionType]) -> Iterator[tuple[str, Any]]:
    """What functions of the user's files, and those that they call, read of the globals of files, by name."""
    todo, seen = list(functions), set[int]()
    while todo:
        function = todo.pop(0)
        if id(function) in seen or _is_installed(function.__code__.co_filename):
            continue
        seen.add(id(function))
        names = sorted(_names_in(function.__code__))
        cells = [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]
        todo += [value for value in cells if isinstance(value, FunctionType)]  # what a decorator wraps
        known = {name: function.__globals__[name] for name in names if name in function.__globals__}
        for module in [value for value in known.values() if isinstance(value, ModuleType)]:
            if not _is_installed(getattr(module, "__file__", None) or os.__file__):
                inside = {f"{module.__name__}.{name}": vars(module)[name] for name in names if name in vars(module)}
                known |= inside
        for name, value in known.items():
            if isinstance(value, FunctionType):
                todo.append(value)
            elif isinstance(value, type):
                todo += _functions_of(value)
            elif not isinstance(value, (ModuleType, BuiltinFunctionType)):
                yield name, value


def _names_in(code: CodeType) -> set[str]:
    """The names that code reads, that of functions inside of it too."""
    inner = (_names_in(each) for each in code.co_consts if isinstance(each, CodeType))
    return set(code.co_names).union(*inner)


def _hashed(parts: Sequence[bytes]) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.digest()


class _Text(str):
    """A name."""


def _is_empty(value: Any) -> bool:
    """Whether an object is of a class written in Python, and so has no more than its attributes."""
    return hasattr(value, "__dict__") or any("__slots__" in vars(each) for each in type(value).__mro__)


@cache
def _installed() -> tuple[str, ...]:
    """Name and version of every package that Python finds here."""
    names = set[str]()
    for folder in sys.path:
        if os.path.isdir(folder):
            names.update(name for name in os.listdir(folder) if name.endswith((".dist-info", ".egg-info")))
    return tuple(sorted(names))


def _is_installed(path: str) -> bool:
    return path.startswith(_prefixes())


@cache
def _prefixes() -> tuple[str, ...]:
    """The folders of Python's own modules and of installed packages."""
    own = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    found = [*own, *(folder for folder in sys.path if folder.endswith(("site-packages", "dist-packages")))]
    found.append(os.path.dirname(inspect.__file__))  # of a virtual environment Python's own modules are elsewhere
    return tuple({os.path.join(folder, "") for folder in found} | {f"{os.path.realpath(each)}/" for each in found})


def _stamp(path: str) -> tuple[int, int]:
    try:
        status = os.stat(path)
    except OSError:
        return 0, 0
    return status.st_size, status.st_mtime_ns


@cache
def _content(path: str, size: int, changed: int) -> bytes:
    """The digest of a file, which is read again once it has changed."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).digest()
    except OSError:
        return b""
