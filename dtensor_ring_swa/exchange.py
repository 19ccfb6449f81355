"""The halo exchange and, beside it, its transpose.

One contiguous message a neighbour: the K rows, then the V rows. Forward fetches the halo: shard rows
go out, halo rows come in. Backward returns the halo's gradients: the same transfers with send and
receive swapped, added where forward copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from dtensor_ring_swa.groups import exchange_group
from dtensor_ring_swa.plan import Plan, Transfer


@dataclass(frozen=True)
class Rows:
    """The shape of one row of K and V: how rows are laid out in a flat message."""

    batch: int
    kv_heads: int
    head_dim: int
    v_head_dim: int

    @classmethod
    def of(cls, k_BNGD: torch.Tensor, v_BNGE: torch.Tensor) -> Rows:
        """Read off K and V."""
        return cls(k_BNGD.shape[0], k_BNGD.shape[2], k_BNGD.shape[3], v_BNGE.shape[3])

    def numel(self, rows: int) -> int:
        """Elements of ``rows`` rows of K and V."""
        return rows * self.batch * self.kv_heads * (self.head_dim + self.v_head_dim)

    def messages(self, buffer: torch.Tensor, transfers: Sequence[Transfer]) -> list[torch.Tensor]:
        """The part of a flat buffer of rows that holds each transfer's message."""
        return [buffer[self.numel(t.start) : self.numel(t.stop)] for t in transfers]

    def unpack(self, message: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The K rows ``[B, n, Hkv, D]`` and V rows ``[B, n, Hkv, Dv]`` of a message of ``rows`` rows, as views."""
        k_width, v_width = (self.batch * self.kv_heads * dim for dim in (self.head_dim, self.v_head_dim))
        k, v = message.split([rows * k_width, rows * v_width])
        return (
            k.view(self.batch, rows, self.kv_heads, self.head_dim),
            v.view(self.batch, rows, self.kv_heads, self.v_head_dim),
        )


def pack(k_BnGD: torch.Tensor, v_BnGE: torch.Tensor) -> torch.Tensor:
    """One flat message of these rows."""
    return torch.cat((k_BnGD.flatten(), v_BnGE.flatten()))


@dataclass
class Pending:
    """Messages on their way. The buffers live until ``wait`` returns."""

    works: list[dist.Work]
    sent: list[torch.Tensor]
    received: list[torch.Tensor]

    def wait(self) -> list[torch.Tensor]:
        """The received messages. On CUDA the current stream waits, not the host."""
        for work in self.works:
            work.wait()
        self.works, self.sent = [], []
        return self.received


def _exchange(
    group: ProcessGroup | None,
    outgoing: Sequence[Transfer],
    sends: Sequence[torch.Tensor],
    incoming: Sequence[Transfer],
    receives: Sequence[torch.Tensor],
) -> Pending:
    """Post every message of one exchange at once; peers are ranks within the group."""
    # All ranks agree on emptiness: a row has elements on all of them or on none.
    if group is None or not any(m.numel() for m in (*sends, *receives)):
        return Pending([], [], list(receives))
    group = exchange_group(group)
    ops = [dist.P2POp(dist.isend, m, group=group, group_peer=t.peer) for t, m in zip(outgoing, sends, strict=True)]
    ops += [dist.P2POp(dist.irecv, m, group=group, group_peer=t.peer) for t, m in zip(incoming, receives, strict=True)]
    return Pending(dist.batch_isend_irecv(ops), list(sends), list(receives))


def fetch_halo(
    plan: Plan, group: ProcessGroup | None, k_BSGD: torch.Tensor, v_BSGE: torch.Tensor, halo: torch.Tensor
) -> Pending:
    """Send the neighbours the rows that they reach, and receive those that we reach.

    Args:
        plan: This rank's plan.
        group: The context-parallel group; None if there is nothing to exchange.
        k_BSGD: This rank's keys.
        v_BSGE: This rank's values.
        halo: Flat buffer to receive into, with room for the halo's rows.
    """
    sends = [pack(k_BSGD[:, t.start : t.stop], v_BSGE[:, t.start : t.stop]) for t in plan.sends]
    receives = Rows.of(k_BSGD, v_BSGE).messages(halo, plan.receives)
    return _exchange(group, plan.sends, sends, plan.receives, receives)


def return_halo(
    plan: Plan,
    group: ProcessGroup | None,
    grads: Sequence[torch.Tensor],
    new_message: Callable[[int], torch.Tensor],
) -> Pending:
    """The transpose of ``fetch_halo``: the halo's gradients go to its owners, ours come home.

    Args:
        plan: This rank's plan, the same as forward's.
        group: The context-parallel group; None if there is nothing to exchange.
        grads: Gradients of each neighbour's rows, packed, in the order of ``plan.receives``.
        new_message: Makes an empty message for a number of rows.

    Returns:
        The exchange; its messages are gradients of the shard's rows, in the order of ``plan.sends``.
    """
    homecoming = [new_message(len(t)) for t in plan.sends]
    return _exchange(group, plan.receives, grads, plan.sends, homecoming)
