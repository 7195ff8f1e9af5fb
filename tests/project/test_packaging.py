"""What is built holds every file of the library under its installed name, and nothing else."""

import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("packaging")  # who shares what is made once
ROOT = Path(__file__).parents[2]
SOURCES = {
    "shardc": "shardc",
    "shardc/commands": "shardc/commands",
    "shardc/ops": "shardc/ops",
    "shardc/passes": "passes",
    "shardc/runtime": "runtime",
}


def library() -> set[str]:
    """Every file of the library, by its installed name."""
    modules = {f"{home}/{path.name}" for home, source in SOURCES.items() for path in (ROOT / source).glob("*.py")}
    pages = {f"shardc/page/{path.name}" for path in (ROOT / "shardc/page").iterdir()}
    schemas = {f"shardc/{path.name}" for path in (ROOT / "shardc").glob("*.schema.json")}
    return modules | pages | schemas | {"shardc/py.typed"}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel that was built from it, offline."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("built")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for folder in ("shardc", "passes", "runtime"):
        shutil.copytree(ROOT / folder, tree / folder, symlinks=True, ignore=ignored)
    for file in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / file, tree)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(tree)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def wheel_names(built: Path) -> set[str]:
    [wheel] = built.glob("*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


def test_the_wheel_holds_every_file_and_no_other(built: Path) -> None:
    assert {name for name in wheel_names(built) if ".dist-info/" not in name} == library()


def test_the_wheel_leaks_no_bare_name(built: Path) -> None:
    tops = {name.split("/")[0] for name in wheel_names(built)}
    assert {name for name in tops if not name.endswith(".dist-info")} == {"shardc"}
    [wheel] = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        [tops_file] = [name for name in archive.namelist() if name.endswith("top_level.txt")]
        assert archive.read(tops_file).split() == [b"shardc"]


def test_the_sdist_holds_every_file(built: Path) -> None:
    [sdist] = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    sources = {f"{SOURCES.get(home, home)}/{file}" for home, _, file in (name.rpartition("/") for name in library())}
    assert sources <= names


def test_the_wheel_imports_from_its_own_place(built: Path, tmp_path: Path) -> None:
    [wheel] = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = "import shardc, shardc.passes.order, shardc.runtime.simulator; print(shardc.runtime.simulator.__file__)"
    environment = {"PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()) == tmp_path / "shardc/runtime/simulator.py"


def test_the_links_stand_for_the_folders_at_the_top() -> None:
    for name in ("passes", "runtime"):
        assert (ROOT / "shardc" / name).resolve() == (ROOT / name).resolve()


def test_every_package_is_listed_by_name() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert {name.replace(".", "/") for name in settings["packages"]} == set(SOURCES)
    assert set(settings["package-dir"].values()) == {"passes", "runtime"}
