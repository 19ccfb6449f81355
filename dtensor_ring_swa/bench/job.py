"""What can run here: each shape with its kernel, found out before the ranks meet."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

import torch

from dtensor_ring_swa.attention import ring_attention
from dtensor_ring_swa.bench.contest import kinds_for
from dtensor_ring_swa.bench.options import Options
from dtensor_ring_swa.bench.parser import DTYPES
from dtensor_ring_swa.bench.shapes import Shape
from dtensor_ring_swa.kernels import Kernel, Request, able_kernels, choose


@dataclass(frozen=True)
class Job:
    """A shape that can run here."""

    shape: Shape
    rows: int
    request: Request
    kernel: Kernel


def jobs_of(options: Options, device: torch.device) -> list[Job]:
    """Check that every shape asked for can run on this device.

    Raises:
        NotImplementedError: If the named kernel cannot serve one.
        ValueError: If one cannot fit into the device's memory, or none of the methods asked for suits its window.
    """
    return [_job(shape, options, device) for shape in options.shapes]


def _job(shape: Shape, options: Options, device: torch.device) -> Job:
    cuda = device.type == "cuda"
    dtype = DTYPES[options.dtype or ("bfloat16" if cuda else "float32")]
    rows = options.rows or (32768 if cuda else 512)
    # q, dq, out, dout, and k, v, dk, dv once each: no method gets by with less. Settled before a kernel is tried.
    width = (shape.q_heads + shape.kv_heads) * (shape.head_dim + shape.v_head_dim)
    least, memory = 2 * options.batch * rows * width * dtype.itemsize, _memory(device)
    if least > memory:
        raise ValueError(
            f"{shape}: {rows} rows need at least {least / 1e9:.1f} GB, the device has {memory / 1e9:.1f}; "
            "pass fewer --rows, a smaller --batch or fewer heads"
        )
    request = Request(
        device, dtype, shape.head_dim, shape.v_head_dim, scale=shape.head_dim**-0.5, softcap=shape.softcap,
        neighbours=shape.window.neighbours,
    )  # fmt: skip
    try:
        kernel = choose(options.kernel, request)
        if options.extras.given:
            kernel = _kernel_with_extras(options, shape, request)
    except NotImplementedError as problem:
        raise NotImplementedError(f"{shape}: {problem}") from problem
    if not kinds_for(shape, options.extras, options.methods):
        raise ValueError(
            f"{shape}: none of {','.join(options.methods)} suits such a window; see --list for all methods"
        )
    return Job(shape, rows, request, kernel)


def _memory(device: torch.device) -> int:
    """Bytes that the device has, in use or not."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        # Not every system says; more than this no allocation can ask for.
        return sys.maxsize


def _kernel_with_extras(options: Options, shape: Shape, request: Request) -> Kernel:
    """The first kernel allowed that can also do what is asked besides a window, tried on a few tokens.

    Raises:
        NotImplementedError: If none can.
    """
    kernels = able_kernels(options.kernel, request)
    few, like = 16, {"device": request.device, "dtype": request.dtype}
    widths = ((shape.q_heads, shape.head_dim), (shape.kv_heads, shape.head_dim), (shape.kv_heads, shape.v_head_dim))
    tensors = [options.extras.pack(torch.zeros(1, few, *width, **like)) for width in widths]
    arguments = options.extras.arguments(few, shape.q_heads, request.device, request.dtype)
    for kernel in kernels:
        try:
            ring_attention(*tensors, window=shape.window, softcap=shape.softcap, kernel=kernel.NAME, **arguments)
        except NotImplementedError:
            if kernel is kernels[-1]:
                raise
        else:
            return kernel
    raise AssertionError("choose() found a kernel")
