"""Predicted time of a ring on one rank.

The model: in each step the kernel runs on the step's pairs at one device's rate, slowed by what calls on parts
were seen to cost, and the partial result is merged at the rate of the device's memory. Meanwhile the
next shard travels, and in backward also the gradients of the one before; what the step does not hide is
waited for. Dealing to another layout and back is hidden behind nothing. Ranks do not wait for each other
otherwise, and launching a kernel or a message is free.
"""

from __future__ import annotations

from dataclasses import dataclass

from dtensor_ring_swa.bench.laps import Lap
from dtensor_ring_swa.bench.rates import BACKWARD_FLOPS, MEMORY_GB_S, PART_COST, Rate
from dtensor_ring_swa.bench.traffic import Sizes, Traffic


@dataclass(frozen=True)
class RingTime:
    """Milliseconds, and the slowest link in GB/s that hides all that travels in the steps."""

    ms: float
    hiding_gb_s: float | None


def ring_time(call: Traffic, direction: str, unit: int, rate: Rate, sizes: Sizes, link_gb_s: float) -> RingTime:
    """Predict one direction.

    Args:
        call: The call, seen from the rank to predict.
        direction: ``"forward"`` or ``"backward"``.
        unit: Operations of forward for each (query, key) pair, over the heads and the batch.
        rate: One device's rate.
        sizes: Bytes an element.
        link_gb_s: What a rank can receive in a second.
    """
    forward, laps = direction == "forward", call.laps
    flops, tflops = (unit, rate.forward) if forward else (unit * BACKWARD_FLOPS, rate.backward)
    home = call.key_row * sizes.grad
    total, slowest = 0.0, 0.0
    for count, before, lap, after in ((1, None, laps.own, laps.others[0] if laps.others else None), *laps.places()):
        moved = _merged_bytes(call, lap, sizes) if forward else _added_bytes(call, lap, sizes)
        work = lap.pairs * flops / tflops / 1e9 * PART_COST[direction] + moved / MEMORY_GB_S / 1e6
        travels = after.source_rows * call.key_row * sizes.own if after else 0
        if not forward and before:
            travels += before.target_rows * home
        total += count * max(work, travels / link_gb_s / 1e6)
        if travels:
            slowest = max(slowest, travels / work / 1e6 if work else float("inf"))
    if not forward and laps.others:
        total += laps.others[-1].target_rows * home / link_gb_s / 1e6
    total += call.dealt(sizes)[0 if forward else 1] / link_gb_s / 1e6
    return RingTime(total, None if slowest == float("inf") else slowest)


def _merged_bytes(call: Traffic, lap: Lap, sizes: Sizes) -> int:
    """What ``rotate_forward`` and ``merge_`` read and write of out, each operation one pass; lse is small."""
    if lap is call.laps.own:
        # The first part copied, and at the end the sum rounded.
        return call.laps.rows * call.out_row * (2 * sizes.wide + 2 * sizes.own)
    # Scale the sum, scale the part, add.
    return sum(block.q_len for block in lap.blocks) * call.out_row * (6 * sizes.wide + sizes.own)


def _added_bytes(call: Traffic, lap: Lap, sizes: Sizes) -> int:
    """What ``rotate_backward`` reads and writes of dq, dk and dv besides the kernel, each operation one pass."""
    rows, keys = (sum(lengths) for lengths in ([b.q_len for b in lap.blocks], [b.k_len for b in lap.blocks]))
    added = rows * call.q_row * (2 * sizes.wide + sizes.own)
    if lap is call.laps.own:
        # The keys' own sums; zeros, and at the end the sums rounded.
        added += keys * call.key_row * (2 * sizes.wide + sizes.grad)
        return added + call.laps.rows * (call.q_row + call.key_row) * (2 * sizes.wide + sizes.own)
    # Packing of the shares that go home, and the sum with those that come.
    sent = lap.source_rows * call.key_row * 2 * sizes.grad
    return added + sent + lap.target_rows * call.key_row * (2 * sizes.wide + sizes.grad)
