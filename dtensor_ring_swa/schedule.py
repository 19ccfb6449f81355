"""The walk of one sequence: with a halo or as a ring, and in which layout."""

from __future__ import annotations

import warnings
from functools import cached_property, lru_cache

import torch
from torch.distributed import ProcessGroup

from dtensor_ring_swa.deal import deal
from dtensor_ring_swa.geometry import Geometry
from dtensor_ring_swa.halo import halo_backward, halo_forward
from dtensor_ring_swa.kernels import Kernel, Request
from dtensor_ring_swa.packing import Boundaries
from dtensor_ring_swa.plan import Plan
from dtensor_ring_swa.ring import Ring
from dtensor_ring_swa.rotate import rotate_backward, rotate_forward
from dtensor_ring_swa.window import UNLIMITED


class Schedule:
    """One sequence on one rank: the walk of its plan, with the documents packed into it if there are any.

    See ``schedule_of``.
    """

    def __init__(self, geometry: Geometry, boundaries: Boundaries | None) -> None:
        self.geometry, self.boundaries = geometry, boundaries
        self.compute_layout = geometry.compute_layout(boundaries)
        self.is_ring = geometry.is_ring(self.compute_layout, boundaries is not None)

    @cached_property
    def plan(self) -> Plan:
        """This rank's part with a halo."""
        return self.geometry.plan(self.boundaries)

    @cached_property
    def ring(self) -> Ring:
        """This rank's part in the ring."""
        return self.geometry.ring(self.compute_layout, self.boundaries)

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
        if group is None or self.compute_layout == self.geometry.layout:
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
        if group is None or self.compute_layout == self.geometry.layout:
            return rotate_backward(ring, group, kernel, request, *tensors, lse_BHS, sinks_H, dsinks_H)
        (lse,) = self._dealt(group, lse_BHS.transpose(1, 2))
        dout, q, k, v, out = self._dealt(group, *tensors)
        lse = lse.transpose(1, 2).contiguous()
        grads = rotate_backward(ring, group, kernel, request, dout, q, k, v, out, lse, sinks_H, dsinks_H)
        dq, dk, dv = self._dealt_back(group, *grads)
        return dq, dk, dv

    def _dealt(self, group: ProcessGroup, *tensors: torch.Tensor) -> list[torch.Tensor]:
        return deal(self.geometry.deal(self.geometry.layout, self.compute_layout), group, *tensors)

    def _dealt_back(self, group: ProcessGroup, *tensors: torch.Tensor) -> list[torch.Tensor]:
        return deal(self.geometry.deal(self.compute_layout, self.geometry.layout), group, *tensors)


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
