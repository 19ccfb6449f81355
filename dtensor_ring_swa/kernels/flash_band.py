"""What the FlashAttention kernels share: any band, cut to what such a kernel takes.

FlashAttention aligns its window with the last query and the last key, and what it does with rows that
see no key differs by version. Cut to the rows that see a key and the keys that are seen, every band is
such a window, and the rest is known: zeros and ``-inf``.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F

from dtensor_ring_swa.band import Band
from dtensor_ring_swa.kernels.pieces import Piece, Pieces, Run, backward_by_piece, forward_by_piece

# Tokens visible to the left and right of the aligned query; None where a side hides nothing.
FlashWindow = tuple[int | None, int | None]


def forward_on_bands(run: Run) -> Run:
    """Make the forward of any band of ``run(request, q, k, v, window, out, lse)``."""
    return forward_by_piece(run, _windows)


def backward_on_bands(run: Run) -> Run:
    """Make the backward of any band of ``run(request, dout, q, k, v, out, lse, window, dq, dk, dv)``."""
    return backward_by_piece(run, _windows)


def padded(x: torch.Tensor, width: int) -> torch.Tensor:
    """The same rows ``width`` wide, the last dim contiguous. Zero columns change no score and no sum."""
    if x.shape[-1] != width:
        return F.pad(x, (0, width - x.shape[-1]))
    return x if x.stride(-1) == 1 else x.contiguous()


@lru_cache(maxsize=1024)
def _windows(band: Band, q_len: int, k_len: int) -> Pieces:
    """A band as windows. Where there are several, they see keys that another sees as well."""
    found = _pieces(band, q_len, k_len)
    return Pieces(
        tuple(Piece(*piece) for piece in found),
        cover_rows=sum(len(rows) for rows, _, _ in found) == q_len,
        cover_keys=any(len(keys) == k_len for _, keys, _ in found),
        share_keys=len(found) > 1,
    )


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
