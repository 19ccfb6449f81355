"""Which query heads are a rank's, and the part of replicated key and value heads that these use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class KeyHeads:
    """The part of replicated k and v that this rank's query heads use, and the way back.

    Attributes:
        total: Key/value heads of the whole tensor.
        used: Heads taken, in order; repeated for each query head where they do not share evenly.
    """

    total: int
    used: tuple[int, ...]

    @classmethod
    def of(cls, mesh: DeviceMesh, axes: Sequence[int], q_heads: int, kv_heads: int) -> KeyHeads:
        """Read off the mesh axes that shard q's heads."""
        mine = query_heads(mesh, axes, q_heads)
        per_query = [head * kv_heads // q_heads for head in mine]
        distinct = sorted(set(per_query))
        shared_evenly = len({per_query.count(head) for head in distinct}) == 1
        return cls(kv_heads, tuple(distinct if shared_evenly else per_query))

    @property
    def _span(self) -> slice | None:
        first, last = self.used[0], self.used[-1]
        return slice(first, last + 1) if self.used == tuple(range(first, last + 1)) else None

    def take(self, x_BSGD: torch.Tensor) -> torch.Tensor:
        """These heads of K or V."""
        if self._span is not None:
            return x_BSGD[:, :, self._span]
        return x_BSGD[:, :, list(self.used)]

    def give(self, grad: torch.Tensor) -> torch.Tensor:
        """The transpose of ``take``: zero for the heads that other ranks use."""
        full = grad.new_zeros(*grad.shape[:2], self.total, grad.shape[3])
        if self._span is not None:
            full[:, :, self._span] = grad
            return full
        return full.index_add_(2, torch.tensor(self.used, device=grad.device), grad)


def query_heads(mesh: DeviceMesh, axes: Sequence[int], q_heads: int) -> range:
    """The query heads of this rank, where ``axes`` of the mesh shard them."""
    ranks, index = 1, 0
    for axis in axes:
        ranks, index = ranks * mesh.size(axis), index * mesh.size(axis) + mesh.get_local_rank(axis)
    return range(index * q_heads // ranks, (index + 1) * q_heads // ranks)
