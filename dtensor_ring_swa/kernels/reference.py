"""Attention of one block in plain torch operations: any device, any float dtype, any band.

Query rows are taken a tile at a time, with the keys that the tile's band reaches, so that memory
grows with the window and never with the square of the sequence. Half-precision inputs are computed
in float32 and rounded once, at the end.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dtensor_ring_swa.band import Band
from dtensor_ring_swa.kernels.blocks import backward_by_block, forward_by_block
from dtensor_ring_swa.kernels.layers import backward_by_layer, forward_by_layer
from dtensor_ring_swa.kernels.request import Request

NAME = "reference"
_TILE = 128


def supports(request: Request) -> str | None:
    """None: this kernel serves every request."""
    return None


def partial_dtype(dtype: torch.dtype) -> torch.dtype:
    """Partial results stay in the dtype of the arithmetic, so that their sum is rounded once."""
    return torch.promote_types(dtype, torch.float32)


def _forward(
    request: Request,
    q_BMHD: torch.Tensor,
    k_BNGD: torch.Tensor,
    v_BNGE: torch.Tensor,
    band: Band,
    out_BMHE: torch.Tensor,
    lse_BHM: torch.Tensor,
) -> None:
    """Write out and lse of one block."""
    groups = k_BNGD.shape[2]
    for rows, keys, tile_band in _tiles(band, q_BMHD.shape[1], k_BNGD.shape[1]):
        scores, _ = _scores(request, _heads_first(q_BMHD[:, rows], groups), k_BNGD[:, keys], tile_band)
        lse = scores.logsumexp(dim=-1, keepdim=True)
        weights = (scores - _finite(lse)).exp()
        out = weights @ _keys_first(v_BNGE[:, keys], weights.dtype)
        out_BMHE[:, rows] = _rows_first(out)
        lse_BHM[:, :, rows] = lse.flatten(1, 2).squeeze(-1)


def _backward(
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
    """Write dq, dk and dv of one block (Dao 2023, arXiv:2307.08691, algorithm 2)."""
    groups = k_BNGD.shape[2]
    dk_BNGD.zero_()
    dv_BNGE.zero_()
    for rows, keys, tile_band in _tiles(band, q_BMHD.shape[1], k_BNGD.shape[1]):
        q = _heads_first(q_BMHD[:, rows], groups)
        dout = _heads_first(dout_BMHE[:, rows], groups)
        out = _heads_first(out_BMHE[:, rows], groups)
        lse = lse_BHM[:, :, rows].unflatten(1, (groups, -1)).unsqueeze(-1)
        scores, slope = _scores(request, q, k_BNGD[:, keys], tile_band)
        weights = (scores - _finite(lse)).exp()
        dv_BNGE[:, keys] += (weights.transpose(-1, -2) @ dout).sum(2).transpose(1, 2)
        dweights = dout @ _keys_first(v_BNGE[:, keys], q.dtype).transpose(-1, -2)
        dscores = weights * (dweights - (dout * out).sum(-1, keepdim=True)) * slope * request.scale
        dq_BMHD[:, rows] = _rows_first(dscores @ _keys_first(k_BNGD[:, keys], q.dtype))
        dk_BNGD[:, keys] += (dscores.transpose(-1, -2) @ q).sum(2).transpose(1, 2)


forward = forward_by_layer(forward_by_block(_forward), partial_dtype)
backward = backward_by_layer(backward_by_block(_backward), partial_dtype)


def _tiles(band: Band, q_len: int, k_len: int) -> Iterator[tuple[slice, slice, Band]]:
    """Row tiles, the keys that each reaches, and the band between the two."""
    for start in range(0, q_len, _TILE):
        stop = min(start + _TILE, q_len)
        k_start = min(max(0, start + band.lower), k_len)
        k_stop = max(k_start, min(k_len, stop + band.upper))
        shift = start - k_start
        yield slice(start, stop), slice(k_start, k_stop), Band(band.lower + shift, band.upper + shift)


def _scores(
    request: Request, q: torch.Tensor, k_BNGD: torch.Tensor, band: Band
) -> tuple[torch.Tensor, torch.Tensor | float]:
    """Masked scores ``[B, G, R, M, N]`` and the slope of the softcap at each."""
    scores = q @ _keys_first(k_BNGD, q.dtype).transpose(-1, -2) * request.scale
    slope: torch.Tensor | float = 1.0
    if request.softcap:
        squashed = torch.tanh(scores / request.softcap)
        scores, slope = request.softcap * squashed, 1 - squashed.square()
    rows = torch.arange(q.shape[-2], device=q.device)
    keys = torch.arange(k_BNGD.shape[1], device=q.device)
    distance = keys - rows[:, None]
    hidden = (distance < band.lower) | (distance > band.upper)
    return scores.masked_fill_(hidden, float("-inf")), slope


def _finite(lse: torch.Tensor) -> torch.Tensor:
    """The lse with 0 for rows that see no key, whose scores are all ``-inf`` already."""
    return lse.masked_fill(lse == float("-inf"), 0.0)


def _heads_first(x_BMHD: torch.Tensor, groups: int) -> torch.Tensor:
    """``[B, M, G * R, D]`` to ``[B, G, R, M, D]`` in the dtype of the arithmetic."""
    x = x_BMHD.unflatten(2, (groups, -1)).movedim(1, 3)
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _keys_first(x_BNGD: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``[B, N, G, D]`` to ``[B, G, 1, N, D]``."""
    return x_BNGD.transpose(1, 2).unsqueeze(2).to(dtype)


def _rows_first(x: torch.Tensor) -> torch.Tensor:
    """``[B, G, R, M, D]`` to ``[B, M, G * R, D]``."""
    return x.movedim(3, 1).flatten(2, 3)
