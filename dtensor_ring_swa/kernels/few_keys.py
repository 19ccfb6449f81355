"""Few keys that queries see besides a run of others, as the sink tokens of one document are.

A tile of queries walks over them and its other keys in one go. So they are told apart from those here, and
each query row has two intervals: of the others, and of the few.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from dtensor_ring_swa.block import Call
from dtensor_ring_swa.device import cached_per_stream
from dtensor_ring_swa.kernels.intervals import KEPT, intervals_of_queries

# As many as fit into the smallest tile.
_MOST = 16


class FewKeys(NamedTuple):
    """A call in two parts.

    Attributes:
        others: The call without the few keys.
        keys: The few keys.
        bounds: The intervals of ``others``, then those of the few: ``[2, 2, q_len]``.
    """

    others: Call
    keys: slice
    bounds: torch.Tensor

    @property
    def width(self) -> int:
        """How many they are."""
        return self.keys.stop - self.keys.start

    def new_shares(self, tiles: int, grads: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
        """Room ``[B, G, tiles, width, D]`` for what each tile of query rows adds to each of the gradients."""
        return [x.new_empty(x.shape[0], x.shape[2], tiles, self.width, x.shape[3], dtype=dtype) for x in grads]

    def add(self, grads: Sequence[torch.Tensor], shares: Sequence[torch.Tensor], factors: Sequence[float]) -> None:
        """Add the sums of the shares, times a factor each, to the few rows of the gradients ``[B, N, G, D]``."""
        for grad, share, factor in zip(grads, shares, factors, strict=True):
            grad[:, self.keys] += share.sum(2).transpose(1, 2) * factor


@cached_per_stream(KEPT)
def bounds_of_queries(call: Call, device: torch.device) -> tuple[torch.Tensor, FewKeys | None]:
    """The intervals of a call's queries, those of its few keys last if there are any."""
    few = few_keys(call, device)
    return (intervals_of_queries(call, device), None) if few is None else (few.bounds, few)


def few_keys(call: Call, device: torch.device) -> FewKeys | None:
    """The few keys of a call; None if there are none, or if either part takes more than one interval a row."""
    few = replace(call, blocks=tuple(block for block in call.blocks if block.k_len <= _MOST))
    others = replace(call, blocks=tuple(block for block in call.blocks if block.k_len > _MOST))
    if not few.blocks or not others.blocks:
        return None
    keys = slice(min(block.k_start for block in few.blocks), max(block.k_stop for block in few.blocks))
    if keys.stop - keys.start > _MOST:
        return None
    bounds = torch.cat([intervals_of_queries(part, device) for part in (others, few)])
    return FewKeys(others, keys, bounds) if len(bounds) == 2 else None
