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
from dtensor_ring_swa.layout import chunk_length
from dtensor_ring_swa.window import Window

_DIRECTIONS = ("forward", "backward")


@dataclass(frozen=True)
class Prediction:
    """One layer on the rank that has most to do, to receive or to wait for.

    Attributes:
        ranks: How many there are.
        tokens: Of the whole sequence.
        received_forward: Bytes in, with what is dealt to another layout and back, on the rank that receives most.
        received_backward: Likewise; it may be another rank.
        allgather_bytes: Bytes in if K and V were gathered whole.
        forward_flops: Useful operations of the busiest rank; backward has 2.5 times as many.
        interior: Share of the work that needs no other rank's keys.
        forward_ms: Predicted time of the slowest rank.
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
        forward_tflops: One device's rate that the times are made of.
        backward_tflops: Likewise.
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
    forward_tflops: float
    backward_tflops: float


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
    """Predict one layer for ``tokens`` over ``ranks``.

    Of the ranks that hold tokens, one in the middle is looked at, some at each end, and some where a side of the window
    begins to reach beyond the sequence. The busiest is among them, and the one that receives most: in the zigzag layout
    some keep part of their rows.

    Args:
        shape: The layer.
        ranks: How many share the sequence, in contiguous shards.
        tokens: Of the whole sequence.
        batch: Sequences.
        dtype: Of q, k and v, and of the gradients of K and V that go home.
        link_gb_s: What a rank can receive in a second.
        load_balance: As ``ring_attention`` takes it.
        rate: One device's rate; the nearest measured one by default.
    """
    rate = rate or rate_of(shape, sum(shape.window.reach(tokens)))
    sizes = Sizes(dtype.itemsize, dtype.itemsize, max(dtype.itemsize, 4))
    calls = [
        Traffic(shape, batch, "contiguous", load_balance, tokens, ranks, rank)
        for rank in _looked_at(shape.window, tokens, ranks)
    ]
    call = max(calls, key=lambda c: (_pairs(c), c.keys(sizes)[0]))
    pairs, unit = _pairs(call), 2 * batch * shape.q_heads * (shape.head_dim + shape.v_head_dim)
    left, right = shape.window.reach(tokens)
    mean = Band(-left, right).pairs(tokens, tokens) / ranks
    # The slowest rank need not be the busiest: in backward the gradients come home to another one.
    forward, backward = (
        [_timed(each, direction, unit, rate, sizes, link_gb_s) for each in calls] for direction in _DIRECTIONS
    )
    fullest = max(calls, key=lambda c: c.received(sizes)[0])
    received = [max(bytes_in) for bytes_in in zip(*(each.received(sizes) for each in calls), strict=True)]
    fair = 1.0 if kind_of(shape.window) == "limited" or not pairs else mean / pairs
    steps, rows = (call.laps.steps, call.laps.rows) if call.is_ring else (1, call.plan.rows)
    hiding = [timed.hiding_gb_s for timed in forward]
    return Prediction(
        ranks=ranks, tokens=tokens, received_forward=received[0], received_backward=received[1],
        allgather_bytes=(tokens - rows) * call.key_row * sizes.own, forward_flops=unit * pairs,
        interior=_interior(call), forward_ms=_slowest(forward), backward_ms=_slowest(backward),
        forward_efficiency=fair * _efficiency(forward), backward_efficiency=fair * _efficiency(backward),
        hiding_gb_s=None if None in hiding else max(filter(None, hiding), default=0.0),
        method="ring" if call.is_ring else "halo", layout=call.compute_layout, steps=steps,
        imbalance=pairs / mean if mean else 1.0, dealt_forward=fullest.dealt(sizes)[0],
        forward_tflops=rate.forward, backward_tflops=rate.backward,
    )  # fmt: skip


def _looked_at(window: Window, tokens: int, ranks: int) -> list[int]:
    """The middle, and where what ranks have to do stops to grow, or begins to, from one to the next."""
    chunk = chunk_length(tokens, ranks)
    held = -(-tokens // chunk)
    ends = {side // chunk + step for side in (0, *window.reach(tokens)) for step in (-1, 0, 1)}
    others = {*ends, *(held - 1 - end for end in ends)} - {held // 2}
    # The middle first: of ranks that are alike it is the one described.
    return [held // 2, *sorted(rank for rank in others if 0 <= rank < held)]


def _pairs(call: Traffic) -> int:
    return call.laps.pairs if call.is_ring else call.plan.pairs


def _interior(call: Traffic) -> float:
    """Share of the work that needs no other rank's keys."""
    blocks = call.laps.own.blocks if call.is_ring else call.plan.interior
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
    boundary_cost, hidden_by = BOUNDARY_COST[direction] if interior else 1.0, interior * alone
    ms = max(hidden_by, received / link_gb_s / 1e6) + (1 - interior) * alone * boundary_cost
    # Nothing is hidden by any link.
    hiding = received / hidden_by / 1e6 if hidden_by else None
    return _Timed(ms, alone, hiding if received else 0.0)


def _slowest(ranks: list[_Timed]) -> float:
    return max(timed.ms for timed in ranks)


def _efficiency(ranks: list[_Timed]) -> float:
    """Share of the slowest rank's time that the busiest rank's pairs take in one kernel call."""
    slowest = _slowest(ranks)
    return max(timed.alone_ms for timed in ranks) / slowest if slowest else 1.0
