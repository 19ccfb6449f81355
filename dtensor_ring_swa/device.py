"""Integers on the device, brought there without waiting for it and kept there."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_T = TypeVar("_T")


def to_device(numbers: list[Any], device: torch.device) -> torch.Tensor:
    """An int32 tensor; to a GPU from pinned memory, so that the copy does not wait for what is queued there."""
    host = torch.tensor(numbers, dtype=torch.int32)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def cached_per_stream(entries: int) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Cache what a function of hashable arguments, the last a device, makes there: for its last ``entries`` arguments.

    Each stream has its own: what was queued on one must not be read on another. While a CUDA graph is captured, what a
    warm-up made on another stream is taken instead, and never freed, since each replay will read it: what is made
    under capture holds nothing yet, and its numbers on the host would be gone at the replay.
    """

    def caching(make: Callable[_P, _T]) -> Callable[_P, _T]:
        by_stream: Callable[..., dict[int, _T]] = lru_cache(maxsize=entries)(lambda *_: {})
        captured: dict[tuple[Any, ...], _T] = {}

        @wraps(make)
        def made(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            device = args[-1]
            assert isinstance(device, torch.device)
            on_gpu = device.type == "cuda"
            if on_gpu and torch.cuda.is_current_stream_capturing():
                if args not in captured:
                    captured[args] = _of_warm_up(by_stream(*args))
                return captured[args]
            found = by_stream(*args)
            stream = torch.accelerator.current_stream(device).stream_id if on_gpu else 0
            if stream not in found:
                found[stream] = make(*args, **kwargs)
            return found[stream]

        return made

    return caching


def _of_warm_up(made: dict[int, _T]) -> _T:
    if not made:
        raise RuntimeError(
            "a CUDA graph is being captured around a call that has not run before: run it once, forward and backward, "
            "with the same shapes, window and documents, then capture"
        )
    return next(iter(made.values()))
