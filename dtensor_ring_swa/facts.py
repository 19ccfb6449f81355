"""The facts on which the ranks must agree where each passes a plain shard."""

from __future__ import annotations

from zlib import crc32

import torch

from dtensor_ring_swa.documents import Documents
from dtensor_ring_swa.window import Window

# The first is checked against torch.chunk's sizes; all others must be equal on every rank.
FACTS = (
    "the length of q", "the batch size", "the number of query heads", "the number of key/value heads",
    "the head dim of q and k", "the head dim of v", "the dtype", "the kind of device", "the window's left",
    "the window's right", "whether a gradient is needed", "sink_tokens", "whether there are sinks", "cu_seqlens",
    "kernel, scale, softcap, deterministic, layout, load_balance or exchange",
)  # fmt: skip


def facts_of(
    q_BSHD: torch.Tensor,
    k_BSGD: torch.Tensor,
    v_BSGE: torch.Tensor,
    sinks_H: torch.Tensor | None,
    documents: Documents | None,
    window: Window,
    sink_tokens: int,
    *options: object,
) -> tuple[int, ...]:
    """This rank's values for ``FACTS``."""
    tensors = (q_BSHD, k_BSGD, v_BSGE, *(() if sinks_H is None else (sinks_H,)))
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    batch, rows, heads, head_dim = q_BSHD.shape
    return (
        rows, batch, heads, k_BSGD.shape[2], head_dim, v_BSGE.shape[3], crc32(str(q_BSHD.dtype).encode()),
        crc32(q_BSHD.device.type.encode()), *window, int(needs_grad), sink_tokens, int(sinks_H is not None),
        0 if documents is None else documents.fingerprint, crc32(repr(options).encode()),
    )  # fmt: skip
