"""How rows of K and V lie in a flat message: the K rows, then the V rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from dtensor_ring_swa.messages import Message
from dtensor_ring_swa.plan import Transfer


class RowShape(NamedTuple):
    """The shape of a row of K and V, from which follows where they lie in a message."""

    batch: int
    kv_heads: int
    head_dim: int
    v_head_dim: int

    @classmethod
    def of(cls, k_BNGD: torch.Tensor, v_BNGE: torch.Tensor) -> RowShape:
        """Read off K and V."""
        batch, _, kv_heads, head_dim = k_BNGD.shape
        return cls(batch, kv_heads, head_dim, v_BNGE.shape[3])

    def numel(self, rows: int) -> int:
        """Elements of ``rows`` rows of K and V."""
        return rows * self.batch * self.kv_heads * (self.head_dim + self.v_head_dim)

    def messages(self, buffer: torch.Tensor, transfers: Sequence[Transfer]) -> list[Message]:
        """Each transfer's message, as the part of a flat buffer of rows that holds it."""
        return [(t.peer, buffer[self.numel(t.start) : self.numel(t.stop)]) for t in transfers]

    def unpack(self, message: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The K rows ``[B, n, Hkv, D]`` and V rows ``[B, n, Hkv, Dv]`` of a message of ``rows`` rows, as views."""
        if self.head_dim == self.v_head_dim:
            k, v = message.view(2, self.batch, rows, self.kv_heads, self.head_dim).unbind()
            return k, v
        heads = self.batch * rows * self.kv_heads
        k, v = message.split_with_sizes([heads * self.head_dim, heads * self.v_head_dim])
        return (
            k.view(self.batch, rows, self.kv_heads, self.head_dim),
            v.view(self.batch, rows, self.kv_heads, self.v_head_dim),
        )


def pack(k_BnGD: torch.Tensor, v_BnGE: torch.Tensor) -> torch.Tensor:
    """One message of these rows, contiguous."""
    if k_BnGD.shape == v_BnGE.shape:
        # The same numbers in the same order, by one operator in place of three; one more copy where stack keeps the
        # memory format of the inputs, such as torch.channels_last.
        return torch.stack((k_BnGD, v_BnGE)).contiguous()
    return torch.cat((k_BnGD.flatten(), v_BnGE.flatten()))
