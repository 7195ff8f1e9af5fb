"""The rooms of the library stand on each other: imports go down or stay, never in a circle, and libraries keep a room.

An import counts wherever it stands: at the top of a file, inside a function, or for the type checker alone.
"""

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import networkx as nx
import pytest

import shardc

PACKAGE = Path(shardc.__file__).parent
ROOMS = (  # from the ground up: a file imports from its own room and from rooms before it
    "shardc.language",
    "shardc.wire",
    "shardc.ops",
    "shardc.schedules",
    "shardc.options",
    "shardc.program",
    "shardc.capture",
    "shardc.costs",
    "shardc.passes",
    "shardc.runtime",
    "shardc.compiler",
    "shardc.compile_region",
    "shardc.cache",
    "shardc.report",
    "shardc.search",
    "shardc.api",
    "shardc.verify",
    "shardc.cli",
    "shardc",
)
MOST_FILES = 14  # in a folder
MOST_FILES_AT_THE_TOP = 8  # of shardc/
TORCH_FREE = {  # `shardc --help` and `shardc diff` of two files answer without torch
    "shardc",
    "shardc.__main__",
    "shardc.costs.records",
    "shardc.language.cluster",
    "shardc.language.errors",
    "shardc.language.machine",
    "shardc.language.mesh",
    "shardc.language.partition",
    "shardc.language.record",
    "shardc.language.rule",
    "shardc.language.sharding",
    "shardc.language.size",
    "shardc.language.text",
    "shardc.language.windows",
    "shardc.language.words",
    "shardc.report.dump.budget",
    "shardc.report.dump.diff",
    "shardc.report.dump.records",
    "shardc.report.dump.schema",
    "shardc.report.explain.explanation",
    "shardc.report.explain.records",
    "shardc.report.suggest.html",
    "shardc.report.suggest.records",
    "shardc.report.suggest.text",
}
TORCH_FREE_ROOMS = ("shardc.schedules", "shardc.cli")
LOADS_MODELS = {
    "shardc.cli.targets.target",
    "shardc.cli.targets.inputs",
    "shardc.cli.targets.model",
}  # commands import it once they need a model
MAY_READ_TORCHS_META = {
    "shardc.capture.capture", "shardc.capture.blocks.template", "shardc.capture.assembly",
    "shardc.capture.values.refusals", "shardc.program.node",
    "shardc.program.opaque",
}  # fmt: skip
MAY_CUT_GRAPHS = {
    "shardc.passes.lower.minimum_cut",
    "shardc.passes.reshard.choose_sides",
    "shardc.passes.canonicalize.cut_stages",
    "shardc.passes.verify",
    "shardc.schedules.check",
}


@dataclass(frozen=True)
class Import:
    """``name`` in full; ``is_late``: inside a function, ``is_typing``: for the type checker alone."""

    name: str
    is_late: bool = False
    is_typing: bool = False

    def is_of(self, package: str) -> bool:
        return self.name == package or self.name.startswith(f"{package}.")


def dotted(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(("shardc", *parts)).removesuffix(".__init__")


def folders(package: Path = PACKAGE) -> list[Path]:
    """Every folder of the library, through the links to passes/ and runtime/."""
    below = [path for path in package.iterdir() if path.is_dir() and (path / "__init__.py").exists()]
    return [package, *(found for path in below for found in folders(path))]


MODULES = {dotted(path): path for folder in folders() for path in sorted(folder.glob("*.py"))}


@functools.cache
def imports(module: str) -> list[Import]:
    """Every import of a file; of ``from x import y`` both ``x`` and ``x.y``, since ``y`` may be a module."""
    path = MODULES[module]
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
        for module in MODULES
        for found in imports(module)
        if not found.is_typing and any(found.is_of(package) for package in packages)
    }


def inside(package: str) -> set[str]:
    return {module for module in MODULES if module == package or module.startswith(f"{package}.")}


def file_graph(found: dict[str, list[Import]]) -> nx.DiGraph:
    """Which file imports which. A package counts where a name of its own is imported, not for its modules."""
    graph = nx.DiGraph()
    for module, entries in found.items():
        names = {entry.name for entry in entries} & set(MODULES)
        packages = {name for name in names if any(other.startswith(f"{name}.") for other in names)}
        graph.add_edges_from((module, name) for name in names - packages if name != module)
    return graph


def circles(graph: nx.DiGraph) -> list[set[str]]:
    return [component for component in nx.strongly_connected_components(graph) if len(component) > 1]


def room(module: str) -> int:
    """The floor on which a module stands; the last one also holds ``python -m shardc``."""
    return next(
        (floor for floor, name in enumerate(ROOMS[:-1]) if module == name or module.startswith(f"{name}.")),
        len(ROOMS) - 1,
    )


def upward(graph: nx.DiGraph) -> list[tuple[str, str]]:
    """Imports of a room above; ``shardc/__init__.py`` is the top one, and passes and runtime do not see each other."""
    apart = {ROOMS.index("shardc.passes"), ROOMS.index("shardc.runtime")}
    return [
        (module, name)
        for module, name in graph.edges
        if room(name) > room(module) or (room(name) != room(module) and {room(name), room(module)} == apart)
    ]


ALL = {module: imports(module) for module in MODULES}


def test_imports_that_are_relative_lazy_or_for_typing_are_seen() -> None:
    source = (
        "from . import a\nfrom ..b import c\nimport d.e\n"
        "if TYPE_CHECKING:\n    import f\n"
        "def g():\n    from h import i\n"
    )
    found = list(_walk(ast.parse(source), "shardc.passes", False, False))
    names = ["shardc.passes", "shardc.passes.a", "shardc.b", "shardc.b.c", "d.e", "f", "h", "h.i"]
    assert [entry.name for entry in found] == names
    assert [entry.name for entry in found if entry.is_typing] == ["f"]
    assert [entry.name for entry in found if entry.is_late] == ["h", "h.i"]


def test_every_folder_of_the_library_is_read() -> None:
    assert {"shardc.language.mesh", "shardc.passes.order", "shardc.ops.contraction"} <= set(MODULES)
    assert all(inside(name) for name in ROOMS)


def test_no_files_import_each_other_in_a_circle() -> None:
    assert not circles(file_graph(ALL))


def test_imports_stay_in_their_room_or_go_down() -> None:
    assert not upward(file_graph(ALL))


@pytest.mark.parametrize(
    ("module", "planted"),
    [
        ("shardc.language.mesh", Import("shardc.program.program", is_late=True)),
        ("shardc.costs.count", Import("shardc.api", is_typing=True)),
        ("shardc.passes.propagate.propagate", Import("shardc.runtime.simulator")),
        ("shardc.runtime.simulator", Import("shardc.passes.order", is_late=True)),
    ],
)
def test_a_planted_import_of_a_room_above_is_seen(module: str, planted: Import) -> None:
    assert (module, planted.name) in upward(file_graph(ALL | {module: [*ALL[module], planted]}))


@pytest.mark.parametrize("planted", [Import("shardc.language.sharding", is_late=True), Import("shardc.language.rule")])
def test_a_planted_circle_is_seen(planted: Import) -> None:
    found = circles(file_graph(ALL | {"shardc.language.mesh": [*ALL["shardc.language.mesh"], planted]}))
    assert any({"shardc.language.mesh", planted.name} <= circle for circle in found)


def test_no_room_takes_the_name_of_a_public_function() -> None:
    """Importing ``shardc.NAME`` as a package would put the package where users look for the function."""
    assert not {name for name in shardc.__all__ if f"shardc.{name}" in MODULES}


def test_a_folder_can_be_looked_over() -> None:
    for folder in folders():
        most = MOST_FILES_AT_THE_TOP if folder == PACKAGE else MOST_FILES
        assert len(list(folder.glob("*.py"))) <= most, folder


def test_passes_and_runtime_import_siblings_relatively() -> None:
    for module, path in MODULES.items():
        for parent in ("shardc.passes", "shardc.runtime"):
            if module in inside(parent):
                written = path.read_text()
                assert f"from {parent}" not in written and f"import {parent}" not in written, module


def test_no_module_imports_a_bare_passes_or_runtime() -> None:
    assert not importers("passes", "runtime")


def test_torch_is_private_only_to_capture_and_the_runtime() -> None:
    """Both of torch's versions that we support may differ there, so such imports stay in two rooms and two files."""
    private = {
        module
        for module, entries in ALL.items()
        for found in entries
        if found.is_of("torch") and any(part.startswith("_") for part in found.name.split("."))
    }
    files = {"shardc.program.opaque", "shardc.program.inference"}
    assert private <= {*inside("shardc.capture"), *inside("shardc.runtime"), *files}


@pytest.mark.parametrize(
    ("library", "rooms"),
    [
        ("torch.distributed", inside("shardc.runtime")),
        ("networkx", MAY_CUT_GRAPHS),
        ("sympy", inside("shardc.report.symbolic") | inside("shardc.capture.values") | {"shardc.language.size"}),
        ("argparse", inside("shardc.cli")),
    ],
)
def test_one_library_one_room(library: str, rooms: set[str]) -> None:
    assert importers(library) <= rooms


def torch_free() -> set[str]:
    return TORCH_FREE.union(*map(inside, TORCH_FREE_ROOMS)) - LOADS_MODELS


def test_the_language_imports_no_torch_at_module_level() -> None:
    for module in torch_free():
        found = [entry for entry in imports(module) if entry.is_of("torch")]
        assert all(entry.is_late or entry.is_typing for entry in found), module


def test_the_language_imports_without_torch() -> None:
    names = sorted(torch_free() - {"shardc.__main__"})
    code = f"import sys; import {', '.join(names)}; shardc.Mesh, shardc.P; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_only_program_touches_meta() -> None:
    for module, path in MODULES.items():
        if ".meta" not in path.read_text():
            continue
        touched = [node for node in ast.walk(ast.parse(path.read_text())) if getattr(node, "attr", "") == "meta"]
        assert not touched or module in ("shardc.program.program", *MAY_READ_TORCHS_META), module


def test_every_public_name_exists() -> None:
    assert all(getattr(shardc, name) is not None for name in shardc.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = shardc.nonsense
