"""Predicted time of a ring on one rank.

The model: in each step the kernel runs on the step's pairs at one device's rate, slowed by what calls on parts
were seen to cost, and the partial result is merged at the rate of the device's memory. Meanwhile the
next shard travels, and in backward also the gradients of the one before; what the step does not hide is
waited for. Dealing to another layout and back is hidden behind nothing. Ranks do not wait for each other
otherwise, and launching a kernel or a message is free.
"""

from __future__ import annotations

from dataclasses import dataclass

from dtensor_ring_swa.bench.rates import BACKWARD_FLOPS, MEMORY_GB_S, PART_COST, Rate
from dtensor_ring_swa.bench.traffic import Sizes, Traffic
from dtensor_ring_swa.block import Block
from dtensor_ring_swa.plan import Transfer
from dtensor_ring_swa.ring import Step


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
    forward, steps = direction == "forward", call.ring.steps
    flops, tflops = (unit, rate.forward) if forward else (unit * BACKWARD_FLOPS, rate.backward)
    total, slowest = 0.0, 0.0
    for place, step in enumerate(steps):
        pairs = sum(block.pairs for block in _blocks(step))
        moved = _merged_bytes(call, step, sizes) if forward else _added_bytes(call, step, sizes)
        work = pairs * flops / tflops / 1e9 * PART_COST[direction] + moved / MEMORY_GB_S / 1e6
        following = steps[place + 1] if place + 1 < len(steps) else None
        travels = _rows(following.source) * call.key_row * sizes.own if following is not None else 0
        if not forward and place > 1:
            travels += _homecoming(call, steps[place - 1], sizes)
        total += max(work, travels / link_gb_s / 1e6)
        if travels:
            slowest = max(slowest, travels / work / 1e6 if work else float("inf"))
    if not forward and len(steps) > 1:
        total += _homecoming(call, steps[-1], sizes) / link_gb_s / 1e6
    total += call.dealt(sizes)[0 if forward else 1] / link_gb_s / 1e6
    return RingTime(total, None if slowest == float("inf") else slowest)


def _homecoming(call: Traffic, step: Step, sizes: Sizes) -> int:
    """Bytes of dk and dv that come home from a step's target."""
    return _rows(step.target) * call.key_row * sizes.grad


def _merged_bytes(call: Traffic, step: Step, sizes: Sizes) -> int:
    """What ``rotate_forward`` and ``merge_`` read and write of out, each operation one pass; lse is small."""
    rows = sum(block.q_stop - block.q_start for block in _blocks(step))
    if step is call.ring.steps[0]:
        # The first part copied, and at the end the sum rounded.
        return call.ring.rows * call.out_row * (2 * sizes.wide + 2 * sizes.own)
    # Scale the sum, scale the part, add.
    return rows * call.out_row * (6 * sizes.wide + sizes.own)


def _added_bytes(call: Traffic, step: Step, sizes: Sizes) -> int:
    """What ``rotate_backward`` reads and writes of dq, dk and dv besides the kernel, each operation one pass."""
    rows = sum(block.q_stop - block.q_start for block in _blocks(step))
    keys = sum(block.k_stop - block.k_start for block in _blocks(step))
    added = rows * call.q_row * (2 * sizes.wide + sizes.own) + keys * call.key_row * (2 * sizes.wide + sizes.grad)
    if step is call.ring.steps[0]:
        # Zeros, and at the end the sums rounded.
        return added + call.ring.rows * (call.q_row + call.key_row) * (2 * sizes.wide + sizes.own)
    # Packing of the shares that go home, instead of adding them here; the sum with those that come.
    sent = _rows(step.source) * call.key_row * 2 * sizes.grad - keys * call.key_row * (2 * sizes.wide + sizes.grad)
    came = _rows(step.target) * call.key_row * (2 * sizes.wide + sizes.grad)
    return added + sent + came


def _blocks(step: Step) -> tuple[Block, ...]:
    return step.call.blocks if step.call else ()


def _rows(transfer: Transfer | None) -> int:
    return len(transfer) if transfer else 0
