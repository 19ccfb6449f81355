"""What the documentation names exists: links, files, modules, flags; and its tables say what code and records say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import dtensor_ring_swa
from dtensor_ring_swa import Window, make_plan
from dtensor_ring_swa.bench.options import parse

import train
from pages import PAGES, ROOT, commands

PACKAGE = Path(dtensor_ring_swa.__file__).parent
FILES = [path.relative_to(ROOT).as_posix() for top in (PACKAGE, ROOT / "tests", ROOT / "examples", ROOT / "docs")
         for path in top.rglob("*.*")]  # fmt: skip


def anchors(page: Path) -> set[str]:
    """The headings of a page, as GitHub names them in addresses."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.S | re.M), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\((?!http)([^)\s]+)\)", PAGES[page]):
        path, _, anchor = target.partition("#")
        linked = (ROOT / page).parent / path if path else ROOT / page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


@pytest.mark.parametrize("page", PAGES)
def test_python_files_that_are_named_exist(page: str) -> None:
    for name in re.findall(r"`([\w/]+\.py)", PAGES[page]):
        assert name == "snippet.py" or any(f"/{file}".endswith(f"/{name}") for file in FILES), name


@pytest.mark.parametrize("page", PAGES)
def test_imports_from_the_package_work(page: str) -> None:
    for line in re.findall(r"from dtensor_ring_swa[\w.]* import [\w, ]*\w|import dtensor_ring_swa[\w.]*", PAGES[page]):
        exec(line, {})


def test_contributing_explains_every_module_once() -> None:
    table = re.findall(r"^\| (`.*?) \|", PAGES["CONTRIBUTING.md"], re.M)
    named = [name for row in table for name in re.findall(r"`([\w/]+\.py)`", row)]
    alone = {path.name for path in PACKAGE.glob("*.py")} - {"__init__.py"}
    assert sorted(name for name in named if "/" not in name and name in alone) == sorted(alone)
    folders = {f"`{path.parent.name}/`" for path in PACKAGE.glob("*/__init__.py")}
    assert {folder for folder in folders if folder not in PAGES["CONTRIBUTING.md"]} == set()


# Commands


def test_flags_of_commands_exist() -> None:
    pytest.importorskip("matplotlib", reason="--plot needs it")
    trained, timed = [], []
    for words in commands():
        ranks = int(words[words.index("--nproc-per-node") + 1]) if "--nproc-per-node" in words else 1
        if "examples/train.py" in words:
            train.arguments(without_folders(words[words.index("examples/train.py") + 1 :]), ranks)
            trained.append(words)
        if "dtensor_ring_swa.bench" in words:
            parse(words[words.index("dtensor_ring_swa.bench") + 1 :])
            timed.append(words)
    assert trained and timed


def without_folders(words: list[str]) -> list[str]:
    """Without ``--resume``, whose folder must exist."""
    return words[: words.index("--resume")] if "--resume" in words else words


# Numbers


def test_halos_in_the_guide_are_those_of_the_plan() -> None:
    row = r"\| (\d+)/(\d+)/(\d+) \| \((\d+), (\d+)\) \| ([\d.]+) MB.*?\| ([\d.]+) MB \|"
    rows = re.findall(row, PAGES["docs/guide.md"])
    assert len(rows) == 9
    for *integers, halo, whole in rows:
        _, kv_heads, head_dim, left, right = map(int, integers)
        plan = make_plan(131072, 8, 3, Window(left, right))
        for said, size in ((halo, plan.bytes(kv_heads=kv_heads, head_dim=head_dim)),
                           (whole, 131072 * kv_heads * head_dim * 2 * 2)):  # fmt: skip
            assert float(said) == round(size / 1e6, len(said.partition(".")[2]))


def test_times_in_the_readme_are_those_of_the_records() -> None:
    def times(record: str, method: str) -> str:
        """Of the first case in a record, forward / backward in ms."""
        case = json.loads((ROOT / f"docs/measured/{record}.json").read_text())["cases"][0]
        (one,) = (each for each in case["methods"] if each["name"] == method)
        return " / ".join(f"{one[direction]['ms']:.2f}" for direction in ("forward", "backward"))

    table = re.findall(r"^\| ([^|]*) \| (\d+\.\d+ / \d+\.\d+) \|", PAGES["README.md"], re.M)
    methods = ("ring", "allgather", "torch-cp", "merge-ring")
    assert [said for _, said in table] == [times("window-4095-and-127", method) for method in methods]
