"""FlashAttention-4: the package flash-attn-4 (``flash_attn.cute``), on Hopper and Blackwell GPUs.

Its functions ``_flash_attn_fwd`` and ``_flash_attn_bwd`` are private; the public ones cannot write
into tensors that they are given. Seen on 4.0.0b36. Other versions are used if their functions have
the parameters that are passed here, and refused by name otherwise.
"""

from __future__ import annotations

import importlib
import inspect
from functools import lru_cache
from importlib import metadata
from types import ModuleType

import torch

from dtensor_ring_swa.kernels.flash_band import (
    FlashWindow,
    backward_on_bands,
    forward_on_bands,
    multiple_of_8,
    padded,
)
from dtensor_ring_swa.kernels.request import Request

NAME = "flash"
_WANTED = "4.0.0b36"
_SHARED = {"softmax_scale", "softcap", "window_size_left", "window_size_right"}
_FORWARD = _SHARED | {"q", "k", "v", "out", "lse", "return_lse", "tile_mn"}
_BACKWARD = _SHARED | {"q", "k", "v", "out", "dout", "lse", "deterministic", "dq", "dk", "dv"}


def supports(request: Request) -> str | None:
    """None, or what this kernel lacks for the request."""
    if request.device.type != "cuda" or torch.version.hip is not None:
        return f"it needs an NVIDIA GPU, and the tensors are on {request.device.type!r}"
    major, minor = torch.cuda.get_device_capability(request.device)
    if major not in (9, 10, 11):
        return f"it needs compute capability 9.x, 10.x or 11.x, and this GPU has {major}.{minor}"
    if request.dtype not in (torch.bfloat16, torch.float16):
        return f"it takes bfloat16 and float16, not {request.dtype}"
    widths = multiple_of_8(request.head_dim), multiple_of_8(request.v_head_dim)
    if max(widths) > 256 or (major > 9 and max(widths) > 128 and widths not in ((256, 256), (192, 128))):
        return f"it does not take head dims {request.head_dim} and {request.v_head_dim} on this GPU"
    return _missing()


def grad_dtype(dtype: torch.dtype) -> torch.dtype:
    """It accumulates in float32 and writes dk and dv in the inputs' dtype."""
    return dtype


@forward_on_bands
def forward(
    request: Request,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    window: FlashWindow,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Write out and lse of a trimmed block, in place unless the head dim has to be padded."""
    width, v_width = multiple_of_8(request.head_dim), multiple_of_8(request.v_head_dim)
    in_place = v_width == request.v_head_dim
    target = out if in_place else out.new_empty(*out.shape[:3], v_width)
    _interface()._flash_attn_fwd(
        padded(q, width), padded(k, width), padded(v, v_width), softmax_scale=request.scale,
        softcap=request.softcap, window_size_left=window[0], window_size_right=window[1],
        return_lse=True, out=target, lse=lse,
    )  # fmt: skip
    if not in_place:
        out.copy_(target[..., : request.v_head_dim])


@backward_on_bands
def backward(
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
    """Write dq, dk and dv of a trimmed block, in place unless a head dim has to be padded."""
    width, v_width = multiple_of_8(request.head_dim), multiple_of_8(request.v_head_dim)
    in_place = (width, v_width) == (request.head_dim, request.v_head_dim)
    targets = (dq, dk, dv)
    if not in_place:
        targets = tuple(x.new_empty(*x.shape[:3], w) for x, w in zip(targets, (width, width, v_width), strict=True))
    _interface()._flash_attn_bwd(
        padded(q, width), padded(k, width), padded(v, v_width), padded(out, v_width), padded(dout, v_width),
        lse, softmax_scale=request.scale, softcap=request.softcap, window_size_left=window[0],
        window_size_right=window[1], deterministic=request.deterministic, dq=targets[0], dk=targets[1],
        dv=targets[2],
    )  # fmt: skip
    if not in_place:
        for grad, target in zip((dq, dk, dv), targets, strict=True):
            grad.copy_(target[..., : grad.shape[-1]])


@lru_cache(maxsize=1)
def _interface() -> ModuleType:
    return importlib.import_module("flash_attn.cute.interface")


@lru_cache(maxsize=1)
def _missing() -> str | None:
    """Why the package cannot be used, with the version found and the one wanted."""
    try:
        version = metadata.version("flash-attn-4")
        interface = _interface()
    except (ImportError, metadata.PackageNotFoundError) as error:
        return f"it needs flash-attn-4 {_WANTED} or newer (pip install 'dtensor-ring-swa[flash]'): {error}"
    for name, wanted in (("_flash_attn_fwd", _FORWARD), ("_flash_attn_bwd", _BACKWARD)):
        function = getattr(interface, name, None)
        found = set() if function is None else set(inspect.signature(function).parameters)
        if not wanted <= found:
            return f"flash-attn-4 {version} was found, whose {name} lacks {sorted(wanted - found)}; it wants {_WANTED}"
    return None
