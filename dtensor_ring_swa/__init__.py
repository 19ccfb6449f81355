"""Context-parallel sliding-window attention for DTensors."""

from dtensor_ring_swa.attention import ring_attention
from dtensor_ring_swa.document_starts import documents_from_eos, documents_from_position_ids
from dtensor_ring_swa.documents import Documents
from dtensor_ring_swa.loss import next_token_labels, token_mean
from dtensor_ring_swa.module import RingAttention
from dtensor_ring_swa.parallel import ContextParallel, apply_context_parallel
from dtensor_ring_swa.plan import Plan
from dtensor_ring_swa.planning import make_plan
from dtensor_ring_swa.sequence import gather_sequence, positions, shard_sequence
from dtensor_ring_swa.window import Window

__all__ = [
    "ContextParallel",
    "Documents",
    "Plan",
    "RingAttention",
    "Window",
    "apply_context_parallel",
    "documents_from_eos",
    "documents_from_position_ids",
    "gather_sequence",
    "make_plan",
    "next_token_labels",
    "positions",
    "ring_attention",
    "shard_sequence",
    "token_mean",
]
