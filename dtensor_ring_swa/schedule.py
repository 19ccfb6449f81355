"""How to compute one call: with a halo or as a ring, and in which layout; and the walk itself."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from dtensor_ring_swa.choice import choose_exchange
from dtensor_ring_swa.deal import deal, make_deal
from dtensor_ring_swa.groups import agree, exchange_group, resolve_group
from dtensor_ring_swa.halo import halo_backward, halo_forward
from dtensor_ring_swa.kernels import Kernel, Request
from dtensor_ring_swa.layout import runs
from dtensor_ring_swa.packing import Boundaries
from dtensor_ring_swa.plan import Plan, make_plan
from dtensor_ring_swa.ring import Ring, balanced_layout, make_ring
from dtensor_ring_swa.rotate import rotate_backward, rotate_forward
from dtensor_ring_swa.window import UNLIMITED, Window


@dataclass(frozen=True)
class Geometry:
    """What a caller asks, as far as integers go: the same on every rank.

    Attributes:
        window: The window, in tokens.
        sink_tokens: First tokens of each document that its later tokens see besides their window.
        layout: How positions lie on the ranks.
        load_balance: Whether to compute contiguous shards in another layout: see ``balanced_layout``.
        exchange: Halo or ring: see ``choose_exchange``.
        seq_len: Tokens of the whole sequence.
        group_name: The context-parallel group, ``""`` for one device.
    """

    window: Window
    sink_tokens: int
    layout: str
    load_balance: str
    exchange: str
    seq_len: int
    group_name: str

    @cached_property
    def ranks(self) -> int:
        """Ranks that share the sequence."""
        return dist.get_world_size(resolve_group(self.group_name)) if self.group_name else 1

    @cached_property
    def rank(self) -> int:
        """This one of them."""
        return dist.get_rank(resolve_group(self.group_name)) if self.group_name else 0

    def compute_layout(self, boundaries: Boundaries | None = None) -> str:
        """The layout to compute in.

        Raises:
            ValueError: If a layout cannot deal out so many tokens.
        """
        if self.layout != "contiguous" or (self.exchange == "halo" and self.load_balance == "auto"):
            return self.layout
        return balanced_layout(self.load_balance, self.seq_len, self.ranks, self.window, boundaries)

    def is_ring(self, compute_layout: str, packed: bool) -> bool:
        """Whether keys pass by in a ring rather than being held as a halo."""
        choice = choose_exchange(self.exchange, compute_layout, self.seq_len, self.ranks, self.window, packed)
        return choice.exchange == "ring"

    def kept_rows(self, packed: bool) -> int:
        """Rows of K and V to keep for backward: the same on every rank and for all documents."""
        if self.is_ring(self.compute_layout(), packed) or not self.group_name:
            return 0
        return sum(self.window.reach(self.seq_len)) + min(self.sink_tokens, self.seq_len)

    def compare_rows(self, rows: int) -> None:
        """Raise ValueError on every rank unless all hold as many rows. Collective."""
        total = agree(resolve_group(self.group_name), ("the length of a shard",), (rows,))
        if total != self.seq_len:
            raise ValueError(
                f"in a graph of torch.compile shards must be of one length, got {rows} tokens here and {total} on the "
                f"{self.ranks} ranks together; pad the sequence to {-(-total // self.ranks) * self.ranks} tokens"
            )

    def check_rows(self, rows: int) -> None:
        """Raise ValueError unless this rank holds the rows that its layout gives it."""
        expected = sum(map(len, runs(self.layout, self.seq_len, self.ranks, self.rank)))
        if rows != expected:
            raise ValueError(
                f"rank {self.rank} of {self.ranks} holds {rows} of {self.seq_len} tokens, but layout "
                f"{self.layout!r} gives it {expected}; a DTensor made by from_local of uneven shards needs its "
                "global shape"
            )


class Schedule:
    """One sequence on one rank: the walk of its plan, with the documents packed into it if there are any."""

    def __init__(self, geometry: Geometry, boundaries: Boundaries | None) -> None:
        self.geometry, self.boundaries = geometry, boundaries
        self.layout, self.compute_layout = geometry.layout, geometry.compute_layout(boundaries)
        self.seq_len, self.ranks, self.rank = geometry.seq_len, geometry.ranks, geometry.rank
        self.is_ring = geometry.is_ring(self.compute_layout, boundaries is not None)

    @property
    def plan(self) -> Plan:
        """This rank's part with a halo."""
        geometry = self.geometry
        return make_plan(
            self.seq_len, self.ranks, self.rank, geometry.window, self.boundaries, geometry.sink_tokens
        )  # fmt: skip

    @property
    def ring(self) -> Ring:
        """This rank's part in the ring."""
        geometry = self.geometry
        return make_ring(
            self.compute_layout, self.seq_len, self.ranks, self.rank, geometry.window, self.boundaries,
            geometry.sink_tokens,
        )  # fmt: skip

    def _group(self, device: torch.device) -> ProcessGroup | None:
        # Every rank comes through here, also those that will have nothing to say: making the group
        # for the exchange is collective.
        return exchange_group(resolve_group(self.geometry.group_name), device) if self.geometry.group_name else None

    def forward(
        self,
        kernel: Kernel,
        request: Request,
        q_BSHD: torch.Tensor,
        k_BSGD: torch.Tensor,
        v_BSGE: torch.Tensor,
        halo: torch.Tensor,
        out_BSHE: torch.Tensor,
        lse_BHS: torch.Tensor,
        sinks_H: torch.Tensor | None,
    ) -> None:
        """Write out, lse and halo."""
        group = self._group(q_BSHD.device)
        if not self.is_ring:
            halo_forward(self.plan, group, kernel, request, q_BSHD, k_BSGD, v_BSGE, halo, out_BSHE, lse_BHS, sinks_H)
            return
        ring = self.ring
        if UNLIMITED not in self.geometry.window:
            _warn_of_waste(ring, self.plan, k_BSGD[:, :1].nbytes + v_BSGE[:, :1].nbytes)
        if self.compute_layout == self.layout or group is None:
            rotate_forward(ring, group, kernel, request, q_BSHD, k_BSGD, v_BSGE, out_BSHE, lse_BHS, sinks_H)
            return
        q, k, v = self._dealt(group, q_BSHD, k_BSGD, v_BSGE)
        out, lse = q.new_empty(*q.shape[:3], v.shape[3]), lse_BHS.new_empty(*lse_BHS.shape[:2], ring.rows)
        rotate_forward(ring, group, kernel, request, q, k, v, out, lse, sinks_H)
        (out,), (lse,) = self._dealt_back(group, out), self._dealt_back(group, lse.transpose(1, 2))
        out_BSHE.copy_(out)
        lse_BHS.copy_(lse.transpose(1, 2))

    def backward(
        self,
        kernel: Kernel,
        request: Request,
        dout_BSHE: torch.Tensor,
        q_BSHD: torch.Tensor,
        k_BSGD: torch.Tensor,
        v_BSGE: torch.Tensor,
        out_BSHE: torch.Tensor,
        lse_BHS: torch.Tensor,
        halo: torch.Tensor,
        sinks_H: torch.Tensor | None,
        dsinks_H: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """dq, dk and dv: forward transposed. The share of the sinks' gradient is added to ``dsinks_H``."""
        group = self._group(q_BSHD.device)
        tensors = (dout_BSHE, q_BSHD, k_BSGD, v_BSGE, out_BSHE)
        if not self.is_ring:
            return halo_backward(self.plan, group, kernel, request, *tensors, lse_BHS, halo, sinks_H, dsinks_H)
        ring = self.ring
        if self.compute_layout == self.layout or group is None:
            return rotate_backward(ring, group, kernel, request, *tensors, lse_BHS, sinks_H, dsinks_H)
        (lse,) = self._dealt(group, lse_BHS.transpose(1, 2))
        dout, q, k, v, out = self._dealt(group, *tensors)
        lse = lse.transpose(1, 2).contiguous()
        grads = rotate_backward(ring, group, kernel, request, dout, q, k, v, out, lse, sinks_H, dsinks_H)
        dq, dk, dv = self._dealt_back(group, *grads)
        return dq, dk, dv

    def _dealt(self, group: ProcessGroup, *tensors: torch.Tensor) -> list[torch.Tensor]:
        moves = make_deal(self.layout, self.compute_layout, self.seq_len, self.ranks, self.rank)
        return deal(moves, group, *tensors)

    def _dealt_back(self, group: ProcessGroup, *tensors: torch.Tensor) -> list[torch.Tensor]:
        moves = make_deal(self.compute_layout, self.layout, self.seq_len, self.ranks, self.rank)
        return deal(moves, group, *tensors)


@lru_cache(maxsize=256)
def _warn_of_waste(ring: Ring, plan: Plan, row_bytes: int) -> None:
    """Say once what a limited window costs in a layout that scatters neighbours over the ranks."""
    fetched, needed, window = ring.received_rows, plan.received_rows, ring.window
    if fetched > 2 * needed:
        warnings.warn(
            f"window ({window.left}, {window.right}) in layout {ring.layout!r} makes rank {ring.rank} receive "
            f"{fetched * row_bytes} bytes of K and V; with contiguous shards and load_balance='auto' it would be "
            f"{needed * row_bytes}",
            stacklevel=2,
        )
