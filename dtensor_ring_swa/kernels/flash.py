"""FlashAttention-4: the package flash-attn-4 (``flash_attn.cute``), on Hopper and Blackwell GPUs."""

from __future__ import annotations

from typing import Any

import torch

from dtensor_ring_swa.block import Call
from dtensor_ring_swa.cut import cut
from dtensor_ring_swa.kernels.blocks import backward_by_block, forward_by_block
from dtensor_ring_swa.kernels.flash_band import FlashWindow, backward_on_bands, forward_on_bands, padded
from dtensor_ring_swa.kernels.flash_groups import Group, boundaries_on, flash_groups
from dtensor_ring_swa.kernels.flash_launch import start_forward
from dtensor_ring_swa.kernels.flash_package import capability, interface, missing
from dtensor_ring_swa.kernels.layers import backward_by_layer, forward_by_layer
from dtensor_ring_swa.kernels.request import Request

NAME = "flash"
_WIDTHS = 32


def supports(request: Request) -> str | None:
    """None, or what this kernel lacks for the request."""
    if request.device.type != "cuda" or torch.version.hip is not None:
        return f"it needs an NVIDIA GPU, and the tensors are on {request.device.type!r}"
    major, minor = capability(request.device)
    if major not in (9, 10, 11):
        return f"it needs compute capability 9.x, 10.x or 11.x, and this GPU has {major}.{minor}"
    if request.dtype not in (torch.bfloat16, torch.float16):
        return f"it takes bfloat16 and float16, not {request.dtype}"
    widths = _width(request.head_dim), _width(request.v_head_dim)
    if max(widths) > 256 or (major > 9 and max(widths) > 128 and widths not in ((256, 256), (192, 128))):
        return f"it does not take head dims {request.head_dim} and {request.v_head_dim} on this GPU"
    if request.deterministic and major != 9:
        return "its deterministic backward has been verified on compute capability 9.x only"
    return missing()


def partial_dtype(dtype: torch.dtype) -> torch.dtype:
    """It accumulates in float32 and writes in the inputs' dtype."""
    return dtype


def _forward_layer(
    request: Request,
    q_BMHD: torch.Tensor,
    k_BNGD: torch.Tensor,
    v_BNGE: torch.Tensor,
    call: Call,
    out_BMHE: torch.Tensor,
    lse_BHM: torch.Tensor,
    sinks_H: torch.Tensor | None = None,
) -> None:
    """Write out and lse of a layer. Documents are one call of the package, sinks part of it."""
    groups = flash_groups(call)
    if groups is None:
        _forward_by_block(request, q_BMHD, k_BNGD, v_BNGE, call, out_BMHE, lse_BHM, sinks_H)
        return
    sinks = None if sinks_H is None else sinks_H.float()
    for group in groups:
        q, out, lse = cut(q_BMHD, group.rows), cut(out_BMHE, group.rows), cut(lse_BHM, group.rows, 2)
        k, v = cut(k_BNGD, group.keys), cut(v_BNGE, group.keys)
        if not group.is_packed:
            _forward(request, q, k, v, group.window, out, lse, sinks)
            continue
        for b in range(q.shape[0]):
            _forward(request, q[b], k[b], v[b], group.window, out[b], lse[b], sinks, group)


def _backward_layer(
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
    """Write dq, dk and dv of a layer."""
    groups = flash_groups(call)
    grads = (dq_BMHD, dk_BNGD, dv_BNGE)
    if groups is None:
        _backward_by_block(
            request, dout_BMHE, q_BMHD, k_BNGD, v_BNGE, out_BMHE, lse_BHM, call, *grads, sinks_H, dsinks_H
        )
        return
    if not call.covers_keys:
        dk_BNGD.zero_()
        dv_BNGE.zero_()
    sinks = None if sinks_H is None else sinks_H.float()
    for group in groups:
        dout, q, out, dq = (cut(x, group.rows) for x in (dout_BMHE, q_BMHD, out_BMHE, dq_BMHD))
        k, v, dk, dv = (cut(x, group.keys) for x in (k_BNGD, v_BNGE, dk_BNGD, dv_BNGE))
        lse = cut(lse_BHM, group.rows, 2)
        if not group.is_packed:
            _backward(request, dout, q, k, v, out, lse, group.window, dq, dk, dv, sinks, dsinks_H)
            continue
        for b in range(q.shape[0]):
            _backward(
                request, dout[b], q[b], k[b], v[b], out[b], lse[b], group.window, dq[b], dk[b], dv[b], sinks,
                dsinks_H, group,
            )  # fmt: skip


def _forward(
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
    width, v_width = _width(request.head_dim), _width(request.v_head_dim)
    target = out if v_width == request.v_head_dim else out.new_empty(*out.shape[:-1], v_width)
    start_forward(
        interface(), padded(q, width), padded(k, width), padded(v, v_width), target, lse, sinks, request.scale,
        request.softcap, window, _tile(request, window), **_varlen(packed, q.device),
    )  # fmt: skip
    if target is not out:
        out.copy_(target[..., : request.v_head_dim])


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
    sinks: torch.Tensor | None = None,
    dsinks: torch.Tensor | None = None,
    packed: Group | None = None,
) -> None:
    """Write dq, dk and dv of trimmed blocks, in place unless a head dim has to be padded; add to dsinks."""
    # Its backward takes one head dim where heads are shared.
    width = max(_width(request.head_dim), _width(request.v_head_dim))
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


_forward_by_block = forward_by_block(forward_on_bands(_forward))
_backward_by_block = backward_by_block(backward_on_bands(_backward))
forward = forward_by_layer(_forward_layer, partial_dtype)
backward = backward_by_layer(_backward_layer, partial_dtype)


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


def _width(head_dim: int) -> int:
    """The head dim to compute with: a multiple of 32.

    At odd multiples of 16 (16, 48, 80, 112, and 8 and 72, which round to such) the backward of
    4.0.0b36 gives a wrong dq, and with shared heads a wrong dk and dv. Seen on H200.
    """
    return -(-head_dim // _WIDTHS) * _WIDTHS
