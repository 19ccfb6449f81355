"""``--simulate-ranks``: bytes, operations and efficiency of any number of ranks, from the plan alone."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from typing import Any

from dtensor_ring_swa.bench.options import Options
from dtensor_ring_swa.bench.parser import DTYPES
from dtensor_ring_swa.bench.predict import Prediction, predict
from dtensor_ring_swa.bench.rates import NVLINK_GB_S, RATES, Rate, kind_of, rate_of
from dtensor_ring_swa.bench.report import table, versions
from dtensor_ring_swa.bench.shapes import Shape


def simulate(options: Options) -> dict[str, Any]:
    """Print the predictions for 1, 2, 4, ... ranks, and return them as the record to write."""
    assert options.simulate_ranks is not None
    began = time.perf_counter()
    link = options.link_gb_s or NVLINK_GB_S
    counts = sorted({*(1 << i for i in range(options.simulate_ranks.bit_length())), options.simulate_ranks})
    record: dict[str, Any] = {
        "simulated": True, "versions": versions(), "link_gb_s": link, "batch": options.batch,
        "dtype": options.dtype or "bfloat16", "rates": [asdict(r) for r in RATES], "cases": [],
    }  # fmt: skip
    for shape in options.shapes:
        # Without balance only where it makes a difference.
        for load_balance in ("auto", "none") if kind_of(shape.window) == "causal" else ("auto",):
            record["cases"].append(_case(shape, load_balance, counts, options, link))
    record["seconds"] = time.perf_counter() - began
    print(f"\nplanned and predicted in {1e3 * record['seconds']:.0f} ms")
    return record


def _case(shape: Shape, load_balance: str, counts: list[int], options: Options, link: float) -> dict[str, Any]:
    """Print one table, and return its numbers."""
    dtype, rows, limited = options.dtype or "bfloat16", options.rows or 16384, kind_of(shape.window) == "limited"
    predictions: list[Prediction] = []
    used: dict[str, int] = {}
    for ranks in counts:
        tokens = options.tokens or rows * ranks
        rate, source = _rate(shape, tokens, options)
        used.setdefault(f"{rate.forward:g} / {rate.backward:g} TFLOP/s ({source})", ranks)
        predictions.append(predict(shape, ranks, tokens, options.batch, DTYPES[dtype], link, load_balance, rate))
    balance = "" if limited else f", load_balance {load_balance!r}"
    rates = "; ".join(f"{rate}, from {ranks} ranks on" if ranks > 1 else rate for rate, ranks in used.items())
    print(
        f"\n{shape}, batch {options.batch}, {dtype}{balance}; one layer, slowest rank\nat {rates}, link {link:g} GB/s"
    )
    header, row = (_HEADER, _row) if limited else (_RING_HEADER, _ring_row)
    print(table(header, [row(p) for p in predictions]))
    return {
        "shape": asdict(shape), "load_balance": load_balance, "rates_used": list(used),
        "predictions": [asdict(p) for p in predictions],
    }  # fmt: skip


def _rate(shape: Shape, tokens: int, options: Options) -> tuple[Rate, str]:
    """One device's rate, and where it comes from."""
    rate = rate_of(shape, sum(shape.window.reach(tokens)))
    if options.tflops is None:
        return rate, str(rate)
    forward, backward = options.tflops
    return replace(rate, forward=forward, backward=backward), "as given"


_HEADER = (
    "ranks", "tokens", "MB in fwd", "bwd", "all-gather MB", "TFLOP fwd", "interior", "fwd ms", "bwd ms",
    "efficiency", "bwd", "hidden down to GB/s",
)  # fmt: skip
# Efficiency is against an even share of one device's time, so imbalance counts.
_RING_HEADER = (
    "ranks", "tokens", "layout", "steps", "MB in fwd", "of it dealt", "bwd", "all-gather MB", "TFLOP fwd", "interior",
    "imbalance", "fwd ms", "bwd ms", "efficiency", "bwd", "hidden down to GB/s",
)  # fmt: skip


def _row(p: Prediction) -> tuple[str, ...]:
    return (
        f"{p.ranks}", f"{p.tokens}", f"{p.received_forward / 1e6:.2f}", f"{p.received_backward / 1e6:.2f}",
        f"{p.allgather_bytes / 1e6:.0f}", f"{p.forward_flops / 1e12:.3f}", f"{100 * p.interior:.1f}%", *_times(p),
    )  # fmt: skip


def _ring_row(p: Prediction) -> tuple[str, ...]:
    return (
        f"{p.ranks}", f"{p.tokens}", p.layout if p.method == "ring" else "halo", f"{p.steps}",
        f"{p.received_forward / 1e6:.2f}", f"{p.dealt_forward / 1e6:.2f}", f"{p.received_backward / 1e6:.2f}",
        f"{p.allgather_bytes / 1e6:.0f}", f"{p.forward_flops / 1e12:.3f}", f"{100 * p.interior:.1f}%",
        f"{p.imbalance:.3f}", *_times(p),
    )  # fmt: skip


def _times(p: Prediction) -> tuple[str, ...]:
    return (
        f"{p.forward_ms:.3f}", f"{p.backward_ms:.3f}", f"{100 * p.forward_efficiency:.1f}%",
        f"{100 * p.backward_efficiency:.1f}%", "-" if p.hiding_gb_s is None else f"{p.hiding_gb_s:.1f}",
    )  # fmt: skip
