"""A call of ``F.scaled_dot_product_attention``: which ones go to the ring, and what is refused."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor


class SDPACall(NamedTuple):
    """The arguments of ``F.scaled_dot_product_attention``, in its order and with its defaults.

    Attributes:
        query: ``[B, Hq, S, D]``.
        key: ``[B, Hkv, S, D]``.
        value: ``[B, Hkv, S, Dv]``.
        attn_mask: Must be None.
        dropout_p: Must be 0.0.
        is_causal: Hide later tokens.
        scale: Factor on the scores; ``D ** -0.5`` by default.
        enable_gqa: Allow fewer heads of k and v than of q.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attn_mask: torch.Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    def refuse(self) -> None:
        """Raise for arguments that cannot be honoured, from what all ranks see alike.

        Raises:
            NotImplementedError: For what SDPA can do and ``ring_attention`` cannot.
            ValueError: For fewer heads of k and v without ``enable_gqa``.
        """
        q, k, v = self[:3]
        shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
        if self.attn_mask is not None:
            raise NotImplementedError(
                "ring_sdpa takes no attn_mask; pass is_causal=True, give a window to ring_sdpa(window=...), and for "
                "packed documents call ring_attention(cu_seqlens=...)"
            )
        if self.dropout_p:
            raise NotImplementedError(
                f"ring_sdpa has no dropout of attention weights, got dropout_p={self.dropout_p}; pass 0.0, and drop "
                "out after the output projection instead"
            )
        if not q.ndim == k.ndim == v.ndim == 4:
            raise NotImplementedError(f"ring_sdpa needs q, k and v of [B, H, S, D], got {shapes}; reshape them")
        if not q.shape[2] == k.shape[2] == v.shape[2]:
            raise NotImplementedError(
                f"ring_sdpa needs q, k and v of one length (dim 2), got {shapes}; for cross attention, or a cache of "
                "earlier keys, redistribute them so that no sequence is sharded"
            )
        # SDPA broadcasts a single head of k and v without the flag.
        alike = q.shape[1] == k.shape[1] == v.shape[1] or k.shape[1] == v.shape[1] == 1
        if not alike and not self.enable_gqa:
            raise ValueError(f"fewer heads (dim 1) of k and v than of q need enable_gqa=True, got {shapes}")


def has_sharded_sequence(tensors: tuple[Any, ...], dim: int) -> bool:
    """Whether all are DTensors and one is sharded on ``dim``, its sequence."""
    return all(isinstance(x, DTensor) for x in tensors) and any(
        placement.is_shard(dim % x.ndim) for x in tensors for placement in x.placements
    )
