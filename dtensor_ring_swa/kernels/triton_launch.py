"""Triton's programs, started again as they were started before.

Triton works out from each argument which build of a program to start, and asks again at every call: on an H200's host
18 of the 33 us of a start. For the same tensors' kinds and the same numbers the answer is the same, so the build is
kept; a build is started in Triton's own way, with all arguments and compile-time constants in their order. What
Triton is asked for besides (``triton.knobs.compilation``, hooks before a run) counts as it was at the first start.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from dtensor_ring_swa.kernels.triton_tiles import StartOptions

# Builds differ for pointers that are multiples of it.
_ALIGNED = 16


def start(
    program: Any, device: torch.device, grid: tuple[int, int, int], options: StartOptions, *arguments: Any
) -> None:
    """Start ``program[grid](*arguments, options.sizes)`` on the current device, which is ``device``.

    Args:
        program: A program of ``triton_kernels``, whose last argument is the compile-time sizes.
        device: The tensors' device.
        grid: How many programs to start.
        options: Sizes, warps and stages.
        *arguments: Its other arguments: tensors, tuples of a tensor and numbers, numbers, tuples of numbers, None.
    """
    # On AMD's GPUs builds depend on the size of a tensor's memory as well, and there nothing of this has been run.
    builds = [] if torch.version.hip else _builds(program, device, options, *map(_kind, arguments))
    if builds:
        builds[0][grid](*arguments, options.sizes)
        return
    build = program[grid](*arguments, S=options.sizes, num_warps=options.warps, num_stages=options.stages)
    # Triton's interpreter builds nothing; what Triton compiles in the background cannot be started by itself.
    if hasattr(type(build), "__getitem__"):
        builds.append(build)


@lru_cache(maxsize=1024)
def _builds(*kind: Any) -> list[Any]:
    """The build for a kind of call, once there is one."""
    return []


def _kind(argument: Any) -> Any:
    """What a build may depend on, and no tensor."""
    if isinstance(argument, tuple) and isinstance(argument[0], torch.Tensor):
        return argument[0].dtype, argument[0].data_ptr() % _ALIGNED, argument[1:]
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % _ALIGNED
    return argument
