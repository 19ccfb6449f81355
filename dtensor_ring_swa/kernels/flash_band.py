"""What the FlashAttention kernels share: any band, cut to what such a kernel takes.

FlashAttention aligns its window with the last query and the last key, and what it does with rows that
see no key differs by version. Cut to the rows that see a key and the keys that are seen, every band is
such a window, and the rest is known: zeros and ``-inf``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
import torch.nn.functional as F

from dtensor_ring_swa.band import Band
from dtensor_ring_swa.cut import cut
from dtensor_ring_swa.kernels.request import Request

# Tokens visible to the left and right of the aligned query; None where a side hides nothing.
FlashWindow = tuple[int | None, int | None]


def forward_on_bands(run: Callable[..., None]) -> Callable[..., None]:
    """Make the forward of any band of ``run(request, q, k, v, window, out, lse)``."""

    def forward(
        request: Request,
        q_BMHD: torch.Tensor,
        k_BNGD: torch.Tensor,
        v_BNGE: torch.Tensor,
        band: Band,
        out_BMHE: torch.Tensor,
        lse_BHM: torch.Tensor,
    ) -> None:
        """Write out and lse of one block."""
        pieces = _pieces(band, q_BMHD.shape[1], k_BNGD.shape[1]) if q_BMHD.numel() and k_BNGD.numel() else ()
        if sum(len(rows) for rows, _, _ in pieces) < q_BMHD.shape[1]:
            out_BMHE.zero_()
            lse_BHM.fill_(float("-inf"))
        for rows, keys, window in pieces:
            k, v = cut(k_BNGD, keys), cut(v_BNGE, keys)
            run(request, cut(q_BMHD, rows), k, v, window, cut(out_BMHE, rows), cut(lse_BHM, rows, 2))

    return forward


def backward_on_bands(run: Callable[..., None]) -> Callable[..., None]:
    """Make the backward of any band of ``run(request, dout, q, k, v, out, lse, window, dq, dk, dv)``."""

    def backward(
        request: Request,
        dout_BMHE: torch.Tensor,
        q_BMHD: torch.Tensor,
        k_BNGD: torch.Tensor,
        v_BNGE: torch.Tensor,
        out_BMHE: torch.Tensor,
        lse_BHM: torch.Tensor,
        band: Band,
        dq_BMHD: torch.Tensor,
        dk_BNGD: torch.Tensor,
        dv_BNGE: torch.Tensor,
    ) -> None:
        """Write dq, dk and dv of one block."""
        pieces = _pieces(band, q_BMHD.shape[1], k_BNGD.shape[1]) if q_BMHD.numel() and k_BNGD.numel() else ()
        if sum(len(rows) for rows, _, _ in pieces) < q_BMHD.shape[1]:
            dq_BMHD.zero_()
        # Where pieces share keys, their shares are summed in float32 and rounded once.
        sums = (dk_BNGD, dv_BNGE)
        if len(pieces) > 1:
            sums = tuple(torch.zeros_like(x, dtype=torch.float32) for x in sums)
        elif not pieces or len(pieces[0][1]) < k_BNGD.shape[1]:
            dk_BNGD.zero_()
            dv_BNGE.zero_()
        for rows, keys, window in pieces:
            k, v, *totals = (cut(x, keys) for x in (k_BNGD, v_BNGE, *sums))
            shares = [torch.empty_like(x) for x in (k, v)] if len(pieces) > 1 else totals
            run(
                request, cut(dout_BMHE, rows), cut(q_BMHD, rows), k, v, cut(out_BMHE, rows),
                cut(lse_BHM, rows, 2), window, cut(dq_BMHD, rows), *shares,
            )  # fmt: skip
            if len(pieces) > 1:
                for total, share in zip(totals, shares, strict=True):
                    total += share
        if len(pieces) > 1:
            dk_BNGD.copy_(sums[0])
            dv_BNGE.copy_(sums[1])

    return backward


def padded(x: torch.Tensor, width: int) -> torch.Tensor:
    """The same rows ``width`` wide, the last dim contiguous. Zero columns change no score and no sum."""
    if x.shape[-1] != width:
        return F.pad(x, (0, width - x.shape[-1]))
    return x if x.stride(-1) == 1 else x.contiguous()


@lru_cache(maxsize=1024)
def _pieces(band: Band, q_len: int, k_len: int) -> tuple[tuple[range, range, FlashWindow], ...]:
    """Query rows, the keys that they see, and the window between: one piece, in rare shapes up to three.

    FlashAttention-2 turns a side as wide as the keys into an open one, and completes a lone open side
    to the number of keys, counted from the aligned diagonal. With more queries than keys, neither is
    the same band. The queries that see every key are then a piece of their own, open on both sides,
    and what is left above and below has fewer queries than keys.
    """
    rows, keys, inner = band.trim(q_len, k_len)
    if not rows:
        return ()
    if len(rows) <= len(keys) or inner.upper - inner.lower < len(keys) - 1:
        left, right = inner.flash_window(len(rows), len(keys))
        return ((rows, keys, (left if left < len(keys) else None, right if right < len(keys) else None)),)
    first, last = max(0, len(keys) - 1 - inner.upper), min(len(rows), 1 - inner.lower)
    pieces: list[tuple[range, range, FlashWindow]] = [(rows[first:last], keys, (None, None))]
    for start, stop in ((0, first), (last, len(rows))):
        shifted = Band(inner.lower + start, inner.upper + start)
        for part, part_keys, window in _pieces(shifted, stop - start, len(keys)):
            pieces.append((_shifted(part, rows.start + start), _shifted(part_keys, keys.start), window))
    return tuple(pieces)


def _shifted(rows: range, by: int) -> range:
    return range(rows.start + by, rows.stop + by)
