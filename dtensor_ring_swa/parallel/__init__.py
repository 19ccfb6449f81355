"""Plans: modules written for one device, made context-parallel from outside."""

from dtensor_ring_swa.parallel.plans import apply_context_parallel
from dtensor_ring_swa.parallel.style import ContextParallel

__all__ = ["ContextParallel", "apply_context_parallel"]
