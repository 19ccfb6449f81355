"""One sample at a time, ranks aligned, methods interleaved."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist

from dtensor_ring_swa.bench.case import Environment
from dtensor_ring_swa.bench.methods import Given, Method

# Cycles a millisecond at the fastest clock of the GPUs seen: a head start is never shorter than asked.
_CYCLES_A_MS = 2_000_000
_LONGEST_HEAD_START_MS = 50.0


@dataclass
class Samples:
    """Times of one method in one direction on this rank."""

    device_ms: list[float] = field(default_factory=list)
    host_ms: list[float] = field(default_factory=list)

    def summary(self) -> tuple[float, float, float]:
        """Median, interquartile range, and the median time that the call kept the host."""
        ordered = sorted(self.device_ms)
        low, _, high = quantiles(ordered, n=4, method="inclusive") if len(ordered) > 1 else (ordered[0],) * 3
        return median(ordered), high - low, median(self.host_ms)


class Clock:
    """Times a call on every rank at once.

    On CUDA a sample is the time between two events on the stream. Before the first lie a pause of
    the device, so that the host has launched the call before the device gets there (as in training,
    where the host runs ahead), and an all-reduce, so that all ranks' devices start together. On CPU it
    is wall time after an all-reduce.
    """

    def __init__(self, environment: Environment) -> None:
        self._device, self._group = environment.device, environment.group
        self._token = torch.zeros(1, device=environment.device)
        self._head_start_ms = 1.0

    def needs(self, host_ms: float) -> None:
        """Give the host at least twice the time that a call took it."""
        self._head_start_ms = max(self._head_start_ms, min(2 * host_ms, _LONGEST_HEAD_START_MS))

    def sample(self, call: Callable[[], Any], into: Samples) -> Any:
        """Run the call once and note its times. Collective."""
        return self._cuda(call, into) if self._device.type == "cuda" else self._cpu(call, into)

    def _cpu(self, call: Callable[[], Any], into: Samples) -> Any:
        dist.all_reduce(self._token, group=self._group)
        start = time.perf_counter()
        result = call()
        elapsed = 1e3 * (time.perf_counter() - start)
        into.device_ms.append(elapsed)
        into.host_ms.append(elapsed)
        return result

    def _cuda(self, call: Callable[[], Any], into: Samples) -> Any:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self._device)
        # Private, and in every torch: a kernel that does nothing for so many cycles.
        torch.cuda._sleep(int(self._head_start_ms * _CYCLES_A_MS))
        dist.all_reduce(self._token, group=self._group)
        start.record()
        launch = time.perf_counter()
        result = call()
        host_ms = 1e3 * (time.perf_counter() - launch)
        stop.record()
        torch.cuda.synchronize(self._device)
        into.device_ms.append(start.elapsed_time(stop))
        into.host_ms.append(host_ms)
        return result


def input_sets(device: torch.device, set_bytes: int) -> int:
    """How many sets of inputs to rotate among so that none is still in the cache when its turn comes; at most 16."""
    if device.type != "cuda":
        return 1
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return 1 if set_bytes >= 4 * cache else min(16, -(-4 * cache // set_bytes))


@dataclass
class Contestant:
    """A method with its inputs, and forward's results that backward starts from."""

    method: Method
    given: list[Given]
    states: list[Any]
    samples: dict[str, Samples] = field(default_factory=lambda: {"forward": Samples(), "backward": Samples()})

    def call(self, direction: str, index: int) -> Callable[[], Any]:
        """The call to time."""
        if direction == "forward":
            return lambda: self.method.forward(self.given[index])
        return lambda: self.method.backward(self.given[index], self.states[index])


def race(clock: Clock, contestants: Sequence[Contestant], repeats: int) -> None:
    """Take ``repeats`` samples of each method and direction, round robin. Collective.

    Every round starts with another method, and every sample takes the next set of inputs.
    """
    turns = count()
    for repeat in range(-1, repeats):
        for direction in ("forward", "backward"):
            for place in range(len(contestants)):
                contestant = contestants[(repeat + place) % len(contestants)]
                if direction == "backward" and contestant.method.backward_gap:
                    continue
                # The first round is the clock's own warm-up.
                samples = contestant.samples[direction] if repeat >= 0 else Samples()
                call = contestant.call(direction, next(turns) % len(contestant.given))
                clock.sample(call, samples)
                if repeat < 0:
                    clock.needs(samples.host_ms[0])
