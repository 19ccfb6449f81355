"""Predicted bytes, operations and times of one layer on any number of ranks.

The model of a halo: interior rows run at the kernel's rate while the halo travels; boundary rows follow
at the same rate, slowed by what a second, smaller kernel call was seen to cost; what the interior does not
hide of the exchange is waited for. ``predict_ring.py`` has the model of a ring. Weights, and everything else
than one layer's attention, are out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dtensor_ring_swa.band import Band
from dtensor_ring_swa.bench.predict_ring import ring_time
from dtensor_ring_swa.bench.rates import BACKWARD_FLOPS, BOUNDARY_COST, Rate, kind_of, rate_of
from dtensor_ring_swa.bench.shapes import Shape
from dtensor_ring_swa.bench.traffic import Sizes, Traffic

_DIRECTIONS = ("forward", "backward")


@dataclass(frozen=True)
class Prediction:
    """One layer on the busiest rank.

    Attributes:
        ranks: How many there are.
        tokens: Of the whole sequence.
        received_forward: Bytes in, with what is dealt to another layout and back.
        received_backward: Likewise.
        allgather_bytes: Bytes in if K and V were gathered whole.
        forward_flops: Useful operations; backward has 2.5 times as many.
        interior: Share of the work that needs no other rank's keys.
        forward_ms: Predicted time.
        backward_ms: Likewise.
        forward_efficiency: Share of ``forward_ms`` that the ideal takes: one kernel call on this rank's pairs
            for a limited window, an even share of one device's time for others.
        backward_efficiency: Likewise.
        hiding_gb_s: Slowest link that hides forward's exchange behind the work; None if none does.
        method: ``"halo"`` or ``"ring"``.
        layout: The layout in which the rows are computed.
        steps: Shards attended to one after the other; 1 with a halo.
        imbalance: The busiest rank's pairs over the mean.
        dealt_forward: Bytes in of those in ``received_forward`` that another layout costs.
    """

    ranks: int
    tokens: int
    received_forward: int
    received_backward: int
    allgather_bytes: int
    forward_flops: int
    interior: float
    forward_ms: float
    backward_ms: float
    forward_efficiency: float
    backward_efficiency: float
    hiding_gb_s: float | None
    method: str
    layout: str
    steps: int
    imbalance: float
    dealt_forward: int


def predict(
    shape: Shape,
    ranks: int,
    tokens: int,
    batch: int,
    dtype: torch.dtype,
    link_gb_s: float,
    load_balance: str = "auto",
    rate: Rate | None = None,
) -> Prediction:
    """Predict one layer for ``tokens`` over ``ranks``, at the busiest of a middle rank and those at the ends.

    Args:
        shape: The layer.
        ranks: How many share the sequence, in contiguous shards.
        tokens: Of the whole sequence.
        batch: Sequences.
        dtype: Of q, k and v. Gradients of K and V that go home are float32 in a ring.
        link_gb_s: What a rank can receive in a second.
        load_balance: As ``ring_attention`` takes it.
        rate: One device's rate; the nearest measured one by default.
    """
    rate = rate or rate_of(shape, sum(shape.window.reach(tokens)))
    sizes = Sizes(dtype.itemsize, dtype.itemsize, max(dtype.itemsize, 4))
    calls = [
        Traffic(shape, batch, "contiguous", load_balance, tokens, ranks, rank)
        for rank in sorted({0, ranks // 2, ranks - 1})
    ]
    call = max(calls, key=lambda c: (_pairs(c), c.keys(sizes)[0], c.rank == ranks // 2))
    pairs, unit = _pairs(call), 2 * batch * shape.q_heads * (shape.head_dim + shape.v_head_dim)
    left, right = shape.window.reach(tokens)
    mean = Band(-left, right).pairs(tokens, tokens) / ranks
    forward, backward = (_timed(call, direction, unit, rate, sizes, link_gb_s) for direction in _DIRECTIONS)
    fair = 1.0 if kind_of(shape.window) == "limited" or not pairs else mean / pairs
    steps, rows = 1, call.plan.rows
    if call.is_ring:
        steps, rows = sum(step.source is not None for step in call.ring.steps), call.ring.rows
    received = call.received(sizes)
    return Prediction(
        ranks=ranks, tokens=tokens, received_forward=received[0], received_backward=received[1],
        allgather_bytes=(tokens - rows) * call.key_row * sizes.own, forward_flops=unit * pairs,
        interior=_interior(call), forward_ms=forward.ms, backward_ms=backward.ms,
        forward_efficiency=fair * forward.alone_ms / forward.ms if forward.ms else 1.0,
        backward_efficiency=fair * backward.alone_ms / backward.ms if backward.ms else 1.0,
        hiding_gb_s=forward.hiding_gb_s, method="ring" if call.is_ring else "halo", layout=call.compute_layout,
        steps=steps, imbalance=pairs / mean if mean else 1.0, dealt_forward=call.dealt(sizes)[0],
    )  # fmt: skip


def _pairs(call: Traffic) -> int:
    return call.ring.pairs if call.is_ring else call.plan.pairs


def _interior(call: Traffic) -> float:
    """Share of the work that needs no other rank's keys."""
    blocks = call.plan.interior
    if call.is_ring:
        first = call.ring.steps[0].call
        blocks = first.blocks if first else ()
    pairs = _pairs(call)
    return sum(block.pairs for block in blocks) / pairs if pairs else 1.0


@dataclass(frozen=True)
class _Timed:
    """Milliseconds; those of one kernel call on the same pairs; and the slowest link that hides the exchange."""

    ms: float
    alone_ms: float
    hiding_gb_s: float | None


def _timed(call: Traffic, direction: str, unit: int, rate: Rate, sizes: Sizes, link_gb_s: float) -> _Timed:
    """Time one direction on one rank."""
    forward = direction == "forward"
    flops, tflops = (unit, rate.forward) if forward else (unit * BACKWARD_FLOPS, rate.backward)
    alone = _pairs(call) * flops / tflops / 1e9
    if call.is_ring:
        ring = ring_time(call, direction, unit, rate, sizes, link_gb_s)
        return _Timed(ring.ms, alone, ring.hiding_gb_s)
    interior, received = _interior(call), call.received(sizes)[0 if forward else 1]
    boundary_cost = BOUNDARY_COST[direction] if interior else 1.0
    ms = max(interior * alone, received / link_gb_s / 1e6) + (1 - interior) * alone * boundary_cost
    return _Timed(ms, alone, received / (interior * alone) / 1e6 if interior * alone else None)
