"""A stand-in for ``flash_attn.cute.interface``: a function that picks a program by its own cache, and starts it."""

from __future__ import annotations

from typing import Any

import torch

ran: list[int | None] = []
started: list[tuple[Any, ...]] = []
options = {"room_of_its_own": False}


def cache() -> dict[Any, Any]:
    """The function's own cache, where the package keeps it."""
    return vars(_flash_attn_fwd).setdefault("compile_cache", {})


def reset() -> None:
    """As after an import."""
    ran.clear()
    started.clear()
    cache().clear()
    options["room_of_its_own"] = False


def _program(*arguments: Any) -> None:
    started.append(arguments)
    q, k, v, out, lse, scale, left, *_ = arguments
    out.copy_(q * scale + k.mean() + v.mean())
    lse.fill_(left or 0.0)


def _flash_attn_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float = 1.0,
    softcap: float = 0.0,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    tile_mn: tuple[int, int] | None = None,
    learnable_sink: torch.Tensor | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> None:
    ran.append(window_size_left)
    key = q.dtype, window_size_left is None, window_size_right is None, tile_mn
    programs: Any = getattr(_flash_attn_fwd, "compile_cache")  # noqa: B009
    if key not in programs:
        programs[key] = _program
    q = q if q.data_ptr() % 16 == 0 else q.clone()
    room = (torch.empty(1),) if options["room_of_its_own"] else ()
    programs[key](
        q.detach(), k.detach(), v.detach(), out, lse, softmax_scale, window_size_left, None, learnable_sink, *room
    )


cache()
