"""For tests of code that uses this package: the oracle, random cases, and a pool of ranks."""

from dtensor_ring_swa.testing.dense import dense_attention
from dtensor_ring_swa.testing.pool import RankFailure, RankPool

__all__ = ["RankFailure", "RankPool", "dense_attention"]
