"""A kernel in Triton: all blocks of a call in one pass a direction, on GPUs of compute capability 8.0 or newer.

Nothing is merged, added twice or left out: each program computes its rows with all the keys they see.
So it takes what others do not (float32, softcap, learned sinks), and its gradients are deterministic.
"""

from __future__ import annotations

import importlib
from functools import lru_cache
from types import ModuleType
from typing import Any, NamedTuple

import torch

from dtensor_ring_swa.block import Call
from dtensor_ring_swa.kernels.intervals import intervals_of_keys, intervals_of_queries
from dtensor_ring_swa.kernels.request import Request

NAME = "triton"
_MAX_HEAD_DIM = 256
_LOG2E = 1.4426950408889634


class Tile(NamedTuple):
    """Packed query rows and keys that a program takes at a time, its warps, and the depth of its pipeline."""

    rows: int
    keys: int
    warps: int
    stages: int


# By the widest head dim, padded to a power of two, for 2 bytes an element: forward, dq, dk and dv.
_TILES = {
    64: (Tile(128, 64, 4, 3), Tile(128, 64, 4, 3), Tile(64, 64, 4, 3)),
    128: (Tile(128, 64, 8, 3), Tile(128, 64, 8, 2), Tile(64, 64, 4, 2)),
    256: (Tile(128, 64, 8, 2), Tile(64, 64, 8, 1), Tile(64, 64, 8, 1)),
}
# For 4 bytes an element, which the tensor cores do not take.
_WIDE_TILES = {
    64: (Tile(32, 32, 4, 2),) * 3,
    128: (Tile(32, 32, 4, 1),) * 3,
    256: (Tile(16, 32, 4, 1),) * 3,
}


def supports(request: Request) -> str | None:
    """None, or what this kernel lacks for the request."""
    if request.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"it takes bfloat16, float16 and float32, not {request.dtype}"
    widths = request.head_dim, request.v_head_dim
    if min(widths) < 1 or max(widths) > _MAX_HEAD_DIM:
        return f"it takes head dims from 1 to {_MAX_HEAD_DIM}, got {widths[0]} and {widths[1]}"
    try:
        interpreted = _is_interpreted()
    except ImportError as error:
        return f"it needs triton (pip install 'dtensor-ring-swa[triton]'): {error}"
    if interpreted:
        return None if request.dtype != torch.bfloat16 else "Triton's interpreter does not multiply bfloat16"
    if request.device.type != "cuda" or torch.version.hip is not None:
        return f"it needs an NVIDIA GPU, and the tensors are on {request.device.type!r}"
    if torch.cuda.get_device_capability(request.device) < (8, 0):
        return "it needs compute capability 8.0 or newer"
    return None


def grad_dtype(dtype: torch.dtype) -> torch.dtype:
    """It accumulates in float32 over all blocks and heads, and writes dk and dv in the inputs' dtype."""
    return dtype


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
    if not out_BMHE.numel():
        return
    bounds = intervals_of_queries(call, q_BMHD.device)
    tile, options = _options(request, 0, q_BMHD.shape[2] // k_BNGD.shape[2])
    sinks = None if sinks_H is None else sinks_H.contiguous()
    with torch.cuda.device_of(q_BMHD):
        _programs().forward[_grid(q_BMHD, k_BNGD, tile)](
            q_BMHD, k_BNGD, v_BNGE, sinks, out_BMHE, lse_BHM, bounds, q_BMHD.stride(), k_BNGD.stride(),
            v_BNGE.stride(), out_BMHE.stride(), lse_BHM.stride(), q_BMHD.shape[1], len(bounds), *_scales(request),
            **options,
        )  # fmt: skip


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
    """Write dq, dk and dv; see ``Kernel.backward``. dq's pass makes what that of dk and dv needs of each row."""
    if not q_BMHD.numel() or not k_BNGD.numel():
        for grad in (dq_BMHD, dk_BNGD, dv_BNGE):
            grad.zero_()
        return
    bounds, key_bounds = intervals_of_queries(call, q_BMHD.device), intervals_of_keys(call, q_BMHD.device)
    batch, rows, heads, _ = q_BMHD.shape
    group = heads // k_BNGD.shape[2]
    # lse and rowsum(dout * out) of each packed row; padded, so that loads are wide.
    terms_len = -(-rows * group // 16) * 16
    row_terms = lse_BHM.new_empty(2 * batch * k_BNGD.shape[2] * terms_len)
    strides = dout_BMHE.stride(), q_BMHD.stride(), k_BNGD.stride(), v_BNGE.stride()
    with torch.cuda.device_of(q_BMHD):
        tile, options = _options(request, 1, group)
        _programs().backward_queries[_grid(q_BMHD, k_BNGD, tile)](
            dout_BMHE, q_BMHD, k_BNGD, v_BNGE, out_BMHE, lse_BHM, dq_BMHD, row_terms, bounds, *strides,
            out_BMHE.stride(), lse_BHM.stride(), dq_BMHD.stride(), rows, len(bounds), terms_len,
            *_scales(request), request.scale, **options,
        )  # fmt: skip
        tile, options = _options(request, 2, group)
        _programs().backward_keys[(-(-k_BNGD.shape[1] // tile.keys), k_BNGD.shape[2], batch)](
            dout_BMHE, q_BMHD, k_BNGD, v_BNGE, dk_BNGD, dv_BNGE, row_terms, key_bounds, *strides, dk_BNGD.stride(),
            dv_BNGE.stride(), rows, k_BNGD.shape[1], len(key_bounds), terms_len, *_scales(request), request.scale,
            **options,
        )  # fmt: skip
    if sinks_H is not None and dsinks_H is not None:
        terms = row_terms.view(batch, -1, 2, terms_len)[..., : rows * group].unflatten(-1, (rows, group))
        _add_sinks_gradient(dsinks_H, sinks_H, *terms.unbind(2))


def _add_sinks_gradient(
    dsinks_H: torch.Tensor, sinks_H: torch.Tensor, lse_BGMR: torch.Tensor, delta_BGMR: torch.Tensor
) -> None:
    """Add ``-sum exp(sink - lse) * rowsum(dout * out)`` (see ``merge.sinks_gradient``); lse is in units of log 2."""
    sinks = (sinks_H.to(lse_BGMR.dtype) * _LOG2E).view(lse_BGMR.shape[1], 1, -1)
    share = torch.exp2(sinks - lse_BGMR).masked_fill(sinks == float("-inf"), 0.0)
    dsinks_H -= (share * delta_BGMR).sum((0, 2)).flatten()


def _grid(q_BMHD: torch.Tensor, k_BNGD: torch.Tensor, tile: Tile) -> tuple[int, int, int]:
    """Tiles of packed rows, groups of heads, and the batch."""
    batch, rows, heads, _ = q_BMHD.shape
    groups = k_BNGD.shape[2]
    return -(-rows * (heads // groups) // tile.rows), groups, batch


def _scales(request: Request) -> tuple[float, float]:
    """Factor on the products, and the softcap, so that scores are in units of log 2."""
    if request.softcap:
        return request.scale / request.softcap, request.softcap * _LOG2E
    return request.scale * _LOG2E, 0.0


def _options(request: Request, direction: int, group: int) -> tuple[Tile, dict[str, Any]]:
    """The tile of one of the passes, and its compile-time options."""
    block_d, block_e = (max(16, 1 << (width - 1).bit_length()) for width in (request.head_dim, request.v_head_dim))
    tiles = _WIDE_TILES if request.dtype == torch.float32 else _TILES
    tile = tiles[max(64, block_d, block_e)][direction]
    return tile, {
        "D": request.head_dim, "E": request.v_head_dim, "G": group, "BLOCK_M": tile.rows, "BLOCK_N": tile.keys,
        "BLOCK_D": block_d, "BLOCK_E": block_e, "CAPPED": bool(request.softcap),
        "num_warps": tile.warps, "num_stages": tile.stages,
    }  # fmt: skip


@lru_cache(maxsize=1)
def _programs() -> ModuleType:
    return importlib.import_module("dtensor_ring_swa.kernels.triton_kernels")


@lru_cache(maxsize=1)
def _is_interpreted() -> bool:
    """Whether Triton runs the programs in Python, on any device: it chose when they were defined."""
    jit_function = importlib.import_module("triton.runtime").JITFunction
    return not isinstance(_programs().forward, jit_function)
