"""Imports point inward: the core knows neither the passes nor the runtime, and no library leaves its room."""

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import shardc

PACKAGE = Path(shardc.__file__).parent
COMMANDS = {
    "shardc.cli",
    "shardc.invocation",
    *(f"shardc.commands.{path.stem}" for path in (PACKAGE / "commands").glob("[!_]*.py")),
}
FRONT_DOORS = COMMANDS | {
    "shardc",
    "shardc.__main__",
    "shardc.advice",
    "shardc.alternatives",
    "shardc.api",
    "shardc.init_parameters",
    "shardc.retry",
    "shardc.symbol_plan",
    "shardc.symbol_target",
    "shardc.verify",
}
TORCH_FREE = {
    "shardc",
    "shardc.__main__",
    "shardc.action",
    "shardc.annotations",
    "shardc.arguments",
    "shardc.budget",
    "shardc.chain",
    "shardc.check_text",
    "shardc.collective",
    "shardc.commands",
    *COMMANDS,
    "shardc.device",
    "shardc.diff",
    "shardc.diff_text",
    "shardc.dump_file",
    "shardc.error",
    "shardc.fit",
    "shardc.link",
    "shardc.machine",
    "shardc.mesh",
    "shardc.json_text",
    "shardc.min_max",
    "shardc.outcome",
    "shardc.permutation",
    "shardc.rule",
    "shardc.schedule_bound",
    "shardc.schedule_check",
    "shardc.schedule_choice",
    "shardc.schedule_greedy",
    "shardc.schedule_messages",
    "shardc.schedule_order",
    "shardc.schedule_picture",
    "shardc.schedule_run",
    "shardc.schedule_text",
    "shardc.schedule_time",
    "shardc.sharding",
    "shardc.stage_mark",
    "shardc.stage_cost",
    "shardc.text",
    "shardc.timeline",
    "shardc.traffic",
}
MAY_READ_TORCHS_META = {"shardc.capture", "shardc.joint", "shardc.opaque"}
MAY_CUT_GRAPHS = {
    "shardc.passes.choose_saved",
    "shardc.passes.choose_sides",
    "shardc.passes.cut_stages",
    "shardc.passes.verify",
    "shardc.schedule_check",
}


@dataclass(frozen=True)
class Import:
    """``name`` in full; ``is_late``: inside a function, ``is_typing``: for the type checker alone."""

    name: str
    is_late: bool
    is_typing: bool

    def is_of(self, package: str) -> bool:
        return self.name == package or self.name.startswith(f"{package}.")


def modules() -> dict[str, Path]:
    """Every module of the library, by its dotted name."""
    paths = [path for folder in ("", "ops", "passes", "runtime") for path in (PACKAGE / folder).glob("*.py")]
    return {dotted(path): path for path in paths}


def dotted(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(("shardc", *parts)).removesuffix(".__init__")


@functools.cache
def imports(module: str, path: Path) -> list[Import]:
    """Every import of a file; of ``from x import y`` both ``x`` and ``x.y``, since ``y`` may be a module."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    return list(_walk(ast.parse(path.read_text()), package, is_late=False, is_typing=False))


def _walk(node: ast.AST, package: str, is_late: bool, is_typing: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield from (Import(name, is_late, is_typing) for name in _names(child, package))
        else:
            late = is_late or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
            typing = is_typing or (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test))
            yield from _walk(child, package, late, typing)


def _names(node: ast.Import | ast.ImportFrom, package: str) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    parents = package.split(".")
    home = ".".join([*parents[: len(parents) + 1 - node.level], node.module or ""]).strip(".")
    home = home if node.level else node.module or ""
    return [home, *(f"{home}.{alias.name}" for alias in node.names)]


def importers(*packages: str) -> set[str]:
    """The modules that import one of these at run time."""
    return {
        module
        for module, path in modules().items()
        for found in imports(module, path)
        if not found.is_typing and any(found.is_of(package) for package in packages)
    }


def inside(package: str) -> set[str]:
    return {module for module in modules() if module == package or module.startswith(f"{package}.")}


def test_the_walk_sees_relative_late_and_typing_imports() -> None:
    source = (
        "from . import a\nfrom ..b import c\nimport d.e\n"
        "if TYPE_CHECKING:\n    import f\n"
        "def g():\n    from h import i\n"
    )
    found = list(_walk(ast.parse(source), "shardc.passes", False, False))
    assert [entry.name for entry in found] == [
        "shardc.passes",
        "shardc.passes.a",
        "shardc.b",
        "shardc.b.c",
        "d.e",
        "f",
        "h",
        "h.i",
    ]
    assert [entry.name for entry in found if entry.is_typing] == ["f"]
    assert [entry.name for entry in found if entry.is_late] == ["h", "h.i"]


def test_every_folder_of_the_library_is_read() -> None:
    assert {"shardc.mesh", "shardc.passes.pipeline", "shardc.ops.contraction"} <= set(modules())
    assert inside("shardc.runtime")


def test_passes_and_runtime_never_import_each_other() -> None:
    assert not importers("shardc.runtime") & inside("shardc.passes")
    assert not importers("shardc.passes") & inside("shardc.runtime")


def test_only_the_front_doors_import_passes_and_runtime() -> None:
    outside = set(modules()) - inside("shardc.passes") - inside("shardc.runtime") - FRONT_DOORS
    assert not importers("shardc.passes", "shardc.runtime") & outside


def test_only_front_doors_import_front_doors() -> None:
    doors = FRONT_DOORS - {"shardc"}
    assert importers(*doors) <= FRONT_DOORS


def test_passes_and_runtime_import_siblings_relatively() -> None:
    for module, path in modules().items():
        parent = module.rpartition(".")[0]
        if parent in ("shardc.passes", "shardc.runtime"):
            written = path.read_text()
            assert f"from {parent}" not in written and f"import {parent}" not in written, module


def test_no_module_imports_a_bare_passes_or_runtime() -> None:
    assert not importers("passes", "runtime")


def test_torch_is_private_only_to_capture_and_the_runtime() -> None:
    """Both of torch's versions that we support may differ there, so such imports stay in two rooms."""
    private = {
        module
        for module, path in modules().items()
        for found in imports(module, path)
        if found.is_of("torch") and any(part.startswith("_") for part in found.name.split("."))
    }
    rooms = ("capture", "decomposition", "higher_order", "body", "opaque", "record", "refusal", "guard", "watch")
    capture = {f"shardc.{name}" for name in rooms}
    assert private <= {*capture, *inside("shardc.runtime")}


@pytest.mark.parametrize(
    ("library", "rooms"),
    [
        ("torch.distributed", inside("shardc.runtime")),
        ("networkx", MAY_CUT_GRAPHS),
        ("sympy", {module for module in modules() if module.startswith("shardc.symbol_")}),
        ("argparse", {"shardc.arguments", "shardc.parser", *COMMANDS}),
    ],
)
def test_one_library_one_room(library: str, rooms: set[str]) -> None:
    assert importers(library) <= rooms


def test_the_language_imports_no_torch_at_module_level() -> None:
    for module in TORCH_FREE & set(modules()):
        found = [entry for entry in imports(module, modules()[module]) if entry.is_of("torch")]
        assert all(entry.is_late or entry.is_typing for entry in found), module


def test_the_language_imports_without_torch() -> None:
    names = sorted(TORCH_FREE & set(modules()) - {"shardc.__main__"})
    code = f"import sys; import {', '.join(names)}; shardc.Mesh, shardc.P; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_only_program_touches_meta() -> None:
    for module, path in modules().items():
        if ".meta" not in path.read_text():
            continue
        touched = [node for node in ast.walk(ast.parse(path.read_text())) if getattr(node, "attr", "") == "meta"]
        assert not touched or module in ("shardc.program", *MAY_READ_TORCHS_META), module


def test_every_public_name_exists() -> None:
    assert all(getattr(shardc, name) is not None for name in shardc.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = shardc.nonsense
