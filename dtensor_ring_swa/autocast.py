"""torch.autocast: the inputs of attention are cast, the arithmetic inside is left alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_R = TypeVar("_R")

# Asked once: Dynamo of torch 2.11 cannot trace the question.
_KINDS = tuple(kind for kind in ("cpu", "cuda", "hpu", "mps", "mtia", "xpu") if torch.amp.is_autocast_available(kind))


def cast_inputs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tensors of one device in autocast's dtype, as ``scaled_dot_product_attention`` takes them.

    Outside of autocast they stay, and so do float64 and what is not a float tensor, for the checks to refuse.
    """
    # One dtype for all: a device that has no autocast, which the checks will refuse, has none to ask for.
    dtype = autocast_dtype(q.device) if isinstance(q, torch.Tensor) else None
    if dtype is None:
        return q, k, v
    return _cast(q, dtype), _cast(k, dtype), _cast(v, dtype)


def _cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if not isinstance(x, torch.Tensor) or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    return x.to(dtype)


def without_autocast(op: Callable[_P, _R]) -> Callable[_P, _R]:
    """Turn autocast off inside ``op``, whose first argument is a tensor: kernels choose the precision of each step.

    It may be on there in backward, too.
    """

    @wraps(op)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        first: Any = args[0]
        if autocast_dtype(first.device) is None:
            return op(*args, **kwargs)
        with torch.autocast(first.device.type, enabled=False):
            return op(*args, **kwargs)

    return run


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """To what autocast would cast tensors of this device; None where it is off."""
    kind = device.type
    return torch.get_autocast_dtype(kind) if kind in _KINDS and torch.is_autocast_enabled(kind) else None
