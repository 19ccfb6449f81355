"""A kernel of one piece at a time, made to compute what consists of several.

A piece is some query rows, some key rows, and what is shown between them. No query row is in two pieces, so that each
piece's results are written in place. Keys may be in several, whose shares are added.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from dtensor_ring_swa.cut import cut
from dtensor_ring_swa.kernels.request import Request

Run = Callable[..., None]


class Piece(NamedTuple):
    """Query rows, key rows, and what is shown between them, as the kernel of a piece takes it."""

    rows: slice | range
    keys: slice | range
    shown: Any


class Pieces(NamedTuple):
    """All pieces of a whole.

    Attributes:
        each: The pieces.
        cover_rows: Whether every query row is in one.
        cover_keys: Whether every key row is in one.
        share_keys: Whether a key row may be in more than one.
    """

    each: tuple[Piece, ...] = ()
    cover_rows: bool = False
    cover_keys: bool = False
    share_keys: bool = False


# The pieces of what is shown between so many query rows and so many key rows.
PiecesOf = Callable[[Any, int, int], Pieces]


def forward_by_piece(run: Run, pieces_of: PiecesOf) -> Run:
    """Make the forward of a whole of ``run(request, q, k, v, shown, out, lse)``, that of a piece."""

    def forward(
        request: Request,
        q_BMHD: torch.Tensor,
        k_BNGD: torch.Tensor,
        v_BNGE: torch.Tensor,
        shown: Any,
        out_BMHE: torch.Tensor,
        lse_BHM: torch.Tensor,
    ) -> None:
        """Write out and lse: 0 and ``-inf`` of rows in no piece."""
        pieces = _pieces(pieces_of, shown, q_BMHD, k_BNGD)
        if not pieces.cover_rows:
            out_BMHE.zero_()
            lse_BHM.fill_(float("-inf"))
        for rows, keys, part in pieces.each:
            q, k, v = cut(q_BMHD, rows), cut(k_BNGD, keys), cut(v_BNGE, keys)
            run(request, q, k, v, part, cut(out_BMHE, rows), cut(lse_BHM, rows, 2))

    return forward


def backward_by_piece(run: Run, pieces_of: PiecesOf) -> Run:
    """Make the backward of a whole of ``run(request, dout, q, k, v, out, lse, shown, dq, dk, dv)``, that of a piece."""

    def backward(
        request: Request,
        dout_BMHE: torch.Tensor,
        q_BMHD: torch.Tensor,
        k_BNGD: torch.Tensor,
        v_BNGE: torch.Tensor,
        out_BMHE: torch.Tensor,
        lse_BHM: torch.Tensor,
        shown: Any,
        dq_BMHD: torch.Tensor,
        dk_BNGD: torch.Tensor,
        dv_BNGE: torch.Tensor,
    ) -> None:
        """Write dq, dk and dv; shares of the same keys are summed in lse's dtype and rounded once."""
        pieces = _pieces(pieces_of, shown, q_BMHD, k_BNGD)
        grads = sums = (dk_BNGD, dv_BNGE)
        if not pieces.cover_rows:
            dq_BMHD.zero_()
        if pieces.share_keys:
            sums = tuple(torch.zeros_like(x, dtype=lse_BHM.dtype) for x in grads)
        elif not pieces.cover_keys:
            for grad in grads:
                grad.zero_()
        for rows, keys, part in pieces.each:
            dout, q, out, dq = (cut(x, rows) for x in (dout_BMHE, q_BMHD, out_BMHE, dq_BMHD))
            k, v, *shares = (cut(x, keys) for x in (k_BNGD, v_BNGE, *grads))
            if pieces.share_keys:
                shares = [torch.empty_like(x) for x in shares]
            run(request, dout, q, k, v, out, cut(lse_BHM, rows, 2), part, dq, *shares)
            if pieces.share_keys:
                for total, share in zip(sums, shares, strict=True):
                    cut(total, keys).add_(share)
        if pieces.share_keys:
            for grad, total in zip(grads, sums, strict=True):
                grad.copy_(total)

    return backward


def _pieces(pieces_of: PiecesOf, shown: Any, q_BMHD: torch.Tensor, k_BNGD: torch.Tensor) -> Pieces:
    """None where a side is empty: kernels need not serve that."""
    return pieces_of(shown, q_BMHD.shape[1], k_BNGD.shape[1]) if q_BMHD.numel() and k_BNGD.numel() else Pieces()
