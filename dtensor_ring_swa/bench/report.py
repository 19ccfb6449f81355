"""Tables, and what the numbers were measured on."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from importlib import metadata
from typing import Any

import torch
from torch.cuda import nccl

DIRECTIONS = ("forward", "backward")
_PACKAGES = ("dtensor-ring-swa", "torch", "triton", "flash-attn-4", "flash-attn", "ring_swa")


def versions() -> dict[str, str | None]:
    """Versions of what the numbers depend on; None for what is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    # The checkout may be on the path without being installed, and torch says more than its metadata.
    found["torch"] = str(torch.__version__)
    found["cuda"] = torch.version.cuda
    found["nccl"] = ".".join(map(str, nccl.version())) if torch.cuda.is_available() else None
    return found


def device_name(device: torch.device) -> str:
    """What computes."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they need; the first to the left, numbers to the right."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = []
    for row in (header, *rows):
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells[1:]]).rstrip())
    return "\n".join(lines)


_HEADER = (
    "method", "fwd ms", "+-", "TFLOP/s", "x ideal", "MB in", "counted",
    "bwd ms", "+-", "TFLOP/s", "x ideal", "MB in", "counted", "host ms", "peak MB",
)  # fmt: skip


# Added where the ideal is a share of one device's time.
_BALANCE = ("imbalance", "fwd", "bwd")


def case_table(case: dict[str, Any]) -> str:
    """The numbers of one case, and what was left out with the reason."""
    rows, notes, balance = [], [], any("imbalance_predicted" in method for method in case["methods"])
    for method in case["methods"]:
        if "skipped" in method:
            notes.append(f"{method['name']} not run: {method['skipped']}")
            continue
        if "backward_skipped" in method:
            notes.append(f"{method['name']} backward not run: {method['backward_skipped']}")
        if "note" in method:
            notes.append(f"{method['name']}: {method['note']}")
        halves = [_half(method.get(direction)) for direction in DIRECTIONS]
        host = "/".join(_number(method.get(d, {}).get("host_ms"), 2) for d in DIRECTIONS)
        measured = [_number(method.get(d, {}).get("imbalance_measured"), 3) for d in DIRECTIONS]
        even = (_number(method.get("imbalance_predicted"), 3), *measured) if balance else ()
        rows.append((method["name"], *halves[0], *halves[1], host, _megabytes(method["peak_bytes"]), *even))
    notes += [f"{name} is one device's time for the whole sequence by the ranks: {ms:.3f} ms {direction}"
              for name, direction, ms in _one_device(case)]  # fmt: skip
    notes += [f"CHECK FAILED {failure}" for failure in case["failures"]]
    return "\n".join([table(_HEADER + (_BALANCE if balance else ()), rows), *notes])


def _one_device(case: dict[str, Any]) -> Iterator[tuple[str, str, float]]:
    for method in case["methods"]:
        for direction in DIRECTIONS:
            if "one_device_ms" in method.get(direction, {}):
                yield method["name"], direction, method[direction]["one_device_ms"]


def _half(numbers: dict[str, Any] | None) -> tuple[str, ...]:
    if numbers is None:
        return ("-",) * 6
    return (
        _number(numbers["ms"], 3), _number(numbers["iqr_ms"], 3), _number(numbers["tflops"], 1),
        _number(numbers["ratio_to_ideal"], 3), _megabytes(numbers["received_predicted"]),
        _megabytes(numbers["received_counted"]),
    )  # fmt: skip


def _number(value: float | None, digits: int) -> str:
    if value is None:
        return "-"
    text = f"{value:.{digits}f}"
    # Small cases are not all zeros.
    return f"{value:.1e}" if value and not float(text) else text


def _megabytes(value: float | None) -> str:
    return _number(None if value is None else value / 1e6, 2)
