"""Context-parallel sliding-window attention for DTensors."""

from dtensor_ring_swa.attention import ring_attention
from dtensor_ring_swa.parallel import ContextParallel, RingAttention
from dtensor_ring_swa.plan import Plan, make_plan
from dtensor_ring_swa.sequence import (
    gather_sequence,
    next_token_labels,
    positions,
    shard_sequence,
    token_mean,
)
from dtensor_ring_swa.window import Window

__all__ = [
    "ContextParallel",
    "Plan",
    "RingAttention",
    "Window",
    "gather_sequence",
    "make_plan",
    "next_token_labels",
    "positions",
    "ring_attention",
    "shard_sequence",
    "token_mean",
]
