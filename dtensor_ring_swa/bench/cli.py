"""The command: refuse what cannot run, then run, predict or list."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from dtensor_ring_swa.attention import ring_attention
from dtensor_ring_swa.bench.case import Case, Environment, distributed, local_device
from dtensor_ring_swa.bench.hybrid import hybrid_records, hybrid_table
from dtensor_ring_swa.bench.options import BASELINES, DTYPES, OURS, Options, parse
from dtensor_ring_swa.bench.report import case_table, device_name, plot, read_json, versions, write_json
from dtensor_ring_swa.bench.run import run_case
from dtensor_ring_swa.bench.shapes import HYBRIDS, SHAPES, Shape
from dtensor_ring_swa.bench.simulate import simulate
from dtensor_ring_swa.kernels import KERNELS, Kernel, Request, choose


@dataclass(frozen=True)
class Job:
    """A shape that can run here."""

    shape: Shape
    rows: int
    request: Request
    kernel: Kernel


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        The exit code: 0, 1 if ``--check`` found a fault, 2 if the command cannot be carried out. The
        last is found out before the ranks meet, and on each of them.
    """
    try:
        options = parse(argv)
        if options.simulate_ranks is not None:
            return simulate(options)
        if options.recorded is not None and options.plot is not None:
            plot(options.plot, read_json(options.recorded))
            return 0
        device = local_device(options.device)
        if options.list:
            print(_listing(device))
            return 0
        jobs = [_job(shape, options, device) for shape in options.shapes]
    except (ValueError, NotImplementedError) as problem:
        # One write: the lines of many ranks do not mix.
        sys.stderr.write(f"bench: {problem}\n")
        sys.stderr.flush()
        return 2
    with distributed(device) as environment:
        return _run(jobs, options, environment)


def _job(shape: Shape, options: Options, device: torch.device) -> Job:
    """Check that a shape can run on this device.

    Raises:
        NotImplementedError: If the named kernel cannot serve it.
        ValueError: If it cannot fit into the device's memory.
    """
    cuda = device.type == "cuda"
    dtype = DTYPES[options.dtype or ("bfloat16" if cuda else "float32")]
    rows = options.rows or (32768 if cuda else 512)
    request = Request(
        device, dtype, shape.head_dim, shape.v_head_dim, scale=shape.head_dim**-0.5, softcap=shape.softcap
    )
    try:
        kernel = choose(options.kernel, request)
        if options.extras.given:
            kernel = _kernel_with_extras(options, shape, request)
    except NotImplementedError as problem:
        raise NotImplementedError(f"{shape}: {problem}") from problem
    if cuda:
        # q, dq, out, dout, and k, v, dk, dv once each: no method gets by with less.
        width = (shape.q_heads + shape.kv_heads) * (shape.head_dim + shape.v_head_dim)
        least = 2 * options.batch * rows * width * dtype.itemsize
        memory = torch.cuda.get_device_properties(device).total_memory
        if least > memory:
            raise ValueError(
                f"{shape}: {rows} rows need at least {least / 1e9:.1f} GB, the device has {memory / 1e9:.1f}; "
                "pass fewer --rows"
            )
    return Job(shape, rows, request, kernel)


def _kernel_with_extras(options: Options, shape: Shape, request: Request) -> Kernel:
    """The first kernel allowed that can also do what is asked besides a window, tried on a few tokens.

    Raises:
        NotImplementedError: If none can.
    """
    names = list(KERNELS) if options.kernel == "auto" else [options.kernel]
    names = [name for name in names if KERNELS[name].supports(request) is None]
    few, like = 16, {"device": request.device, "dtype": request.dtype}
    widths = ((shape.q_heads, shape.head_dim), (shape.kv_heads, shape.head_dim), (shape.kv_heads, shape.v_head_dim))
    tensors = [options.extras.pack(torch.zeros(1, few, *width, **like)) for width in widths]
    arguments = options.extras.arguments(few, shape.q_heads, request.device, request.dtype)
    for name in names:
        try:
            ring_attention(*tensors, window=shape.window, softcap=shape.softcap, kernel=name, **arguments)
        except NotImplementedError:
            if name == names[-1]:
                raise
        else:
            return KERNELS[name]
    raise AssertionError("choose() found a kernel")


def _run(jobs: Sequence[Job], options: Options, environment: Environment) -> int:
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
    if first:
        print("".join(f"\n{hybrid_table(hybrid)}\n" for hybrid in record["hybrids"]), end="", flush=True)
        if options.json:
            write_json(options.json, record)
        if options.plot:
            plot(options.plot, record)
    return 1 if any(case["failures"] for case in record["cases"]) else 0


def _listing(device: torch.device) -> str:
    lines = ["shapes:", *(f"  {shape}{f' ({shape.note})' if shape.note else ''}" for shape in SHAPES.values())]
    lines += ["both kinds of layer of a model:", *(f"  {name}" for name in HYBRIDS)]
    lines += [f"methods, as far as they suit the window: --ours {','.join(OURS)} --baselines {','.join(BASELINES)}"]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    lines += [f"kernels on {device_name(device)}, {str(dtype).removeprefix('torch.')}, head dim 128:"]
    request = Request(device, dtype, 128, 128, 128**-0.5)
    lines += [f"  {name}: {kernel.supports(request) or 'runs'}" for name, kernel in KERNELS.items()]
    return "\n".join(lines)
