"""PyTorch's own FlashAttention-2: ``aten::_flash_attention_forward`` and ``_backward``, on CUDA.

Both are private operators of torch, seen with this signature on 2.11 to 2.13; there is no public
call that takes a window and returns the lse.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from dtensor_ring_swa.band import Band
from dtensor_ring_swa.kernels.request import Request

NAME = "aten"
_MAX_HEAD_DIM = 256


def supports(request: Request) -> str | None:
    """None, or what this kernel lacks for the request."""
    if request.device.type != "cuda" or torch.version.hip is not None:
        return f"it needs an NVIDIA GPU, and the tensors are on {request.device.type!r}"
    if torch.cuda.get_device_capability(request.device) < (8, 0):
        return "it needs compute capability 8.0 or newer"
    if request.dtype not in (torch.bfloat16, torch.float16):
        return f"it takes bfloat16 and float16, not {request.dtype}"
    if max(request.head_dim, request.v_head_dim) > _MAX_HEAD_DIM:
        return f"it takes head dims up to {_MAX_HEAD_DIM}, got {max(request.head_dim, request.v_head_dim)}"
    if request.softcap:
        return "it has no softcap"
    if request.deterministic:
        return "its backward adds with atomics, which is not deterministic"
    return None


def grad_dtype(dtype: torch.dtype) -> torch.dtype:
    """It accumulates in float32 and writes dk and dv in the inputs' dtype."""
    return dtype


def forward(
    request: Request,
    q_BMHD: torch.Tensor,
    k_BNGD: torch.Tensor,
    v_BNGE: torch.Tensor,
    band: Band,
    out_BMHE: torch.Tensor,
    lse_BHM: torch.Tensor,
) -> None:
    """Write out and lse; see ``Kernel.forward``."""
    rows, keys, trimmed = band.trim(q_BMHD.shape[1], k_BNGD.shape[1])
    if len(rows) < q_BMHD.shape[1]:
        out_BMHE.zero_()
        lse_BHM.fill_(float("-inf"))
    if not rows or not q_BMHD.numel():
        return
    width = _padded_width(request)
    q, k, v = (_pad(x, width) for x in (_cut(q_BMHD, rows), _cut(k_BNGD, keys), _cut(v_BNGE, keys)))
    left, right = _window(trimmed, len(rows), len(keys))
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, None, None, len(rows), len(keys), 0.0, False, False,
        scale=request.scale, window_size_left=left, window_size_right=right,
    )  # fmt: skip
    _cut(out_BMHE, rows).copy_(out[..., : request.v_head_dim])
    lse_BHM[:, :, rows.start : rows.stop] = lse


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
    """Write dq and the shares of dk and dv; see ``Kernel.backward``."""
    rows, keys, trimmed = band.trim(q_BMHD.shape[1], k_BNGD.shape[1])
    if len(rows) < q_BMHD.shape[1]:
        dq_BMHD.zero_()
    if len(keys) < k_BNGD.shape[1]:
        dk_BNGD.zero_()
        dv_BNGE.zero_()
    if not rows or not q_BMHD.numel():
        return
    width = _padded_width(request)
    dout, q, out = (_pad(_cut(x, rows), width) for x in (dout_BMHE, q_BMHD, out_BMHE))
    k, v = _pad(_cut(k_BNGD, keys), width), _pad(_cut(v_BNGE, keys), width)
    left, right = _window(trimmed, len(rows), len(keys))
    lse = lse_BHM[:, :, rows.start : rows.stop].contiguous()
    # Without dropout the random state is not read.
    state = torch.empty(2, dtype=torch.uint64, device=q.device)
    unused = torch.empty(0, dtype=torch.uint64, device=q.device)
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        dout, q, k, v, out, lse, None, None, len(rows), len(keys), 0.0, False, state, unused,
        scale=request.scale, window_size_left=left, window_size_right=right,
    )  # fmt: skip
    _cut(dq_BMHD, rows).copy_(dq[..., : request.head_dim])
    _cut(dk_BNGD, keys).copy_(dk[..., : request.head_dim])
    _cut(dv_BNGE, keys).copy_(dv[..., : request.v_head_dim])


def _window(band: Band, q_len: int, k_len: int) -> tuple[int, int]:
    """The window to pass, or -1 for a side that hides nothing.

    FlashAttention-2 drops a window as wide as the keys and completes a lone -1 to the number of keys:
    both right only because a side that wide hides nothing.
    """
    left, right = band.flash_window(q_len, k_len)
    return (left if left < k_len else -1), (right if right < k_len else -1)


def _padded_width(request: Request) -> int:
    """The one head dim for q, k and v: a multiple of 8. Zero columns change no score and no sum."""
    return -(-max(request.head_dim, request.v_head_dim) // 8) * 8


def _pad(x: torch.Tensor, width: int) -> torch.Tensor:
    """The same rows ``width`` wide, with the last dim contiguous as the kernel demands."""
    if x.shape[-1] != width:
        return F.pad(x, (0, width - x.shape[-1]))
    return x if x.stride(-1) == 1 else x.contiguous()


def _cut(x: torch.Tensor, rows: range) -> torch.Tensor:
    return x[:, rows.start : rows.stop]
