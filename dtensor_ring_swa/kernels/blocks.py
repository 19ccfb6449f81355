"""A kernel of one block at a time, made to serve layers: calls in which no row is in two blocks.

Each block is computed in turn, its results in place. Keys may be in several blocks, whose shares are added.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from dtensor_ring_swa.block import Call
from dtensor_ring_swa.cut import cut
from dtensor_ring_swa.kernels.request import Request
from dtensor_ring_swa.merge import add_sinks_gradient_, join_sinks_


def forward_by_block(run: Callable[..., None]) -> Callable[..., None]:
    """Make the forward of a layer of ``run(request, q, k, v, band, out, lse)``."""

    def forward(
        request: Request,
        q_BMHD: torch.Tensor,
        k_BNGD: torch.Tensor,
        v_BNGE: torch.Tensor,
        layer: Call,
        out_BMHE: torch.Tensor,
        lse_BHM: torch.Tensor,
        sinks_H: torch.Tensor | None = None,
    ) -> None:
        """Write out and lse of a call in which no row is in two blocks."""
        if not layer.covers_rows:
            out_BMHE.zero_()
            lse_BHM.fill_(float("-inf"))
        for block in layer.blocks:
            rows, keys = block.rows, block.keys
            q, k, v = cut(q_BMHD, rows), cut(k_BNGD, keys), cut(v_BNGE, keys)
            run(request, q, k, v, block.band, cut(out_BMHE, rows), cut(lse_BHM, rows, 2))
        if sinks_H is not None:
            join_sinks_(out_BMHE, lse_BHM, sinks_H)

    return forward


def backward_by_block(run: Callable[..., None]) -> Callable[..., None]:
    """Make the backward of a layer of ``run(request, dout, q, k, v, out, lse, band, dq, dk, dv)``."""

    def backward(
        request: Request,
        dout_BMHE: torch.Tensor,
        q_BMHD: torch.Tensor,
        k_BNGD: torch.Tensor,
        v_BNGE: torch.Tensor,
        out_BMHE: torch.Tensor,
        lse_BHM: torch.Tensor,
        layer: Call,
        dq_BMHD: torch.Tensor,
        dk_BNGD: torch.Tensor,
        dv_BNGE: torch.Tensor,
        sinks_H: torch.Tensor | None = None,
        dsinks_H: torch.Tensor | None = None,
    ) -> None:
        """Write dq, dk and dv of a call in which no row is in two blocks; keys may be."""
        if not layer.covers_rows:
            dq_BMHD.zero_()
        sums = [dk_BNGD, dv_BNGE]
        if layer.keys_overlap:
            sums = [torch.zeros_like(x, dtype=lse_BHM.dtype) for x in sums]
        elif not layer.covers_keys:
            dk_BNGD.zero_()
            dv_BNGE.zero_()
        for block in layer.blocks:
            rows, keys = block.rows, block.keys
            dout, q, out, dq = (cut(x, rows) for x in (dout_BMHE, q_BMHD, out_BMHE, dq_BMHD))
            k, v, *places = (cut(x, keys) for x in (k_BNGD, v_BNGE, *sums))
            parts = places
            if layer.keys_overlap:
                parts = [torch.empty_like(cut(x, keys)) for x in (dk_BNGD, dv_BNGE)]
            run(request, dout, q, k, v, out, cut(lse_BHM, rows, 2), block.band, dq, *parts)
            for place, part in zip(places, parts, strict=True):
                if part is not place:
                    place += part
        if layer.keys_overlap:
            dk_BNGD.copy_(sums[0])
            dv_BNGE.copy_(sums[1])
        add_sinks_gradient_(dsinks_H, sinks_H, dout_BMHE, out_BMHE, lse_BHM)

    return backward
