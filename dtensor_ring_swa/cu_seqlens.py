"""Boundaries of documents as callers write them."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor


def on_host(cu_seqlens: object) -> torch.Tensor:
    """Boundaries as one int64 tensor on the CPU; rows of a list are filled up with their last entry.

    Raises:
        ValueError: If they are not integers, or not shaped as boundaries; values are not looked at.
    """
    if isinstance(cu_seqlens, DTensor):
        raise ValueError(
            "cu_seqlens must be a plain tensor, the same on every rank, got a DTensor; pass its full_tensor()"
        )
    if isinstance(cu_seqlens, (list, tuple)) and any(_is_row(x) for x in cu_seqlens):
        rows = [on_host(row) for row in cu_seqlens]
        if any(row.ndim != 1 or not row.numel() for row in rows):
            raise ValueError(f"cu_seqlens as a list needs one boundary list a batch row, got {cu_seqlens!r}")
        longest = max(map(len, rows))
        return torch.stack([torch.cat((row, row[-1:].expand(longest - len(row)))) for row in rows])
    if isinstance(cu_seqlens, torch.Tensor) and cu_seqlens.layout != torch.strided:
        raise ValueError(f"cu_seqlens must be a dense tensor, got {cu_seqlens.layout}; pass cu_seqlens.to_dense()")
    try:
        host = cu_seqlens.detach().cpu() if isinstance(cu_seqlens, torch.Tensor) else torch.tensor(cu_seqlens)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"cu_seqlens must be int32 or int64 [N + 1], or [B, N + 1], or lists of such integers, got {cu_seqlens!r}"
        ) from error
    if host.dtype not in (torch.int32, torch.int64) or host.ndim not in (1, 2) or not host.numel():
        raise ValueError(
            f"cu_seqlens must be int32 or int64 [N + 1], or [B, N + 1], got {host.dtype} {list(host.shape)}"
        )
    return host.long()


def _is_row(x: object) -> bool:
    """Whether an entry of a list is a list itself; an integer may come as a NumPy scalar or a 0-d tensor, too."""
    return isinstance(x, (list, tuple)) or getattr(x, "ndim", 0) > 0
