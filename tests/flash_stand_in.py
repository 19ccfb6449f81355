"""A stand-in for ``flash_attn.cute.interface``, on any device: what kernel ``flash`` calls, by definition in float64.

As in the package, forward looks for its program in a cache of its own and starts it; a query that sees no key
gets 0 and ``-inf``; windows are aligned at the last query and the last key.
"""

from __future__ import annotations

from itertools import pairwise
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


def _flash_attn_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    softmax_scale: float = 1.0,
    softcap: float = 0.0,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    learnable_sink: torch.Tensor | None = None,
    tile_mn: tuple[int, int] | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> None:
    ran.append(window_size_left)
    key = q.dtype, softcap, window_size_left is None, window_size_right is None, tile_mn
    programs: Any = getattr(_flash_attn_fwd, "compile_cache")  # noqa: B009
    if key not in programs:
        programs[key] = _Program(softcap)
    q = q if q.data_ptr() % 16 == 0 else q.clone()
    room = (torch.empty(1),) if options["room_of_its_own"] else ()
    programs[key](
        q.detach(), k.detach(), v.detach(), out, lse, softmax_scale, cu_seqlens_q, cu_seqlens_k, window_size_left,
        window_size_right, learnable_sink, *room,
    )  # fmt: skip


def _flash_attn_bwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    dout: torch.Tensor,
    lse: torch.Tensor,
    *,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    softmax_scale: float,
    softcap: float,
    window_size_left: int | None,
    window_size_right: int | None,
    learnable_sink: torch.Tensor | None = None,
    deterministic: bool = False,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
) -> tuple[torch.Tensor, ...]:
    dsinks = [] if learnable_sink is None else [torch.zeros_like(learnable_sink)]
    sharing, window = q.shape[-2] // k.shape[-2], (window_size_left, window_size_right)
    for rows, keys in _documents(q, k, cu_seqlens_q, cu_seqlens_k):
        own_q, own_out, own_dout = (_of(x, rows).double() for x in (q, out, dout))
        own_k, own_v = (_of(x, keys).double().repeat_interleave(sharing, 2) for x in (k, v))
        scores, slope = _scores(own_q, own_k, softmax_scale, softcap, window)
        # The lse given is the joint one, of sinks and of what other calls saw: these are shares of the gradients.
        joint = _lse_of(lse, rows).double().unsqueeze(-1)
        weights = (scores - joint.masked_fill(joint == float("-inf"), 0.0)).exp()
        delta = (own_dout * own_out).sum(-1).transpose(1, 2)
        dscores = weights * (torch.einsum("bihd,bjhd->bhij", own_dout, own_v) - delta.unsqueeze(-1)) * slope
        _of(dq, rows).copy_(torch.einsum("bhij,bjhd->bihd", dscores, own_k))
        _of(dk, keys).copy_(torch.einsum("bhij,bihd->bjhd", dscores, own_q).unflatten(2, (-1, sharing)).sum(3))
        _of(dv, keys).copy_(torch.einsum("bhij,bihd->bjhd", weights, own_dout).unflatten(2, (-1, sharing)).sum(3))
        if learnable_sink is not None:
            share = (learnable_sink[:, None] - joint.squeeze(-1)).exp().nan_to_num(0.0)
            dsinks[0] -= (share * delta).sum((0, 2)).to(learnable_sink.dtype)
    return dq, dk, dv, *dsinks


class _Program:
    def __init__(self, softcap: float) -> None:
        self.softcap = softcap

    def __call__(self, *arguments: Any) -> None:
        started.append(arguments)
        q, k, v, out, lse, scale, cu_seqlens_q, cu_seqlens_k, left, right, sinks, *_ = arguments
        for rows, keys in _documents(q, k, cu_seqlens_q, cu_seqlens_k):
            own_k, own_v = (_of(x, keys).double().repeat_interleave(q.shape[-2] // k.shape[-2], 2) for x in (k, v))
            scores, _ = _scores(_of(q, rows).double(), own_k, scale, self.softcap, (left, right))
            own_lse = scores.logsumexp(-1)
            if sinks is not None:
                own_lse = torch.logaddexp(own_lse, sinks.double()[:, None])
            weights = (scores - own_lse.masked_fill(own_lse == float("-inf"), 0.0).unsqueeze(-1)).exp()
            _of(out, rows).copy_(torch.einsum("bhij,bjhd->bihd", weights, own_v))
            _lse_of(lse, rows).copy_(own_lse)


def _scores(
    q: torch.Tensor, k: torch.Tensor, scale: float, softcap: float, window: tuple[int | None, int | None]
) -> tuple[torch.Tensor, torch.Tensor | float]:
    """Scores, -inf where hidden, and their derivatives by the products of q and k."""
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    slope: torch.Tensor | float = scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
        slope = scale * (1 - (scores / softcap) ** 2)
    rows, keys = scores.shape[-2:]
    distance = torch.arange(keys)[None, :] - torch.arange(rows)[:, None] - (keys - rows)
    left, right = window
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    hidden |= distance < (-rows - keys if left is None else -left)
    hidden |= distance > (rows + keys if right is None else right)
    return scores.masked_fill(hidden.to(scores.device), float("-inf")), slope


def _documents(
    q: torch.Tensor, k: torch.Tensor, cu_seqlens_q: torch.Tensor | None, cu_seqlens_k: torch.Tensor | None
) -> list[tuple[slice | None, slice | None]]:
    """Rows and keys of each document of a packed call; None for all."""
    if cu_seqlens_q is None or cu_seqlens_k is None:
        return [(None, None)]
    edges = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    rows, keys = ([slice(first, last) for first, last in pairwise(x)] for x in edges)
    return list(zip(rows, keys, strict=True))


def _of(x: torch.Tensor, rows: slice | None) -> torch.Tensor:
    """All of ``[B, M, H, D]``, or some rows of ``[M, H, D]`` as a batch of one."""
    return x if rows is None else x[None, rows]


def _lse_of(lse: torch.Tensor, rows: slice | None) -> torch.Tensor:
    return lse if rows is None else lse[None, :, rows]


cache()
