"""Run one case: try every method, count its bytes, check it, and race those that run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from dtensor_ring_swa.bench.case import Case
from dtensor_ring_swa.bench.check import NAMES, Expected, errors, expected, rows_of
from dtensor_ring_swa.bench.contest import OURS, gap_of, kinds_for
from dtensor_ring_swa.bench.inputs import Inputs
from dtensor_ring_swa.bench.methods import Given, Method
from dtensor_ring_swa.bench.record import add_imbalance, add_ratios, add_times, failures
from dtensor_ring_swa.bench.report import DIRECTIONS
from dtensor_ring_swa.bench.timing import Clock, Contestant, input_sets, race
from dtensor_ring_swa.bench.wire import count_received


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
    for kind in kinds_for(case.shape, case.extras, names):
        method, reason = _first_run(kind, case, probe)
        if method is None:
            records.append({"name": kind.name, "skipped": reason})
            continue
        trial = _trial(method, probe)
        given = [method.prepare(each) for each in inputs]
        states = [method.forward(each) for each in given]
        contestants.append(Contestant(method, given, states))
        found = errors(rows_of(case, wanted, method.layout), trial.found) if wanted else {}
        records.append({"name": kind.name, **_agree(method, trial, found)})
    race(Clock(environment), contestants, repeats)
    flops = environment.maximum([case.flops])[0]
    for contestant in contestants:
        record = next(r for r in records if r["name"] == contestant.method.name)
        add_times(record, contestant, flops)
    add_ratios(records)
    if case.against_one_device:
        add_imbalance(records, contestants)
    return {"rows": case.rows, "seq_len": case.seq_len, "input_sets": len(inputs), "forward_flops_a_rank": int(flops),
            "methods": records, "failures": failures(case, records) if check else []}  # fmt: skip


def _first_run(kind: type[Method], case: Case, inputs: Inputs) -> tuple[Method | None, str]:
    """Build and run a method once, which also warms it up. A baseline that fails is left out, with the reason."""
    reason = gap_of(kind, case)
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
        found.update(zip(NAMES[1:], method.gradients(grads), strict=False))
    return Trial(received, peak, found)


def _agree(method: Method, trial: Trial, found: dict[str, float]) -> dict[str, Any]:
    """The largest numbers over the ranks, as the start of a record. Collective."""
    maximum = method.case.environment.maximum
    predicted: dict[str, int | None] = dict(zip(DIRECTIONS, method.predicted_bytes() or (None, None), strict=True))
    record: dict[str, Any] = {"peak_bytes": None}
    if method.note:
        record["note"] = method.note
    if method.case.request.device.type == "cuda":
        record["peak_bytes"] = int(maximum([trial.peak_bytes])[0])
    for direction in trial.received:
        expect, count = predicted[direction], trial.received[direction]
        most_expected, most_counted, differs = maximum([expect or 0, count, expect != count])
        comparable = method.counted and expect is not None
        record[direction] = {"received_predicted": None if expect is None else int(most_expected)}
        record[direction]["received_counted"] = int(most_counted) if method.counted else None
        record[direction]["bytes_as_predicted"] = not differs if comparable else None
    if method.backward_gap:
        record["backward_skipped"] = method.backward_gap
    if found:
        record["errors"] = dict(zip(found, maximum(list(found.values())), strict=True))
    return record
