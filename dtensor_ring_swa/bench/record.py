"""From samples to the numbers of a record."""

from __future__ import annotations

from typing import Any

from dtensor_ring_swa.bench.case import Case
from dtensor_ring_swa.bench.check import TOLERANCE
from dtensor_ring_swa.bench.report import DIRECTIONS
from dtensor_ring_swa.bench.timing import Contestant
from dtensor_ring_swa.ring import imbalance


def add_times(record: dict[str, Any], contestant: Contestant, flops: float) -> None:
    """The slowest rank's times, and what follows from them. Collective."""
    share, alone = contestant.method.share or 1.0, contestant.method.share is not None
    for direction, factor in zip(DIRECTIONS, (1.0, 2.5), strict=True):
        if direction in record:
            ms, iqr_ms, host_ms = contestant.method.case.environment.maximum(contestant.samples[direction].summary())
            record[direction] |= {"ms": ms * share, "iqr_ms": iqr_ms * share, "host_ms": host_ms}
            if contestant.method.case.request.device.type == "cpu":
                record[direction]["host_ms"] = None
            if alone:
                record[direction]["one_device_ms"] = ms
            record[direction]["tflops"] = factor * flops / (ms * share) / 1e9


def add_imbalance(records: list[dict[str, Any]], contestants: list[Contestant]) -> None:
    """The busiest rank's work over the mean, as planned; and the slowest rank's time over the mean, as measured.

    A rank that waits for another's message is not idle by its clock, so the measured figure can be the
    smaller one. Collective.
    """
    for contestant in contestants:
        method, record = contestant.method, next(r for r in records if r["name"] == contestant.method.name)
        case = method.case
        if method.share is None and not case.extras.given:
            record["imbalance_predicted"] = imbalance(
                method.compute_layout, case.seq_len, case.environment.ranks, case.shape.window
            )
        for direction in DIRECTIONS:
            if direction in record:
                mine = contestant.samples[direction].summary()[:1]
                slowest, mean = case.environment.maximum(mine)[0], case.environment.mean(mine)[0]
                record[direction]["imbalance_measured"] = slowest / mean


def add_ratios(records: list[dict[str, Any]]) -> None:
    """Each time over the ideal's."""
    ideal = next((r for r in records if r["name"] == "ideal" and "skipped" not in r), None)
    for record in records:
        for direction in DIRECTIONS:
            if direction in record:
                ms = record[direction]["ms"]
                record[direction]["ratio_to_ideal"] = ms / ideal[direction]["ms"] if ideal else None


def failures(case: Case, records: list[dict[str, Any]]) -> list[str]:
    """What ``--check`` found."""
    found = []
    for record in records:
        for name, error in record.get("errors", {}).items():
            # A learned sink's gradient is a sum in which much cancels, and each rank rounds its share of it.
            tolerance = TOLERANCE[case.request.dtype] * (4 if name == "dsinks" else 1)
            if not error <= tolerance:
                found.append(f"{record['name']}: {name} is off by {error:.2e}, more than {tolerance:.0e}")
        for direction in DIRECTIONS:
            if record.get(direction, {}).get("bytes_as_predicted") is False:
                found.append(f"{record['name']}: {direction} received other bytes than predicted")
    return found
