"""What a user gets: documented names, a complete wheel, no hidden switches."""

from __future__ import annotations

import ast
import inspect
import os
import shutil
import subprocess
import sys
import sysconfig
import textwrap
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dtensor_ring_swa

PACKAGE = Path(dtensor_ring_swa.__file__).parent
ROOT = PACKAGE.parent


def public_functions() -> dict[str, Callable[..., Any]]:
    """Every public function, and every public method that a public class defines itself."""
    found: dict[str, Callable[..., Any]] = {}
    for name in dtensor_ring_swa.__all__:
        thing = getattr(dtensor_ring_swa, name)
        if not inspect.isclass(thing):
            found[name] = thing
            continue
        for attribute, value in vars(thing).items():
            function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
            if not attribute.startswith("_") and inspect.isfunction(function):
                found[f"{name}.{attribute}"] = function
    return found


# Docstrings


def test_all_names_exist_and_are_sorted() -> None:
    assert list(dtensor_ring_swa.__all__) == sorted(set(dtensor_ring_swa.__all__))
    assert all(hasattr(dtensor_ring_swa, name) for name in dtensor_ring_swa.__all__)


@pytest.mark.parametrize("name", dtensor_ring_swa.__all__)
def test_public_name_has_its_own_docstring(name: str) -> None:
    doc = getattr(dtensor_ring_swa, name).__doc__
    # A dataclass without one gets its signature.
    assert doc and not doc.startswith(f"{name}(")


@pytest.mark.parametrize("name", public_functions())
def test_public_function_is_documented(name: str) -> None:
    assert public_functions()[name].__doc__


@pytest.mark.parametrize("name", [name for name in public_functions() if "." not in name])
def test_every_argument_of_a_function_is_documented(name: str) -> None:
    function = public_functions()[name]
    documented = arguments_in(inspect.getdoc(function) or "")
    assert documented == list(inspect.signature(function).parameters)


@pytest.mark.parametrize("name", ["ContextParallel", "RingAttention"])
def test_every_argument_of_a_class_is_documented(name: str) -> None:
    cls = getattr(dtensor_ring_swa, name)
    assert arguments_in(inspect.getdoc(cls) or "") == list(inspect.signature(cls).parameters)


def arguments_in(doc: str) -> list[str]:
    """The names that a Google-style docstring explains under "Args:"."""
    _, _, section = doc.partition("\nArgs:\n")
    lines = []
    for line in section.splitlines():
        if line and not line.startswith(" "):
            break
        lines.append(line)
    entries = [line for line in textwrap.dedent("\n".join(lines)).splitlines() if line and line[0] != " "]
    return [entry.partition(":")[0].lstrip("*") for entry in entries]


# No switch from outside


def environment_reads(tree: ast.AST) -> list[int]:
    """Lines that name what reads the environment."""
    names = {"environ", "environb", "getenv", "getenvb"}
    return [
        node.lineno
        for node in ast.walk(tree)
        if (isinstance(node, ast.Attribute) and node.attr in names)
        or (isinstance(node, ast.Name) and node.id in names)
        or (isinstance(node, ast.ImportFrom) and names & {alias.name for alias in node.names})
    ]


def test_environment_reads_are_found() -> None:
    code = "import os\nos.environ['A']\nos.getenv('A')\nfrom os import environ as e\ngetenv('A')\n"
    assert sorted(environment_reads(ast.parse(code))) == [2, 3, 4, 5]


def test_package_reads_no_environment_variable() -> None:
    sources = sorted(PACKAGE.rglob("*.py"))
    assert sources
    for path in sources:
        assert not environment_reads(ast.parse(path.read_text("utf-8"))), path


# The wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that the tree stays clean and nothing left in it gets in."""
    tree, dist = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("dist")
    shutil.copytree(PACKAGE, tree / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tree / name)
    call(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(dist), str(tree), cwd=dist)
    (built,) = dist.glob("*.whl")
    return built


def call(*command: str, cwd: Path) -> str:
    """Run a command that must succeed, with no path of ours in its environment."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_wheel_holds_every_module_and_the_type_marker_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    modules = {path.relative_to(ROOT).as_posix() for path in PACKAGE.rglob("*.py")}
    assert "dtensor_ring_swa/kernels/__init__.py" in modules
    assert held == modules | {"dtensor_ring_swa/py.typed"}


def test_wheel_requires_only_torch(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = archive.read(name).decode().splitlines()
    required = [line for line in metadata if line.startswith("Requires-Dist:") and "extra ==" not in line]
    assert required == ["Requires-Dist: torch>=2.11"]


USE = """
import importlib, pathlib, pkgutil
import torch
import dtensor_ring_swa as package
import dtensor_ring_swa.testing

for module in pkgutil.walk_packages(package.__path__, "dtensor_ring_swa."):
    # The programs of the kernel triton need the package triton, which is an extra.
    if not module.name.endswith(("__main__", "triton_kernels")) and ".bench" not in module.name:
        importlib.import_module(module.name)

q, k, v = torch.randn(3, 1, 8, 2, 4, dtype=torch.float64).unbind()
out = package.ring_attention(q, k, v, window=package.Window.tokens(3))
want, _ = package.testing.dense_attention(q, k, v, (2, 0))
assert (out - want).abs().max() < 1e-12
print(pathlib.Path(package.__file__).resolve())
"""


def test_wheel_works_in_a_fresh_environment(wheel: Path, tmp_path: Path) -> None:
    fresh = tmp_path / "fresh"
    venv.create(fresh, with_pip=False, symlinks=True)
    python = str(fresh / "bin" / "python")
    call(
        sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", str(wheel), cwd=tmp_path
    )
    (site_packages,) = fresh.glob("lib/python*/site-packages")
    # torch and what it needs come from here; a path file adds its folder after the fresh one.
    (site_packages / "torch.pth").write_text(sysconfig.get_path("purelib"))
    where = call(python, "-I", "-c", USE, cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(fresh.resolve())
