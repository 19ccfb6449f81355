"""The oracle: attention with the whole score matrix and a mask, in float64.

It shares no code with the package, so that it cannot share a mistake either.
"""

from __future__ import annotations

import torch


def visible(seq_len: int, left: int, right: int) -> torch.Tensor:
    """Boolean ``[S, S]``: whether query row i sees key column j; -1 is unlimited."""
    position = torch.arange(seq_len)
    distance = position[None, :] - position[:, None]
    mask = torch.ones(seq_len, seq_len, dtype=torch.bool)
    if left >= 0:
        mask &= distance >= -left
    if right >= 0:
        mask &= distance <= right
    return mask


def dense_attention(
    q_BSHD: torch.Tensor,
    k_BSGD: torch.Tensor,
    v_BSGE: torch.Tensor,
    window: tuple[int, int] = (-1, 0),
    scale: float | None = None,
    softcap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention of a whole sequence by definition, differentiable by autograd.

    Args:
        q_BSHD: Queries ``[B, S, Hq, D]``.
        k_BSGD: Keys ``[B, S, Hkv, D]``.
        v_BSGE: Values ``[B, S, Hkv, Dv]``.
        window: ``(left, right)`` tokens visible, self excluded; -1 is unlimited.
        scale: Factor on the scores; ``D ** -0.5`` by default.
        softcap: Scores become ``softcap * tanh(scores / softcap)``; 0.0 is off.

    Returns:
        out ``[B, S, Hq, Dv]`` and lse ``[B, Hq, S]``, both float64.
    """
    q, k, v = (x.double() for x in (q_BSHD, k_BSGD, v_BSGE))
    sharing = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(sharing, dim=2), v.repeat_interleave(sharing, dim=2)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible(q.shape[1], *window).to(q.device), float("-inf"))
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v), scores.logsumexp(-1)
