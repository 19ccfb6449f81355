"""PyTorch's own FlashAttention-2: ``aten::_flash_attention_forward`` and ``_backward``, on CUDA.

Both are private operators of torch, seen with this signature on 2.11 to 2.13; there is no public
call that takes a window and returns the lse.
"""

from __future__ import annotations

import torch

from dtensor_ring_swa.kernels.blocks import backward_by_block, forward_by_block
from dtensor_ring_swa.kernels.flash_band import (
    FlashWindow,
    backward_on_bands,
    forward_on_bands,
    padded,
)
from dtensor_ring_swa.kernels.layers import backward_by_layer, forward_by_layer
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


def partial_dtype(dtype: torch.dtype) -> torch.dtype:
    """It accumulates in float32 and writes in the inputs' dtype."""
    return dtype


def _forward(
    request: Request,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    window: FlashWindow,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Write out and lse of a trimmed block."""
    width = _width(request)
    computed, computed_lse, *_ = torch.ops.aten._flash_attention_forward(
        padded(q, width), padded(k, width), padded(v, width), None, None, q.shape[1], k.shape[1],
        0.0, False, False, scale=request.scale, window_size_left=window[0], window_size_right=window[1],
    )  # fmt: skip
    out.copy_(computed[..., : request.v_head_dim])
    lse.copy_(computed_lse)


def _backward(
    request: Request,
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    window: FlashWindow,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
) -> None:
    """Write dq, dk and dv of a trimmed block."""
    width = _width(request)
    # Without dropout the random state is not read.
    state = torch.empty(2, dtype=torch.uint64, device=q.device)
    unused = torch.empty(0, dtype=torch.uint64, device=q.device)
    grads = torch.ops.aten._flash_attention_backward(
        padded(dout, width), padded(q, width), padded(k, width), padded(v, width), padded(out, width),
        lse.contiguous(), None, None, q.shape[1], k.shape[1], 0.0, False, state, unused,
        scale=request.scale, window_size_left=window[0], window_size_right=window[1],
    )  # fmt: skip
    for target, grad in zip((dq, dk, dv), grads, strict=True):
        target.copy_(grad[..., : target.shape[-1]])


forward = forward_by_layer(forward_by_block(forward_on_bands(_forward)), partial_dtype)
backward = backward_by_layer(backward_by_block(backward_on_bands(_backward)), partial_dtype)


def _width(request: Request) -> int:
    """It takes one head dim for q, k and v, a multiple of 8: its loads are 16 bytes wide."""
    return -(-max(request.head_dim, request.v_head_dim) // 8) * 8
