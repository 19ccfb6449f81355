"""Measured rates that the predictions are made of. docs/benchmarks.md says of which runs they are."""

from __future__ import annotations

from dataclasses import dataclass
from math import log

from dtensor_ring_swa.bench.shapes import Shape
from dtensor_ring_swa.window import UNLIMITED, Window


@dataclass(frozen=True)
class Rate:
    """Useful TFLOP/s of a kernel on one layer's shape.

    Attributes:
        head_dim: Width of q, k and v.
        window: Neighbours visible to each token, both sides together; of a window without limit, the tokens.
        forward: Of forward.
        backward: Of backward.
        kind: ``"limited"``, ``"causal"`` for a window without limit on one side, ``"full"`` on both.
    """

    head_dim: int
    window: int
    forward: float
    backward: float
    kind: str = "limited"

    def __str__(self) -> str:
        window = f"window {self.window}" if self.kind == "limited" else f"{self.kind}, {self.window} tokens"
        return f"measured in bfloat16, head dim {self.head_dim}, {window}"


# One kernel call without ranks on an H200, torch 2.11, bf16, flash-attn-4: `ideal`, 32768 rows. The last limited
# one is an older measurement on the same kind of GPU. Without limit: one GPU's 210.8 / 582.0 ms (causal) and
# 463.3 / 1163.8 ms (full) for 131072 tokens.
RATES = (
    Rate(128, 4095, 709.5, 603.6),  # 32/8 heads
    Rate(128, 1023, 550.5, 419.6),  # 32/8 heads
    Rate(64, 127, 140.5, 96.2),  # 64/8 heads
    Rate(256, 1023, 621.6, 263.9),  # 8/4 heads
    Rate(256, 4095, 709.0, 375.0),  # 8/4 heads
    Rate(128, 131072, 667.6, 604.6, "causal"),  # 32/8 heads
    Rate(128, 131072, 607.5, 604.7, "full"),  # 32/8 heads
)
# 16.8 MB one way over an NVLink pair in 0.06 ms.
NVLINK_GB_S = 16.8e6 / 0.06e-3 / 1e9
# One copy through the memory of an H200.
MEMORY_GB_S = 4300.0
# Two ranks, 32768 rows each, w = 4095: `ring` 3.138 / 9.267 ms, `ideal` 3.099 / 9.108.
# One row in eight is boundary, and the excess is put down to it.
BOUNDARY_COST = {"forward": 1 + (3.138 / 3.099 - 1) * 8, "backward": 1 + (9.267 / 9.108 - 1) * 8}
# Two ranks, 131072 tokens, causal, balanced: 112.4 / 300.8 ms, where one GPU took 210.8 / 582.0. What dealing and
# merging do not explain of the excess is put down to kernel calls on parts: these factors make the model give the
# measured times, which are the slower rank's.
PART_COST = {"forward": 1.0207, "backward": 1.0040}
BACKWARD_FLOPS = 2.5


def kind_of(window: Window) -> str:
    """``Rate.kind`` of a window."""
    return ("limited", "causal", "full")[[window.left, window.right].count(UNLIMITED)]


def rate_of(shape: Shape, window: int) -> Rate:
    """The measured rate nearest to a shape: of the same kind, then by head dim, then by window."""
    return min(
        (rate for rate in RATES if rate.kind == kind_of(shape.window)),
        key=lambda r: (abs(log(r.head_dim / shape.head_dim)), abs(log(r.window / max(window, 1)))),
    )
