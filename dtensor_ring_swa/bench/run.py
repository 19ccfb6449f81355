"""Run one case: try every method, count its bytes, check it, and race those that run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from dtensor_ring_swa.bench.allgather import AllGather
from dtensor_ring_swa.bench.case import Case, Inputs
from dtensor_ring_swa.bench.check import TOLERANCE, Expected, errors, expected
from dtensor_ring_swa.bench.external import RingSwaPackage, TorchContextParallel
from dtensor_ring_swa.bench.merge_ring import MergeRing
from dtensor_ring_swa.bench.methods import Given, Method
from dtensor_ring_swa.bench.ours import Ideal, Ring, RingDTensor
from dtensor_ring_swa.bench.timing import Clock, Contestant, input_sets, race
from dtensor_ring_swa.bench.wire import count_received

OURS: tuple[type[Method], ...] = (Ring, RingDTensor)
METHODS: dict[str, type[Method]] = {
    kind.name: kind for kind in (*OURS, Ideal, AllGather, MergeRing, TorchContextParallel, RingSwaPackage)
}
DIRECTIONS = ("forward", "backward")


@dataclass
class Trial:
    """What one untimed run of a method showed on this rank."""

    received: dict[str, int]
    peak_bytes: int
    found: Expected


def run_case(case: Case, names: tuple[str, ...], repeats: int, check: bool) -> dict[str, Any]:
    """Measure the methods of these names. Collective.

    Returns:
        The case's record, the same on every rank; ``failures`` in it lists what ``--check`` found.
    """
    environment = case.environment
    probe = Inputs(case, 0)
    set_bytes = sum(probe.own(name).nbytes for name in Given._fields)
    inputs = [probe, *(Inputs(case, i) for i in range(1, input_sets(environment.device, set_bytes)))]
    wanted = expected(probe) if check else None
    contestants, records = [], []
    for name in (kind.name for kind in METHODS.values() if kind in OURS or kind.name in names):
        method, reason = _first_run(METHODS[name], case, probe)
        if method is None:
            records.append({"name": name, "skipped": reason})
            continue
        trial = _trial(method, probe)
        given = [method.prepare(each) for each in inputs]
        states = [method.forward(each) for each in given]
        contestants.append(Contestant(method, given, states))
        found = errors(wanted, trial.found) if wanted else {}
        records.append({"name": name, **_agree(method, trial, found)})
    race(Clock(environment), contestants, repeats)
    flops = environment.maximum([case.flops])[0]
    for contestant in contestants:
        record = next(r for r in records if r["name"] == contestant.method.name)
        _add_times(record, contestant, flops)
    _add_ratios(records)
    return {"rows": case.rows, "seq_len": case.seq_len, "input_sets": len(inputs), "forward_flops_a_rank": int(flops),
            "methods": records, "failures": _failures(case, records) if check else []}  # fmt: skip


def _first_run(kind: type[Method], case: Case, inputs: Inputs) -> tuple[Method | None, str]:
    """Build and run a method once, which also warms it up. A baseline that fails is left out, with the reason."""
    reason = kind.gap(case)
    # A package may be installed on some hosts only.
    if case.environment.maximum([reason is not None])[0]:
        return None, reason or "it cannot run on another rank"
    method, problem = None, ""
    try:
        method = kind(case)
        given = method.prepare(inputs)
        state = method.forward(given)
        if not method.backward_gap:
            method.backward(given, state)
    except Exception as error:
        if kind in OURS:
            raise
        method, problem = None, f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
    if case.environment.maximum([method is None])[0]:
        return None, problem or "it failed on another rank"
    return method, ""


def _trial(method: Method, inputs: Inputs) -> Trial:
    """Run once more, with bytes and memory counted."""
    device, cuda = inputs.case.request.device, inputs.case.request.device.type == "cuda"
    given = method.prepare(inputs)
    before = 0
    if cuda:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    received, found = {}, {}
    with count_received() as count:
        state = method.forward(given)
    received["forward"] = count.bytes
    found["out"] = method.output(state)
    grads = None
    if not method.backward_gap:
        with count_received() as count:
            grads = method.backward(given, state)
        received["backward"] = count.bytes
    peak = torch.cuda.max_memory_allocated(device) - before if cuda else 0
    if grads is not None:
        found.update(zip(("dq", "dk", "dv"), method.gradients(grads), strict=True))
    return Trial(received, peak, found)


def _agree(method: Method, trial: Trial, found: dict[str, float]) -> dict[str, Any]:
    """The largest numbers over the ranks, as the start of a record. Collective."""
    maximum = method.case.environment.maximum
    predicted: dict[str, int] = dict(zip(DIRECTIONS, method.predicted_bytes(), strict=True))
    record: dict[str, Any] = {"peak_bytes": None}
    if method.case.request.device.type == "cuda":
        record["peak_bytes"] = int(maximum([trial.peak_bytes])[0])
    for direction in trial.received:
        expect, count = predicted[direction], trial.received[direction]
        most_expected, most_counted, differs = maximum([expect, count, expect != count])
        record[direction] = {"received_predicted": int(most_expected)}
        record[direction]["received_counted"] = int(most_counted) if method.counted else None
        record[direction]["bytes_as_predicted"] = not differs if method.counted else None
    if method.backward_gap:
        record["backward_skipped"] = method.backward_gap
    if found:
        record["errors"] = dict(zip(found, maximum(list(found.values())), strict=True))
    return record


def _add_times(record: dict[str, Any], contestant: Contestant, flops: float) -> None:
    for direction, factor in zip(DIRECTIONS, (1.0, 2.5), strict=True):
        if direction in record:
            numbers = contestant.method.case.environment.maximum(contestant.samples[direction].summary())
            record[direction].update(zip(("ms", "iqr_ms", "host_ms"), numbers, strict=True))
            if contestant.method.case.request.device.type == "cpu":
                record[direction]["host_ms"] = None
            record[direction]["tflops"] = factor * flops / numbers[0] / 1e9


def _add_ratios(records: list[dict[str, Any]]) -> None:
    ideal = next((r for r in records if r["name"] == Ideal.name and "skipped" not in r), None)
    for record in records:
        for direction in DIRECTIONS:
            if direction in record:
                ms = record[direction]["ms"]
                record[direction]["ratio_to_ideal"] = ms / ideal[direction]["ms"] if ideal else None


def _failures(case: Case, records: list[dict[str, Any]]) -> list[str]:
    tolerance = TOLERANCE[case.request.dtype]
    failures = []
    for record in records:
        for name, error in record.get("errors", {}).items():
            if not error <= tolerance:
                failures.append(f"{record['name']}: {name} is off by {error:.2e}, more than {tolerance:.0e}")
        for direction in DIRECTIONS:
            if record.get(direction, {}).get("bytes_as_predicted") is False:
                failures.append(f"{record['name']}: {direction} received other bytes than predicted")
    return failures
