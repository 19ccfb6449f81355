"""The attention function ``"ring"`` of the training framework nanotron."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import ProcessGroup

from dtensor_ring_swa.compat.common import (
    CallOptions,
    attend,
    check_longest,
    default_group,
    flash_window,
    local_boundaries,
    refusing_together,
)

__all__ = ["ATTENTION_FUNCTIONS", "ring_flash_attn_varlen_func"]


def ring_flash_attn_varlen_func(
    module: object,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    ring_pg: ProcessGroup | None = None,
    **others: object,
) -> tuple[Any]:
    """Attention over contiguous shards whose batch and sequence dims are flattened into one.

    What differs: a bounded ``window_size`` is honoured, in tokens of the sequence (there each pair of
    shards was windowed as if they began at the same position). Causal calls with an unlimited window are
    balanced over the ranks. Other keyword arguments raise unless they are None (there they were
    dropped, ``sliding_window`` among them). Gradients have the inputs' dtype (there dq was bfloat16).
    ``causal`` is False by default, as there, and nanotron's own call leaves it out.

    Args:
        module: The calling module; not used, as there.
        q: This rank's queries ``[B * S_local, Hq, D]``: S_local contiguous tokens of each batch row.
        k: This rank's keys ``[B * S_local, Hkv, D]`` with ``Hq % Hkv == 0``.
        v: This rank's values ``[B * S_local, Hkv, Dv]``.
        cu_seqlens: Boundaries of the batch rows in this rank's tokens, ``[0, S_local, 2 * S_local, ...]``,
            B + 1 entries. Read on the host: a CPU tensor spares a wait for the GPU.
        max_seqlen: At least S_local; not used otherwise.
        dropout: Only 0.0.
        scaling: Factor on the scores; ``D ** -0.5`` by default.
        causal: Nothing to the right of the query.
        window_size: ``(left, right)`` tokens visible beside the query's own, -1 for unlimited.
        alibi_slopes: Only None.
        deterministic: Bitwise the same gradients on every run; raises where no kernel can.
        return_attn_probs: Return the lse too.
        ring_pg: The ranks that share the sequence. None is the default group of torch.distributed, or
            one device where none is initialised.
        **others: Only None: what nanotron hands to every attention function.

    Returns:
        ``(out,)`` with out ``[B * S_local, Hq, Dv]``; or ``((out, lse, None),)`` with lse
        ``[Hq, B * S_local]``, natural log, float32 (float64 for float64 inputs), not differentiable.

    Raises:
        NotImplementedError: For rows of different lengths, dropout, ALiBi and others. Boundaries on one
            rank do not tell whether a document continues on another, so packed documents need
            ``ring_attention`` with global boundaries.
        ValueError: If the arguments do not fit together, before keys are sent, on every rank.
    """
    group = default_group(ring_pg)
    with refusing_together(group):
        _refuse(others)
        window = flash_window(window_size, causal, dropout, alibi_slopes)
        batch, rows = _batch_and_rows(q, k, v, cu_seqlens, max_seqlen)
    q, k, v = (x.reshape(batch, rows, *x.shape[1:]) for x in (q, k, v))
    out, lse = attend(q, k, v, CallOptions(window, scaling, deterministic, group))
    out = out.flatten(0, 1)
    return ((out, lse.transpose(0, 1).flatten(1), None),) if return_attn_probs else (out,)


ATTENTION_FUNCTIONS: dict[str, Callable[..., tuple[Any]]] = {"ring": ring_flash_attn_varlen_func}


def _refuse(others: dict[str, object]) -> None:
    given = [name for name, value in others.items() if value is not None]
    if "sliding_window" in given:
        raise NotImplementedError(
            "sliding_window is not read, since what it counts differs between nanotron's attention functions; "
            "for n keys, the query's own included, pass causal=True, window_size=(n - 1, 0)"
        )
    if given:
        raise NotImplementedError(f"{', '.join(given)} cannot be honoured; pass None or leave it out")


def _batch_and_rows(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor | None, max_seqlen: int | None
) -> tuple[int, int]:
    """B and S_local."""
    if cu_seqlens is None:
        raise ValueError("cu_seqlens must be the boundaries of this rank's batch rows, [0, S, 2 * S, ...], got None")
    bounds = local_boundaries(cu_seqlens, "cu_seqlens", q=q, k=k, v=v).cu_seqlens.tolist()
    batch = len(bounds) - 1
    rows = bounds[-1] // batch
    if bounds != [row * rows for row in range(batch + 1)]:
        raise NotImplementedError(
            f"cu_seqlens must cut this rank's {bounds[-1]} tokens into batch rows of one length, got {bounds}: "
            "boundaries on one rank do not tell whether a document continues on another. For documents that were "
            "packed into a sequence before it was sharded, call dtensor_ring_swa.ring_attention(q, k, v, "
            "cu_seqlens=Documents(...), mesh=ring_pg) with boundaries in the whole sequence. Where each entry is this "
            "rank's share of a document that all ranks share evenly, call "
            "dtensor_ring_swa.compat.ring_flash_attn.ring_flash_attn_varlen_func"
        )
    check_longest("max_seqlen", max_seqlen, rows, "a batch row, by cu_seqlens")
    return batch, rows
