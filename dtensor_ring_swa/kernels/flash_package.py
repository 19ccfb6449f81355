"""The package flash-attn-4: whether it can be used here, and what of it.

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

_WANTED = "4.0.0b36"
_SHARED = {
    "softmax_scale", "softcap", "window_size_left", "window_size_right", "learnable_sink", "cu_seqlens_q",
    "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k",
}  # fmt: skip
_FORWARD = _SHARED | {"q", "k", "v", "out", "lse", "return_lse", "tile_mn"}
_BACKWARD = _SHARED | {"q", "k", "v", "out", "dout", "lse", "dq", "dk", "dv", "deterministic"}


@lru_cache(maxsize=1)
def interface() -> ModuleType:
    """The module with its functions."""
    return importlib.import_module("flash_attn.cute.interface")


@lru_cache(maxsize=1)
def missing() -> str | None:
    """Why the package cannot be used, with the version found and the one wanted."""
    try:
        version = metadata.version("flash-attn-4")
        found_in = interface()
    except (ImportError, metadata.PackageNotFoundError) as error:
        return f"it needs flash-attn-4 {_WANTED} or newer (pip install 'dtensor-ring-swa[flash]'): {error}"
    except Exception as error:  # of any kind: it may not suit the driver, or the packages that it stands on
        return f"flash-attn-4 {metadata.version('flash-attn-4')} was found, and cannot be imported here: {error!r}"
    for name, wanted in (("_flash_attn_fwd", _FORWARD), ("_flash_attn_bwd", _BACKWARD)):
        function = getattr(found_in, name, None)
        found = set() if function is None else set(inspect.signature(function).parameters)
        if not wanted <= found:
            return f"flash-attn-4 {version} was found, whose {name} lacks {sorted(wanted - found)}; it wants {_WANTED}"
    return None


@lru_cache(maxsize=64)
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a GPU, asked once."""
    return torch.cuda.get_device_capability(device)
