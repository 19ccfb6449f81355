"""``--simulate-ranks``: bytes, operations and efficiency of any number of ranks, from the plan alone.

The model: interior rows run at the kernel's rate while the halo travels; boundary rows follow at the
same rate, slowed by what a second, smaller kernel call was seen to cost; what the interior does not
hide of the exchange is waited for. Weights, and everything else than one layer's attention, are out.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from math import log
from typing import Any

import torch

from dtensor_ring_swa.bench.options import DTYPES, Options
from dtensor_ring_swa.bench.report import table, write_json
from dtensor_ring_swa.bench.shapes import Shape
from dtensor_ring_swa.plan import Plan, make_plan


@dataclass(frozen=True)
class Rate:
    """Useful TFLOP/s of a kernel on one layer's shape."""

    head_dim: int
    window: int
    forward: float
    backward: float


# One kernel call without ranks on an H200, torch 2.11, bf16, flash-attn-4: `ideal` in docs/benchmarks.md,
# 32768 rows. The last is an older measurement on the same kind of GPU.
RATES = (
    Rate(128, 4095, 695.0, 592.0),  # 32/8 heads
    Rate(128, 1023, 542.0, 415.0),  # 32/8 heads
    Rate(64, 127, 141.0, 96.6),  # 64/8 heads
    Rate(256, 4095, 709.0, 375.0),  # 8/4 heads
)
# 16.8 MB one way over an NVLink pair in 0.06 ms, the same source.
NVLINK_GB_S = 16.8e6 / 0.06e-3 / 1e9
# docs/benchmarks.md, two ranks, 32768 rows each, w = 4095: `ring` 3.221 / 9.523 ms, `ideal` 3.163 / 9.286.
# One row in eight is boundary, and the excess is put down to it.
BOUNDARY_COST = {"forward": 1 + (3.221 / 3.163 - 1) * 8, "backward": 1 + (9.523 / 9.286 - 1) * 8}
BACKWARD_FLOPS = 2.5


@dataclass(frozen=True)
class Prediction:
    """One layer on the busiest rank."""

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


def rate_of(shape: Shape, window: int) -> Rate:
    """The measured rate nearest to a shape: by head dim first, then by window."""
    return min(RATES, key=lambda r: (abs(log(r.head_dim / shape.head_dim)), abs(log(r.window / max(window, 1)))))


def predict(shape: Shape, ranks: int, tokens: int, batch: int, dtype: torch.dtype, link_gb_s: float) -> Prediction:
    """Predict one layer for ``tokens`` over ``ranks``, with a middle rank's plan: it has every neighbour.

    The last rank is planned too, because an unbounded window gives it the most work.
    """
    plans = [make_plan(tokens, ranks, rank, shape.window) for rank in {ranks // 2, ranks - 1}]
    plan = max(plans, key=lambda p: (p.pairs, p.left + p.right))
    sizes = {"kv_heads": shape.kv_heads, "head_dim": shape.head_dim, "v_head_dim": shape.v_head_dim, "batch": batch}
    flops = plan.flops(q_heads=shape.q_heads, **{k: v for k, v in sizes.items() if k != "kv_heads"})
    received = plan.bytes(**sizes, itemsize=dtype.itemsize)
    row = received // (plan.left + plan.right) if received else 0
    returned = row * sum(len(t) for t in plan.sends)
    rate = rate_of(shape, sum(shape.window.reach(tokens)))
    times = {
        "forward": _times(plan, "forward", flops / rate.forward, received, link_gb_s),
        "backward": _times(plan, "backward", BACKWARD_FLOPS * flops / rate.backward, returned, link_gb_s),
    }
    interior_ms = _interior(plan) * flops / rate.forward / 1e9
    others = (tokens - plan.rows) * batch * shape.kv_heads * (shape.head_dim + shape.v_head_dim) * dtype.itemsize
    return Prediction(
        ranks, tokens, received, returned, others, flops, _interior(plan), times["forward"][0], times["backward"][0],
        times["forward"][1], times["backward"][1], received / interior_ms / 1e6 if interior_ms else None,
    )  # fmt: skip


def _interior(plan: Plan) -> float:
    """Share of the work that needs no halo."""
    return sum(block.pairs for block in plan.interior) / plan.pairs if plan.pairs else 1.0


def _times(plan: Plan, direction: str, ideal_units: float, received: int, link_gb_s: float) -> tuple[float, float]:
    """Milliseconds, and the share of them that the ideal (no ranks, one kernel call) would take."""
    ideal = ideal_units / 1e9
    interior = _interior(plan)
    exchange = received / link_gb_s / 1e6
    boundary_cost = BOUNDARY_COST[direction] if interior else 1.0
    total = max(interior * ideal, exchange) + (1 - interior) * ideal * boundary_cost
    return total, ideal / total if total else 1.0


def simulate(options: Options) -> int:
    """Print (and write) the predictions for 1, 2, 4, ... ranks."""
    assert options.simulate_ranks is not None
    began = time.perf_counter()
    dtype = DTYPES[options.dtype or "bfloat16"]
    link = options.link_gb_s or NVLINK_GB_S
    counts = sorted({*(1 << i for i in range(options.simulate_ranks.bit_length())), options.simulate_ranks})
    record: dict[str, Any] = {
        "simulated": True, "link_gb_s": link, "batch": options.batch, "rates": [asdict(r) for r in RATES], "cases": [],
    }  # fmt: skip
    for shape in options.shapes:
        rows = options.rows or 16384
        predictions = [
            predict(shape, ranks, options.tokens or rows * ranks, options.batch, dtype, link) for ranks in counts
        ]
        record["cases"].append({"shape": asdict(shape), "predictions": [asdict(p) for p in predictions]})
        rate = rate_of(shape, sum(shape.window.reach(predictions[-1].tokens)))
        print(
            f"\n{shape}, batch {options.batch}, {options.dtype or 'bfloat16'}; one layer, busiest rank\n"
            f"at {rate.forward:g} / {rate.backward:g} TFLOP/s (measured, head dim {rate.head_dim}, window "
            f"{rate.window}), link {link:.0f} GB/s"
        )
        print(table(_HEADER, [_row(p) for p in predictions]))
    record["seconds"] = time.perf_counter() - began
    print(f"\nplanned and predicted in {1e3 * record['seconds']:.0f} ms")
    if options.json:
        write_json(options.json, record)
    return 0


_HEADER = (
    "ranks", "tokens", "MB in fwd", "bwd", "all-gather MB", "TFLOP fwd", "interior", "fwd ms", "bwd ms",
    "efficiency", "bwd", "hidden down to GB/s",
)  # fmt: skip


def _row(p: Prediction) -> tuple[str, ...]:
    return (
        f"{p.ranks}", f"{p.tokens}", f"{p.received_forward / 1e6:.2f}", f"{p.received_backward / 1e6:.2f}",
        f"{p.allgather_bytes / 1e6:.0f}", f"{p.forward_flops / 1e12:.3f}", f"{100 * p.interior:.1f}%",
        f"{p.forward_ms:.3f}", f"{p.backward_ms:.3f}", f"{100 * p.forward_efficiency:.1f}%",
        f"{100 * p.backward_efficiency:.1f}%", "-" if p.hiding_gb_s is None else f"{p.hiding_gb_s:.1f}",
    )  # fmt: skip
