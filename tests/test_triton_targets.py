"""The Triton programs compiled for GPUs that are not here: do they compile, and does their shared memory suffice?

This needs no GPU, and says nothing about results or speed. It covers the calls that need the most of each target.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

from dtensor_ring_swa import make_plan
from dtensor_ring_swa.block import Call
from dtensor_ring_swa.kernels import Request, triton_tiles
from dtensor_ring_swa.kernels import triton as kernel


class Target(NamedTuple):
    """A GPU as Triton names it, and the bytes of shared memory that a program may take there."""

    backend: str
    arch: int | str
    warp_size: int
    shared_memory: int


TARGETS = {
    "A100": Target("cuda", 80, 32, 166912),
    "L40S": Target("cuda", 89, 32, 101376),
    "H200": Target("cuda", 90, 32, 232448),
    "MI300": Target("hip", "gfx942", 64, 65536),
}
PACKAGES = {"cuda": "triton.backends.nvidia", "hip": "triton.backends.amd"}


class Case(NamedTuple):
    target: str
    backward: bool
    head_dim: int
    v_head_dim: int
    group: int = 4
    softcap: float = 0.0
    dtype: torch.dtype = torch.bfloat16
    sink_tokens: int = 20


# Those of a target that take the longest first, since two are compiled at a time.
CASES = (
    Case("A100", True, 256, 256),
    Case("A100", False, 256, 256, sink_tokens=4),
    Case("L40S", True, 128, 128),
    Case("L40S", True, 128, 128, sink_tokens=4),
    Case("L40S", True, 256, 256),
    Case("L40S", True, 256, 256, sink_tokens=4),
    Case("L40S", False, 256, 256, sink_tokens=4),
    Case("H200", True, 128, 128),
    Case("H200", True, 64, 64, group=8, sink_tokens=4),
    Case("H200", False, 128, 128, softcap=50.0, sink_tokens=4),
    Case("MI300", True, 128, 128),
    Case("MI300", True, 64, 64, group=8),
    Case("MI300", True, 128, 128, sink_tokens=4),
    Case("MI300", False, 128, 128, softcap=50.0, sink_tokens=4),
)


def call_of(sink_tokens: int) -> Call:
    """Few sink tokens are walked over with the window's keys; more are layers of a call, and split."""
    return Call.of(make_plan(1100, 1, 0, (3, 0), sink_tokens=sink_tokens).blocks)


@cache
def driver(name: str) -> Any:
    """What compiling asks of Triton's private driver (as of 3.6 and 3.9), for a GPU that is not here."""
    from triton.backends.compiler import GPUTarget

    target = TARGETS[name]
    return SimpleNamespace(
        get_current_target=lambda: GPUTarget(target.backend, target.arch, target.warp_size),
        # What was compiled is kept by device.
        get_current_device=lambda: list(TARGETS).index(name),
        get_current_stream=lambda device: 0,
    )


class Program:
    """Stands for a program, and compiles it where it would be started."""

    def __init__(self, function: Any, found: list[int]) -> None:
        self.function, self.found = function, found

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def start(*args: Any, **options: Any) -> None:
            self.found.append(self.function.warmup(*args, grid=grid, **options).metadata.shared)

        return start


def shared_memory(case: Case) -> list[int]:
    """The bytes that each program of a call takes."""
    from triton.runtime import driver as active

    from dtensor_ring_swa.kernels import triton_kernels

    active.set_active(driver(case.target))
    found: list[int] = []
    names = "forward", "backward_queries", "backward_keys"
    programs = SimpleNamespace(**{name: Program(getattr(triton_kernels, name), found) for name in names})
    request = Request(torch.device("cpu"), case.dtype, case.head_dim, case.v_head_dim, 1.0, case.softcap)
    call = call_of(case.sink_tokens)
    rows, heads = call.q_stop, 2 * case.group
    q, k = (torch.zeros(1, rows, n, case.head_dim, dtype=case.dtype) for n in (heads, 2))
    v, out = (torch.zeros(1, rows, n, case.v_head_dim, dtype=case.dtype) for n in (2, heads))
    lse, sinks = torch.zeros(1, heads, rows), torch.zeros(heads, dtype=case.dtype)
    with (
        mock.patch.object(kernel, "programs", lambda: programs),
        mock.patch.object(triton_tiles, "shared_memory", lambda device: TARGETS[case.target].shared_memory),
    ):
        if case.backward:
            kernel.backward(request, out, q, k, v, out, lse, call, q, k, v)
        else:
            kernel.forward(request, q, k, v, call, out, lse, sinks)
    return found


@pytest.fixture(scope="module")
def workers() -> Iterator[Executor]:
    """Processes of their own: Triton has one driver a process, and may be told to interpret in this one."""
    with mock.patch.dict(os.environ):
        os.environ.pop("TRITON_INTERPRET", None)
        with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
            yield pool


@pytest.mark.parametrize("target", TARGETS)
def test_programs_compile_and_fit(workers: Executor, target: str) -> None:
    package = PACKAGES[TARGETS[target].backend]
    pytest.importorskip(package, reason=f"needs {package} to compile", exc_type=ImportError)
    cases = [case for case in CASES if case.target == target]
    for case, found in zip(cases, workers.map(shared_memory, cases), strict=True):
        # dq; dk and dv; and those of split keys.
        assert len(found) == ((3 if case.sink_tokens > 16 else 2) if case.backward else 1)
        assert 0 < max(found) <= TARGETS[target].shared_memory, (case, found)
