"""A kernel of one block at a time, made to serve layers: calls in which no row is in two blocks.

Learned sinks are no block: they are joined to out and lse afterwards.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from dtensor_ring_swa.block import Call
from dtensor_ring_swa.kernels.pieces import Piece, Pieces, Run, backward_by_piece, forward_by_piece
from dtensor_ring_swa.kernels.request import Request
from dtensor_ring_swa.merge import add_sinks_gradient_, join_sinks_


def forward_by_block(run: Run) -> Run:
    """Make the forward of a layer of ``run(request, q, k, v, band, out, lse)``."""
    compute = forward_by_piece(run, _blocks)

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
        """Write out and lse."""
        compute(request, q_BMHD, k_BNGD, v_BNGE, layer, out_BMHE, lse_BHM)
        if sinks_H is not None:
            join_sinks_(out_BMHE, lse_BHM, sinks_H)

    return forward


def backward_by_block(run: Run) -> Run:
    """Make the backward of a layer of ``run(request, dout, q, k, v, out, lse, band, dq, dk, dv)``."""
    compute = backward_by_piece(run, _blocks)

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
        """Write dq, dk and dv, and add to dsinks."""
        compute(
            request, dout_BMHE, q_BMHD, k_BNGD, v_BNGE, out_BMHE, lse_BHM, layer, dq_BMHD, dk_BNGD, dv_BNGE
        )  # fmt: skip
        add_sinks_gradient_(dsinks_H, sinks_H, dout_BMHE, out_BMHE, lse_BHM)

    return backward


@lru_cache(maxsize=256)
def _blocks(layer: Call, q_len: int, k_len: int) -> Pieces:
    """The blocks of a layer, whose sizes it knows itself."""
    each = tuple(Piece(block.rows, block.keys, block.band) for block in layer.blocks)
    return Pieces(each, layer.covers_rows, layer.covers_keys, layer.keys_overlap)
