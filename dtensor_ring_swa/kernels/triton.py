"""A kernel in Triton: all blocks of a call in one pass a direction, on GPUs of compute capability 8.0 or newer.

Nothing is merged, added twice or left out: each program computes its rows with all the keys they see.
So it takes what others do not (float32, softcap, learned sinks), and its gradients are deterministic.
"""

from __future__ import annotations

import torch

from dtensor_ring_swa.block import Call
from dtensor_ring_swa.kernels.few_keys import FewKeys, bounds_of_queries
from dtensor_ring_swa.kernels.request import Request
from dtensor_ring_swa.kernels.split_keys import split_keys
from dtensor_ring_swa.kernels.triton_launch import start
from dtensor_ring_swa.kernels.triton_package import cannot_build, is_interpreted, missing, programs
from dtensor_ring_swa.kernels.triton_tiles import DKDV, DQ, DQ_FEW, FORWARD, SPLIT, options_for

NAME = "triton"
_MAX_HEAD_DIM = 256
_LOG2E = 1.4426950408889634


def supports(request: Request) -> str | None:
    """None, or what this kernel lacks for the request."""
    if request.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"it takes bfloat16, float16 and float32, not {request.dtype}"
    widths = request.head_dim, request.v_head_dim
    if min(widths) < 1 or max(widths) > _MAX_HEAD_DIM:
        return f"it takes head dims from 1 to {_MAX_HEAD_DIM}, got {widths[0]} and {widths[1]}"
    if reason := missing():
        return reason
    if is_interpreted():
        return None if request.dtype != torch.bfloat16 else "Triton's interpreter does not multiply bfloat16"
    if request.device.type != "cuda":
        return f"it needs a GPU, and the tensors are on {request.device.type!r}"
    # AMD's GPUs, which torch calls "cuda" too, have capabilities of another kind. It has not been run there.
    if torch.version.hip is None and torch.cuda.get_device_capability(request.device) < (8, 0):
        return "it needs compute capability 8.0 or newer"
    return cannot_build()


def partial_dtype(dtype: torch.dtype) -> torch.dtype:
    """It accumulates in float32 over all blocks and heads, and writes in the inputs' dtype."""
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
    batch, rows, _, _ = q_BMHD.shape
    tiles, _, options = options_for(FORWARD, request, q_BMHD, k_BNGD)
    bounds, few = bounds_of_queries(call, q_BMHD.device)
    with torch.cuda.device_of(q_BMHD):
        start(
            programs().forward, q_BMHD.device, (tiles, k_BNGD.shape[2], batch), options,
            _strided(q_BMHD), _strided(k_BNGD), _strided(v_BNGE), None if sinks_H is None else sinks_H.contiguous(),
            _strided(out_BMHE), _strided_lse(lse_BHM), bounds, rows, *_layers(bounds, few), *_scales(request),
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
    device, batch, groups = q_BMHD.device, q_BMHD.shape[0], k_BNGD.shape[2]
    # Padded, so that loads are wide.
    length = -(-q_BMHD.shape[1] * q_BMHD.shape[2] // groups // 16) * 16
    terms = lse_BHM.new_empty(batch, groups, 2, length), length
    dout, q, out = map(_strided, (dout_BMHE, q_BMHD, out_BMHE))

    def keys_pass(program: int, bounds: torch.Tensor, *tensors: torch.Tensor) -> None:
        _, tiles, options = options_for(program, request, q_BMHD, tensors[0])
        start(
            programs().backward_keys, device, (tiles, groups, batch), options,
            dout, q, *map(_strided, tensors), terms, bounds, tensors[0].shape[1], len(bounds), *_scales(request),
            request.scale,
        )  # fmt: skip

    keys, grads = (k_BNGD, v_BNGE), (dk_BNGD, dv_BNGE)
    bounds, few = bounds_of_queries(call, device)
    with torch.cuda.device_of(q_BMHD):
        tiles, _, options = options_for(DQ if few is None else DQ_FEW, request, q_BMHD, k_BNGD)
        shares = [] if few is None else few.new_shares(tiles, grads, lse_BHM.dtype)
        start(
            programs().backward_queries, device, (tiles, groups, batch), options,
            dout, q, *map(_strided, keys), out, _strided_lse(lse_BHM), _strided(dq_BMHD), terms, bounds,
            q_BMHD.shape[1], *_layers(bounds, few), *(_of_tiles(x) for x in shares or (None, None)), *_scales(request),
            request.scale,
        )  # fmt: skip
        bounds, split = split_keys(call if few is None else few.others, device)
        keys_pass(DKDV, bounds, *keys, *grads)
        if split is not None:
            parts = split.new_parts(grads, lse_BHM.dtype)
            keys_pass(SPLIT, split.bounds, *(x.index_select(1, split.copies) for x in keys), *parts)
            split.put(grads, parts)
        if few is not None:
            few.add(grads, shares, (request.scale, 1.0))
    if sinks_H is not None and dsinks_H is not None:
        rows, group = q_BMHD.shape[1], q_BMHD.shape[2] // groups
        of_rows = terms[0][..., : rows * group].unflatten(-1, (rows, group))
        _add_sinks_gradient(dsinks_H, sinks_H, *of_rows.unbind(2))


def _add_sinks_gradient(
    dsinks_H: torch.Tensor, sinks_H: torch.Tensor, lse_BGMR: torch.Tensor, delta_BGMR: torch.Tensor
) -> None:
    """Add ``-sum exp(sink - lse) * rowsum(dout * out)``, as ``merge.add_sinks_gradient_``; lse is in units of log 2."""
    sinks = (sinks_H.to(lse_BGMR.dtype) * _LOG2E).view(lse_BGMR.shape[1], 1, -1)
    share = torch.exp2(sinks - lse_BGMR).masked_fill(sinks == float("-inf"), 0.0)
    dsinks_H -= (share * delta_BGMR).sum((0, 2)).flatten()


def _strided(x: torch.Tensor) -> tuple[torch.Tensor | int, ...]:
    """A tensor as the programs take it."""
    return x, *x.stride()


def _strided_lse(lse_BHM: torch.Tensor) -> tuple[torch.Tensor | int, ...]:
    """The lse with its strides in the order of the others."""
    batch, head, row = lse_BHM.stride()
    return lse_BHM, batch, row, head


def _layers(bounds: torch.Tensor, few: FewKeys | None) -> tuple[int, tuple[int, int] | None]:
    """How many layers of intervals the programs walk, and the end and the number of few keys, if there are any."""
    return (len(bounds), None) if few is None else (len(bounds) - 1, (few.keys.stop, few.width))


def _of_tiles(share_BGTnD: torch.Tensor | None) -> tuple[torch.Tensor | int, ...] | None:
    """What the tiles of rows write of few keys, as a tensor whose rows are the tiles and whose heads are the keys."""
    return None if share_BGTnD is None else _strided(share_BGTnD.flatten(0, 2)[None])


def _scales(request: Request) -> tuple[float, float]:
    """Factor on the products, and the softcap, so that scores are in units of log 2."""
    if request.softcap:
        return request.scale / request.softcap, request.softcap * _LOG2E
    return request.scale * _LOG2E, 0.0
