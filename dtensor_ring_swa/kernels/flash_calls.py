"""Calls of flash-attn-4's functions, in widths of heads that they compute right, and with the fastest tile seen."""

from __future__ import annotations

from typing import Any

import torch

from dtensor_ring_swa.kernels.flash_band import FlashWindow, padded
from dtensor_ring_swa.kernels.flash_groups import Group, boundaries_on
from dtensor_ring_swa.kernels.flash_launch import start_forward
from dtensor_ring_swa.kernels.flash_package import capability, interface
from dtensor_ring_swa.kernels.request import Request

_WIDTHS = 32


def window_forward(
    request: Request,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    window: FlashWindow,
    out: torch.Tensor,
    lse: torch.Tensor,
    sinks: torch.Tensor | None = None,
    packed: Group | None = None,
) -> None:
    """Write out and lse of trimmed blocks, in place unless the head dim has to be padded."""
    width, v_width = computed_width(request.head_dim), computed_width(request.v_head_dim)
    target = out if v_width == request.v_head_dim else out.new_empty(*out.shape[:-1], v_width)
    start_forward(
        interface(), padded(q, width), padded(k, width), padded(v, v_width), target, lse, sinks, request.scale,
        request.softcap, window, _tile(request, window), **_varlen(packed, q.device),
    )  # fmt: skip
    if target is not out:
        out.copy_(target[..., : request.v_head_dim])


def window_backward(
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
    sinks: torch.Tensor | None = None,
    dsinks: torch.Tensor | None = None,
    packed: Group | None = None,
) -> None:
    """Write dq, dk and dv of trimmed blocks, in place unless a head dim has to be padded; add to dsinks."""
    # Its backward takes one head dim where heads are shared.
    width = max(computed_width(request.head_dim), computed_width(request.v_head_dim))
    targets = tuple(x if x.shape[-1] == width else x.new_empty(*x.shape[:-1], width) for x in (dq, dk, dv))
    _, _, _, *shares = interface()._flash_attn_bwd(
        padded(q, width), padded(k, width), padded(v, width), padded(out, width), padded(dout, width),
        lse, softmax_scale=request.scale, softcap=request.softcap, window_size_left=window[0],
        window_size_right=window[1], dq=targets[0], dk=targets[1], dv=targets[2], learnable_sink=sinks,
        deterministic=request.deterministic, **_varlen(packed, q.device),
    )  # fmt: skip
    for grad, target in zip((dq, dk, dv), targets, strict=True):
        if target is not grad:
            grad.copy_(target[..., : grad.shape[-1]])
    for share in shares if dsinks is not None else ():
        dsinks += share


def _varlen(packed: Group | None, device: torch.device) -> dict[str, Any]:
    if packed is None:
        return {}
    cu_seqlens_q, cu_seqlens_k = boundaries_on(packed, device)
    return {
        "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k,
        "max_seqlen_q": max(packed.q_lens), "max_seqlen_k": max(packed.k_lens),
    }  # fmt: skip


def _tile(request: Request, window: FlashWindow) -> tuple[int, int] | None:
    """Tile of forward, in rows and keys; None is the package's own choice.

    Measured on H200 at 64/8 heads of 64, in ms against its own: windows of 128 tokens 0.487 against
    0.555, of 256 0.638 against 0.698, of 512 the same.
    """
    left, right = window
    narrow = left is not None and right is not None and left + right < 384
    return (192, 64) if narrow and max(request.head_dim, request.v_head_dim) <= 64 and _is_hopper(request) else None


def _is_hopper(request: Request) -> bool:
    return capability(request.device)[0] == 9


def computed_width(head_dim: int) -> int:
    """The head dim to compute with: a multiple of 32.

    At odd multiples of 16 (16, 48, 80, 112, and 8 and 72, which round to such) the backward of
    4.0.0b36 gives a wrong dq, and with shared heads a wrong dk and dv. Seen on H200.
    """
    return -(-head_dim // _WIDTHS) * _WIDTHS
