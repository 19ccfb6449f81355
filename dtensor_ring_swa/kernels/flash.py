"""FlashAttention-4: the package flash-attn-4 (``flash_attn.cute``), on Hopper and Blackwell GPUs."""

from __future__ import annotations

import torch

from dtensor_ring_swa.block import Call
from dtensor_ring_swa.cut import cut
from dtensor_ring_swa.kernels.blocks import backward_by_block, forward_by_block
from dtensor_ring_swa.kernels.flash_band import backward_on_bands, forward_on_bands
from dtensor_ring_swa.kernels.flash_calls import computed_width, window_backward, window_forward
from dtensor_ring_swa.kernels.flash_groups import flash_groups
from dtensor_ring_swa.kernels.flash_package import capability, missing
from dtensor_ring_swa.kernels.layers import backward_by_layer, forward_by_layer
from dtensor_ring_swa.kernels.request import Request

NAME = "flash"


def supports(request: Request) -> str | None:
    """None, or what this kernel lacks for the request."""
    if request.device.type != "cuda" or torch.version.hip is not None:
        return f"it needs an NVIDIA GPU, and the tensors are on {request.device.type!r}"
    major, minor = capability(request.device)
    if major not in (9, 10, 11):
        return f"it needs compute capability 9.x, 10.x or 11.x, and this GPU has {major}.{minor}"
    if request.dtype not in (torch.bfloat16, torch.float16):
        return f"it takes bfloat16 and float16, not {request.dtype}"
    widths = computed_width(request.head_dim), computed_width(request.v_head_dim)
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
            window_forward(request, q, k, v, group.window, out, lse, sinks)
            continue
        for b in range(q.shape[0]):
            window_forward(request, q[b], k[b], v[b], group.window, out[b], lse[b], sinks, group)


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
            window_backward(request, dout, q, k, v, out, lse, group.window, dq, dk, dv, sinks, dsinks_H)
            continue
        for b in range(q.shape[0]):
            window_backward(
                request, dout[b], q[b], k[b], v[b], out[b], lse[b], group.window, dq[b], dk[b], dv[b], sinks,
                dsinks_H, group,
            )  # fmt: skip


_forward_by_block = forward_by_block(forward_on_bands(window_forward))
_backward_by_block = backward_by_block(backward_on_bands(window_backward))
forward = forward_by_layer(_forward_layer, partial_dtype)
backward = backward_by_layer(_backward_layer, partial_dtype)
