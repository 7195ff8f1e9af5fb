"""The wheel and the sdist hold every file of the library under its installed name, and nothing else."""

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
FILES = ("*.py", "*.html", "*.css", "*.js", "py.typed")


def files() -> dict[str, str]:
    """Every file of the library by its installed name, and where it stands in the checkout."""
    found = {}
    for source, installed in {"shardc": "shardc", "passes": "shardc/passes", "runtime": "shardc/runtime"}.items():
        for path in (path for pattern in FILES for path in (ROOT / source).rglob(pattern)):
            name = path.relative_to(ROOT / source).as_posix()
            if not (source == "shardc" and name.startswith(("passes/", "runtime/"))):  # links to the folders at the top
                found[f"{installed}/{name}"] = f"{source}/{name}"
    return found


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel that was built from it, offline."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("built")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for folder in ("shardc", "passes", "runtime"):
        shutil.copytree(ROOT / folder, tree / folder, symlinks=True, ignore=ignored)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, tree)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(tree)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def wheel_names(built: Path) -> set[str]:
    [wheel] = built.glob("*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


def test_the_wheel_holds_every_file_and_no_other(built: Path) -> None:
    assert {name for name in wheel_names(built) if ".dist-info/" not in name} == set(files())


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
    assert set(files().values()) <= names


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
    packages = {name.removesuffix("/__init__.py") for name in files() if name.endswith("/__init__.py")}
    assert {name.replace(".", "/") for name in settings["packages"]} == packages
    assert set(settings["package-dir"].values()) == {"passes", "runtime"}
