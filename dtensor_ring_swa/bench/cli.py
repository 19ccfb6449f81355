"""The command: refuse what cannot run, then run, predict or list."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from dtensor_ring_swa.bench.case import Case, Environment, distributed, is_first_here, local_device
from dtensor_ring_swa.bench.files import plot, read_json, write_json
from dtensor_ring_swa.bench.hybrid import hybrid_records, hybrid_table
from dtensor_ring_swa.bench.job import Job, jobs_of
from dtensor_ring_swa.bench.options import Options, parse
from dtensor_ring_swa.bench.parser import BASELINES, OURS
from dtensor_ring_swa.bench.report import case_table, device_name, versions
from dtensor_ring_swa.bench.run import run_case
from dtensor_ring_swa.bench.shapes import HYBRIDS, SHAPES
from dtensor_ring_swa.bench.simulate import simulate
from dtensor_ring_swa.kernels import KERNELS, Request


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        The exit code, the same on every rank: 0, 1 if ``--check`` found a fault, 2 if the command cannot be
        carried out. That is found out before the ranks meet, and on each of them, but for files that turn out
        not to be writable and methods of which none ran. What runs without ranks is written by the first process
        of a host alone, and only that one knows if it could not be.
    """
    try:
        options = parse(argv)
        if options.simulate_ranks is not None or options.recorded is not None or options.list:
            return _without_ranks(options)
        device = local_device(options.device)
        jobs = jobs_of(options, device)
    except (ValueError, NotImplementedError) as problem:
        return _refused(problem)
    with distributed(device) as environment:
        return run_jobs(jobs, options, environment)


def _without_ranks(options: Options) -> int:
    """Predict, draw or list: once a host, however many processes were started.

    Raises:
        ValueError: If the record to draw is none, or the device to list is not there.
    """
    if options.recorded is not None and options.plot is not None:
        record, path = read_json(options.recorded), options.plot
        return _write(path, lambda: plot(path, record)) if is_first_here() else 0
    if options.list:
        listing = _listing(local_device(options.device))
        if is_first_here():
            print(listing)
        return 0
    if not is_first_here():
        return 0
    record = simulate(options)
    return _write(path, lambda: write_json(path, record)) if (path := options.json) else 0


def _write(path: Path, write: Callable[[], None]) -> int:
    """Write a file; 2 if it could not be written."""
    try:
        write()
    except (ImportError, OSError, ValueError, RuntimeError) as problem:
        return _refused(ValueError(f"{path} could not be written; pass another path: {problem}"))
    return 0


def _refused(problem: Exception) -> int:
    # One line, since others' messages may have more; and one write: the lines of many ranks do not mix.
    sys.stderr.write(f"bench: {' '.join(str(problem).split())}\n")
    sys.stderr.flush()
    return 2


def run_jobs(jobs: Sequence[Job], options: Options, environment: Environment) -> int:
    """Measure, print and write. Collective.

    Returns:
        0; 1 if ``--check`` found a fault; 2 if a case had no method that ran, or a file could not be written.
    """
    record: dict[str, Any] = {
        "versions": versions(), "device": device_name(environment.device), "ranks": environment.ranks,
        "repeats": options.repeats, "batch": options.batch, "extras": asdict(options.extras), "cases": [],
    }  # fmt: skip
    first = environment.rank == 0
    for job in jobs:
        case = Case(job.shape, job.rows, options.batch, job.request, job.kernel, environment, options.extras)
        dtype = str(job.request.dtype).removeprefix("torch.")
        measured = run_case(case, options.methods, options.repeats, options.check)
        shape = asdict(job.shape)
        record["cases"].append({"shape": shape, "dtype": dtype, "kernel": job.kernel.NAME, **measured})
        if first:
            print(
                f"\n{job.shape}\n{job.rows} rows on each of {environment.ranks} x {record['device']}, "
                f"batch {options.batch}, {dtype}, kernel {job.kernel.NAME}"
                + (f", {options.extras.asked}" if options.extras.given else "")
                + (f" ({job.shape.note})" if job.shape.note else ""),
            )
            print(case_table(record["cases"][-1]), flush=True)
    record["hybrids"] = hybrid_records(options.hybrids, record["cases"])
    code = 1 if any(case["failures"] for case in record["cases"]) else 0
    for case in record["cases"]:
        if all("skipped" in method for method in case["methods"]):
            code = 2
            if first:
                _refused(ValueError(f"{case['shape']['name']}: no method ran; its table says why"))
    if first:
        print("".join(f"\n{hybrid_table(hybrid)}\n" for hybrid in record["hybrids"]), end="", flush=True)
        if json := options.json:
            code = max(code, _write(json, lambda: write_json(json, record)))
        if picture := options.plot:
            code = max(code, _write(picture, lambda: plot(picture, record)))
    # What only the first rank can find out: all of them end alike.
    return int(environment.maximum([code])[0])


def _listing(device: torch.device) -> str:
    lines = ["shapes:", *(f"  {shape}{f' ({shape.note})' if shape.note else ''}" for shape in SHAPES.values())]
    lines += ["both kinds of layer of a model:", *(f"  {name}" for name in HYBRIDS)]
    lines += [f"methods, as far as they suit the window: --ours {','.join(OURS)} --baselines {','.join(BASELINES)}"]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    lines += [f"kernels on {device_name(device)}, {str(dtype).removeprefix('torch.')}, head dim 128:"]
    request = Request(device, dtype, 128, 128, 128**-0.5)
    lines += [f"  {name}: {kernel.supports(request) or 'runs'}" for name, kernel in KERNELS.items()]
    return "\n".join(lines)
