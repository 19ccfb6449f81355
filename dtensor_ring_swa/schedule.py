"""How to compute one call: with a halo or as a ring, and in which layout; and the walk itself."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch.distributed import ProcessGroup

from dtensor_ring_swa.choice import choose_exchange
from dtensor_ring_swa.deal import deal, make_deal
from dtensor_ring_swa.halo import halo_backward, halo_forward
from dtensor_ring_swa.kernels import Kernel, Request
from dtensor_ring_swa.layout import runs
from dtensor_ring_swa.packing import Boundaries
from dtensor_ring_swa.plan import Plan
from dtensor_ring_swa.planning import make_plan
from dtensor_ring_swa.ring import Ring, balanced_layout, make_ring
from dtensor_ring_swa.rotate import rotate_backward, rotate_forward
from dtensor_ring_swa.window import UNLIMITED, Window


@dataclass(frozen=True)
class Geometry:
    """What a caller asks, as far as integers go: the same on every rank but for its place.

    Attributes:
        window: The window, in tokens.
        sink_tokens: First tokens of each document that its later tokens see besides their window.
        layout: How positions lie on the ranks.
        load_balance: Whether to compute contiguous shards in another layout: see ``balanced_layout``.
        exchange: Halo or ring: see ``choose_exchange``.
        seq_len: Tokens of the whole sequence.
        ranks: Ranks that share the sequence.
        rank: This one of them.
    """

    window: Window
    sink_tokens: int
    layout: str
    load_balance: str
    exchange: str
    seq_len: int
    ranks: int
    rank: int

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

    def kept_rows(self, packed: bool, in_graph: bool) -> int:
        """Rows of K and V to keep for backward, known before the documents are; in a graph the same on every rank."""
        if self.ranks == 1 or self.is_ring(self.compute_layout(), packed):
            return 0
        if not packed and not in_graph:
            return schedule_of(self, None).plan.received_rows
        return sum(self.window.reach(self.seq_len)) + min(self.sink_tokens, self.seq_len)

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
    """One sequence on one rank: the walk of its plan, with the documents packed into it if there are any.

    See ``schedule_of``.
    """

    def __init__(self, geometry: Geometry, boundaries: Boundaries | None) -> None:
        self.geometry, self.boundaries = geometry, boundaries
        self.layout, self.compute_layout = geometry.layout, geometry.compute_layout(boundaries)
        self.seq_len, self.ranks, self.rank = geometry.seq_len, geometry.ranks, geometry.rank
        self.is_ring = geometry.is_ring(self.compute_layout, boundaries is not None)

    @cached_property
    def plan(self) -> Plan:
        """This rank's part with a halo."""
        geometry = self.geometry
        return make_plan(
            self.seq_len, self.ranks, self.rank, geometry.window, self.boundaries, geometry.sink_tokens
        )  # fmt: skip

    @cached_property
    def ring(self) -> Ring:
        """This rank's part in the ring."""
        geometry = self.geometry
        return make_ring(
            self.compute_layout, self.seq_len, self.ranks, self.rank, geometry.window, self.boundaries,
            geometry.sink_tokens,
        )  # fmt: skip

    def forward(
        self,
        group: ProcessGroup | None,
        kernel: Kernel,
        request: Request,
        halo: torch.Tensor,
        q_BSHD: torch.Tensor,
        k_BSGD: torch.Tensor,
        v_BSGE: torch.Tensor,
        out_BSHE: torch.Tensor,
        lse_BHS: torch.Tensor,
        sinks_H: torch.Tensor | None,
    ) -> None:
        """Write out, lse and halo; ``group`` is the one to exchange on, if any."""
        if not self.is_ring:
            halo_forward(self.plan, group, kernel, request, halo, q_BSHD, k_BSGD, v_BSGE, out_BSHE, lse_BHS, sinks_H)
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
        group: ProcessGroup | None,
        kernel: Kernel,
        request: Request,
        halo: torch.Tensor,
        dout_BSHE: torch.Tensor,
        q_BSHD: torch.Tensor,
        k_BSGD: torch.Tensor,
        v_BSGE: torch.Tensor,
        out_BSHE: torch.Tensor,
        lse_BHS: torch.Tensor,
        sinks_H: torch.Tensor | None,
        dsinks_H: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """dq, dk and dv: forward transposed. The share of the sinks' gradient is added to ``dsinks_H``."""
        tensors = (dout_BSHE, q_BSHD, k_BSGD, v_BSGE, out_BSHE)
        if not self.is_ring:
            return halo_backward(self.plan, group, kernel, request, halo, *tensors, lse_BHS, sinks_H, dsinks_H)
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
def schedule_of(geometry: Geometry, boundaries: Boundaries | None) -> Schedule:
    """The schedule of a sequence, with the boundaries of its documents if there are any; made once for all layers."""
    return Schedule(geometry, boundaries)


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
