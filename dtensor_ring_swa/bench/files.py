"""The JSON, written and read, and the chart."""

from __future__ import annotations

import importlib
import json
from math import isfinite
from pathlib import Path
from typing import Any

from dtensor_ring_swa.bench.report import DIRECTIONS


def write_json(path: Path, record: dict[str, Any]) -> None:
    """Write all numbers; null for one that is not finite, which JSON does not have."""
    path.write_text(json.dumps(_finite(record), indent=1, allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def read_json(path: Path) -> dict[str, Any]:
    """What ``write_json`` wrote of a measured run.

    Raises:
        ValueError: If it cannot be read, or is something else.
    """
    try:
        record = json.loads(path.read_text())
    except OSError as problem:
        raise ValueError(f"{path} cannot be read: {problem}") from problem
    except (ValueError, RecursionError) as problem:
        raise ValueError(f"{path} is no JSON: {problem}") from problem
    if not _is_measured(record):
        raise ValueError(f"{path} has no measured cases; --json writes them in a run without --simulate-ranks")
    return record


def _is_measured(record: Any) -> bool:
    """Whether what ``plot`` draws is there, and is what it should be."""
    try:
        texts, numbers = [record["device"]], []
        wanted = [record["ranks"], record["versions"]["torch"]]
        for case in record["cases"]:
            texts.append(case["shape"]["name"])
            wanted.append(case["rows"])
            for method in case["methods"]:
                texts.append(method["name"])
                halves = [method[direction] for direction in DIRECTIONS if direction in method]
                numbers += [half["ms"] for half in halves]
                numbers += [half["ratio_to_ideal"] for half in halves if half["ratio_to_ideal"] is not None]
        right = all(isinstance(x, str) for x in texts) and all(isinstance(x, float) for x in numbers)
        return len(record["cases"]) > 0 and right
    except (KeyError, TypeError):
        return False


def plot(path: Path, record: dict[str, Any]) -> None:
    """Draw one row of bars a case: milliseconds of each method, forward and backward.

    Raises:
        ImportError: If matplotlib is missing; the command line is refused before it comes to that.
    """
    # Looked up by name: an extra, and only drawing needs it.
    importlib.import_module("matplotlib").use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")

    cases = record["cases"]
    heights = [max(2.6, 0.8 + 0.26 * sum("skipped" not in method for method in case["methods"])) for case in cases]
    figure, axes = pyplot.subplots(
        len(cases), 2, figsize=(11, sum(heights)), squeeze=False, gridspec_kw={"height_ratios": heights}
    )
    for case, row in zip(cases, axes, strict=True):
        for direction, axis in zip(DIRECTIONS, row, strict=True):
            ran = [method for method in case["methods"] if direction in method]
            bars = axis.barh([m["name"] for m in ran], [m[direction]["ms"] for m in ran])
            ratios = [m[direction]["ratio_to_ideal"] for m in ran]
            axis.bar_label(bars, ["" if r is None else f"{r:.2f}x ideal" for r in ratios], padding=3, fontsize=8)
            axis.invert_yaxis()
            axis.margins(x=0.25)
            axis.set_xlabel("ms")
            axis.set_title(f"{case['shape']['name']}, {case['rows']} rows a rank: {direction}", fontsize=9)
    figure.suptitle(f"{record['ranks']} x {record['device']}, torch {record['versions']['torch']}", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
