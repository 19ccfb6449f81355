"""The attention of a whole model whose layers are of two kinds, from the measured times of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dtensor_ring_swa.bench.report import DIRECTIONS, table
from dtensor_ring_swa.bench.shapes import HYBRIDS


def hybrid_records(names: Sequence[str], cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add up the layers of each hybrid model, for each method that ran in both of its cases.

    Args:
        names: The models, keys of ``HYBRIDS``.
        cases: The measured cases, those of the models' shapes among them.
    """
    return [_record(name, cases) for name in names]


def _record(name: str, cases: Sequence[dict[str, Any]]) -> dict[str, Any]:
    kinds = HYBRIDS[name]
    found = [next(c for c in cases if (c["shape"]["name"], c["shape"]["layers"]) == (s.name, s.layers)) for s in kinds]
    by_name = [{method["name"]: method for method in case["methods"]} for case in found]
    methods: list[dict[str, Any]] = []
    for method in by_name[0]:
        parts = [methods_of.get(method, {}) for methods_of in by_name]
        sums = {
            direction: sum(shape.layers * part[direction]["ms"] for shape, part in zip(kinds, parts, strict=True))
            for direction in DIRECTIONS
            if all(direction in part for part in parts)
        }
        if sums:
            methods.append({"name": method, **{direction: {"ms": ms} for direction, ms in sums.items()}})
    ideal = next((m for m in methods if m["name"] == "ideal"), {})
    for method in methods:
        for direction in DIRECTIONS:
            if direction in method:
                best = ideal.get(direction, {}).get("ms")
                method[direction]["ratio_to_ideal"] = method[direction]["ms"] / best if best else None
    layers = {shape.name: shape.layers for shape in kinds}
    return {"name": name, "layers": layers, "methods": methods}


def hybrid_table(record: dict[str, Any]) -> str:
    """The sums as a table."""
    rows = []
    for method in record["methods"]:
        cells = [method["name"]]
        for direction in DIRECTIONS:
            numbers = method.get(direction)
            ratio = None if numbers is None else numbers["ratio_to_ideal"]
            cells += ["-" if numbers is None else f"{numbers['ms']:.3f}", "-" if ratio is None else f"{ratio:.3f}"]
        rows.append(cells)
    layers = ", ".join(f"{count} x {name}" for name, count in record["layers"].items())
    header = ("method", "fwd ms", "x ideal", "bwd ms", "x ideal")
    return f"{record['name']}, attention of all layers, added up: {layers}\n{table(header, rows)}"
