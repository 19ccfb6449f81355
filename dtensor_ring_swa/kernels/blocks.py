"""A kernel of one block at a time, made to serve calls of several.

Where rows are in one block only, each block's results land in place. Where they are in several (a
window and sink tokens), the partial results are joined by log-sum-exp in float32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from dtensor_ring_swa.block import Block, Call
from dtensor_ring_swa.kernels.request import Request
from dtensor_ring_swa.merge import join_sinks_, merge_, sinks_gradient


def forward_by_block(
    run: Callable[..., None], partial_dtype: Callable[[torch.dtype], torch.dtype]
) -> Callable[..., None]:
    """Make ``Kernel.forward`` of ``run(request, q, k, v, band, out, lse)``.

    ``partial_dtype`` says in which dtype it can write results that are going to be joined.
    """

    def forward(
        request: Request,
        q_BMHD: torch.Tensor,
        k_BNGD: torch.Tensor,
        v_BNGE: torch.Tensor,
        call: Call,
        out_BMHE: torch.Tensor,
        lse_BHM: torch.Tensor,
        sinks_H: torch.Tensor | None = None,
    ) -> None:
        """Write out and lse; see ``Kernel.forward``."""
        out = out_BMHE
        if call.rows_overlap:
            out = torch.zeros_like(out_BMHE, dtype=lse_BHM.dtype)
        if call.rows_overlap or not call.covers_rows:
            out.zero_()
            lse_BHM.fill_(float("-inf"))
        for block in call.blocks:
            rows, keys = _rows(block), _keys(block)
            part, part_lse = out[:, rows], lse_BHM[:, :, rows]
            if call.rows_overlap:
                part = torch.empty_like(part, dtype=partial_dtype(out_BMHE.dtype))
                part_lse = torch.empty_like(part_lse)
            run(request, q_BMHD[:, rows], k_BNGD[:, keys], v_BNGE[:, keys], block.band, part, part_lse)
            if call.rows_overlap:
                merge_(out[:, rows], lse_BHM[:, :, rows], part, part_lse)
        if sinks_H is not None:
            join_sinks_(out, lse_BHM, sinks_H)
        if out is not out_BMHE:
            out_BMHE.copy_(out)

    return forward


def backward_by_block(run: Callable[..., None]) -> Callable[..., None]:
    """Make ``Kernel.backward`` of ``run(request, dout, q, k, v, out, lse, band, dq, dk, dv)``.

    With the joint out and lse, each block's gradients are its exact share of the whole.
    """

    def backward(
        request: Request,
        dout_BMHE: torch.Tensor,
        q_BMHD: torch.Tensor,
        k_BNGD: torch.Tensor,
        v_BNGE: torch.Tensor,
        out_BMHE: torch.Tensor,
        lse_BHM: torch.Tensor,
        call: Call,
        dq_BMHD: torch.Tensor,
        dk_BNGD: torch.Tensor,
        dv_BNGE: torch.Tensor,
        sinks_H: torch.Tensor | None = None,
        dsinks_H: torch.Tensor | None = None,
    ) -> None:
        """Write dq and the shares of dk and dv; see ``Kernel.backward``."""
        targets = (dq_BMHD, dk_BNGD, dv_BNGE)
        overlap = (call.rows_overlap, call.keys_overlap, call.keys_overlap)
        covered = (call.covers_rows, call.covers_keys, call.covers_keys)
        totals = [
            torch.zeros_like(x, dtype=lse_BHM.dtype) if shared else x if full else x.zero_()
            for x, shared, full in zip(targets, overlap, covered, strict=True)
        ]
        for block in call.blocks:
            rows, keys = _rows(block), _keys(block)
            places = [x[:, span] for x, span in zip(totals, (rows, keys, keys), strict=True)]
            parts = [
                torch.empty_like(place, dtype=x.dtype) if shared else place
                for place, x, shared in zip(places, targets, overlap, strict=True)
            ]
            run(
                request, dout_BMHE[:, rows], q_BMHD[:, rows], k_BNGD[:, keys], v_BNGE[:, keys], out_BMHE[:, rows],
                lse_BHM[:, :, rows], block.band, *parts,
            )  # fmt: skip
            for place, part in zip(places, parts, strict=True):
                if part is not place:
                    place += part
        for target, total in zip(targets, totals, strict=True):
            if total is not target:
                target.copy_(total)
        if sinks_H is not None and dsinks_H is not None:
            dsinks_H += sinks_gradient(sinks_H, dout_BMHE, out_BMHE, lse_BHM)

    return backward


def _rows(block: Block) -> slice:
    return slice(block.q_start, block.q_stop)


def _keys(block: Block) -> slice:
    return slice(block.k_start, block.k_stop)
