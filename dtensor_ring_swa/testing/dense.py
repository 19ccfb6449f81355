"""The oracle: attention with the whole score matrix and a mask, in float64.

It shares no code with the package, so that it cannot share a mistake either.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch


def visible(
    seq_len: int, left: int, right: int, cu_seqlens: Sequence[int] | None = None, sink_tokens: int = 0
) -> torch.Tensor:
    """Boolean ``[S, S]``: whether query row i sees key column j; -1 is unlimited."""
    position = torch.arange(seq_len)
    distance = position[None, :] - position[:, None]
    mask = torch.ones(seq_len, seq_len, dtype=torch.bool)
    edges = [0, seq_len] if cu_seqlens is None else list(cu_seqlens)
    document, start = torch.empty(seq_len, dtype=torch.long), torch.empty(seq_len, dtype=torch.long)
    for number, (first, last) in enumerate(pairwise(edges)):
        document[first:last], start[first:last] = number, first
    if left >= 0:
        mask &= (distance >= -left) | (position - start < sink_tokens)
    if right >= 0:
        mask &= distance <= right
    return mask & (document[None, :] == document[:, None])


def dense_attention(
    q_BSHD: torch.Tensor,
    k_BSGD: torch.Tensor,
    v_BSGE: torch.Tensor,
    window: tuple[int, int] = (-1, 0),
    scale: float | None = None,
    softcap: float = 0.0,
    sinks_H: torch.Tensor | None = None,
    sink_tokens: int = 0,
    cu_seqlens: Sequence[int] | Sequence[Sequence[int]] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention of a whole sequence by definition, differentiable by autograd.

    Args:
        q_BSHD: Queries ``[B, S, Hq, D]``.
        k_BSGD: Keys ``[B, S, Hkv, D]``.
        v_BSGE: Values ``[B, S, Hkv, Dv]``.
        window: ``(left, right)`` tokens visible, self excluded; -1 is unlimited.
        scale: Factor on the scores; ``D ** -0.5`` by default.
        softcap: Scores become ``softcap * tanh(scores / softcap)``; 0.0 is off.
        sinks_H: Learned sink logits ``[Hq]``.
        sink_tokens: First tokens of each document that its later tokens see besides their window.
        cu_seqlens: Boundaries of documents, of all or of each batch row.

    Returns:
        out ``[B, S, Hq, Dv]`` and lse ``[B, Hq, S]``, both float64.
    """
    q, k, v = (x.double() for x in (q_BSHD, k_BSGD, v_BSGE))
    sharing = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(sharing, dim=2), v.repeat_interleave(sharing, dim=2)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    masks = [visible(q.shape[1], *window, row, sink_tokens) for row in _rows(cu_seqlens)]
    scores = scores.masked_fill(~torch.stack(masks)[:, None].to(q.device), float("-inf"))
    if sinks_H is not None:
        sinks = sinks_H.double()[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = scores.softmax(-1)[..., : q.shape[1]]
    return torch.einsum("bhij,bjhd->bihd", weights, v), scores.logsumexp(-1)


def _rows(cu_seqlens: Sequence[int] | Sequence[Sequence[int]] | None) -> list[Sequence[int] | None]:
    """One boundary list for all batch rows, or one for each."""
    if cu_seqlens is None:
        return [None]
    nested = [row for row in cu_seqlens if not isinstance(row, int)]
    return [*nested] if nested else [[edge for edge in cu_seqlens if isinstance(edge, int)]]
