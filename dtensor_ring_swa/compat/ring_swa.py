"""The functions of the package ring_swa: ``import dtensor_ring_swa.compat.ring_swa as ring_swa``.

All are causal, on contiguous shards. What differs: every argument after the window has a default that
works; shards may be uneven, with ``torch.chunk``'s sizes; one device needs no process group; each
batch row and each document has its own sink (there all were taken to begin alike).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from dtensor_ring_swa.attention import ring_attention
from dtensor_ring_swa.call_checks import CuSeqlens
from dtensor_ring_swa.compat.common import refusing_together
from dtensor_ring_swa.groups import group_of

__all__ = [
    "ring_sliding_window_attn",
    "ring_sliding_window_attn_varlen",
    "ring_streaming_llm_attn",
    "ring_streaming_llm_attn_varlen",
]


def ring_sliding_window_attn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    window_size: int,
    cp_group: ProcessGroup | None = None,
    cp_size: int | None = None,
    cp_local_rank: int | None = None,
    cp_prev_global_rank: int | None = None,
    cp_next_global_rank: int | None = None,
    softmax_scale: float | None = None,
) -> torch.Tensor:
    """Causal sliding-window attention over contiguous shards.

    Args:
        q: This rank's queries ``[B, S_local, Hq, D]``.
        k: This rank's keys ``[B, S_local, Hkv, D]`` with ``Hq % Hkv == 0``.
        v: This rank's values ``[B, S_local, Hkv, Dv]``.
        window_size: Earlier tokens visible; w shows w + 1 keys, the query's own included.
        cp_group: The ranks that share the sequence. None is one device, also where
            torch.distributed is initialised: what its own README says.
        cp_size: Ranks in the group. This and the next three need not be passed.
        cp_local_rank: This rank in the group.
        cp_prev_global_rank: The global rank before this one in the group, cyclically.
        cp_next_global_rank: The global rank after it.
        softmax_scale: Factor on the scores; ``D ** -0.5`` by default.

    Returns:
        out ``[B, S_local, Hq, Dv]``.

    Raises:
        ValueError: If the ranks passed contradict the group, or arguments do not fit together, before
            keys are sent, on every rank.
    """
    group = _group(cp_group, cp_size, cp_local_rank, cp_prev_global_rank, cp_next_global_rank)
    return _attend(q, k, v, window_size, softmax_scale, group)


def ring_sliding_window_attn_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    window_size: int,
    cu_seqlens: CuSeqlens,
    cp_group: ProcessGroup | None = None,
    cp_size: int | None = None,
    cp_local_rank: int | None = None,
    cp_prev_global_rank: int | None = None,
    cp_next_global_rank: int | None = None,
    softmax_scale: float | None = None,
) -> torch.Tensor:
    """``ring_sliding_window_attn`` within documents that are packed into one sequence.

    Args:
        q: This rank's queries ``[T_local, Hq, D]``, or ``[1, T_local, Hq, D]``; k, v and out likewise.
        k: This rank's keys ``[T_local, Hkv, D]``.
        v: This rank's values ``[T_local, Hkv, Dv]``.
        window_size: Earlier tokens visible; w shows w + 1 keys.
        cu_seqlens: Boundaries of the documents in the whole sequence, int32 or int64 ``[N + 1]``. A
            ``Documents``, built once a step, spares a wait for the GPU in each layer.
        cp_group: See ``ring_sliding_window_attn``, as for the other arguments.
        cp_size: Ranks in the group.
        cp_local_rank: This rank in the group.
        cp_prev_global_rank: The global rank before this one.
        cp_next_global_rank: The global rank after it.
        softmax_scale: Factor on the scores.

    Returns:
        out ``[T_local, Hq, Dv]``.

    Raises:
        ValueError: See ``ring_sliding_window_attn``; or if the boundaries do not start at 0, decrease, end
            elsewhere than the whole sequence, or differ between ranks.
    """
    group = _group(cp_group, cp_size, cp_local_rank, cp_prev_global_rank, cp_next_global_rank)
    return _attend(q, k, v, window_size, softmax_scale, group, _stated(cu_seqlens, group))


def ring_streaming_llm_attn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    window_size: int,
    cp_group: ProcessGroup | None = None,
    cp_size: int | None = None,
    cp_local_rank: int | None = None,
    cp_prev_global_rank: int | None = None,
    cp_next_global_rank: int | None = None,
    softmax_scale: float | None = None,
) -> torch.Tensor:
    """``ring_sliding_window_attn`` that always sees the sequence's first token too.

    What differs: each batch row's own first token is its sink.

    Args:
        q: This rank's queries ``[B, S_local, Hq, D]``.
        k: This rank's keys ``[B, S_local, Hkv, D]``.
        v: This rank's values ``[B, S_local, Hkv, Dv]``.
        window_size: Earlier tokens visible beside the sink; w shows w + 1 keys.
        cp_group: See ``ring_sliding_window_attn``, as for the other arguments.
        cp_size: Ranks in the group.
        cp_local_rank: This rank in the group.
        cp_prev_global_rank: The global rank before this one.
        cp_next_global_rank: The global rank after it.
        softmax_scale: Factor on the scores.

    Returns:
        out ``[B, S_local, Hq, Dv]``.

    Raises:
        ValueError: See ``ring_sliding_window_attn``.
    """
    group = _group(cp_group, cp_size, cp_local_rank, cp_prev_global_rank, cp_next_global_rank)
    return _attend(q, k, v, window_size, softmax_scale, group, sink_tokens=1)


def ring_streaming_llm_attn_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    window_size: int,
    cu_seqlens: CuSeqlens,
    cp_group: ProcessGroup | None = None,
    cp_size: int | None = None,
    cp_local_rank: int | None = None,
    cp_prev_global_rank: int | None = None,
    cp_next_global_rank: int | None = None,
    softmax_scale: float | None = None,
) -> torch.Tensor:
    """``ring_sliding_window_attn_varlen`` that always sees the document's first token too.

    What differs: each document's own first token is its sink.

    Args:
        q: This rank's queries ``[T_local, Hq, D]``, or ``[1, T_local, Hq, D]``; k, v and out likewise.
        k: This rank's keys ``[T_local, Hkv, D]``.
        v: This rank's values ``[T_local, Hkv, Dv]``.
        window_size: Earlier tokens visible beside the sink; w shows w + 1 keys.
        cu_seqlens: Boundaries of the documents in the whole sequence, int32 or int64 ``[N + 1]``. A
            ``Documents``, built once a step, spares a wait for the GPU in each layer.
        cp_group: See ``ring_sliding_window_attn``, as for the other arguments.
        cp_size: Ranks in the group.
        cp_local_rank: This rank in the group.
        cp_prev_global_rank: The global rank before this one.
        cp_next_global_rank: The global rank after it.
        softmax_scale: Factor on the scores.

    Returns:
        out ``[T_local, Hq, Dv]``.

    Raises:
        ValueError: See ``ring_sliding_window_attn_varlen``.
    """
    group = _group(cp_group, cp_size, cp_local_rank, cp_prev_global_rank, cp_next_global_rank)
    return _attend(q, k, v, window_size, softmax_scale, group, _stated(cu_seqlens, group), sink_tokens=1)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    window_size: int,
    scale: float | None,
    group: ProcessGroup | None,
    cu_seqlens: CuSeqlens | None = None,
    sink_tokens: int = 0,
) -> torch.Tensor:
    return ring_attention(
        q, k, v, window=(window_size, 0), scale=scale, mesh=group, cu_seqlens=cu_seqlens, sink_tokens=sink_tokens
    )


def _stated(cu_seqlens: CuSeqlens | None, group: ProcessGroup | None) -> CuSeqlens:
    """The boundaries, without which all tokens would be one document."""
    with refusing_together(group):
        if cu_seqlens is None:
            raise ValueError("cu_seqlens must be the boundaries of the documents in the whole sequence, got None")
        return cu_seqlens


def _group(
    cp_group: ProcessGroup | None, cp_size: int | None, rank: int | None, before: int | None, after: int | None
) -> ProcessGroup | None:
    """The group meant, None for one device, once all that is said of it holds."""
    group = None if cp_group is None else group_of(cp_group)
    own = dist.get_rank() if dist.is_initialized() else 0
    peers = [own] if group is None else dist.get_process_group_ranks(group)
    here = peers.index(own)
    with refusing_together(group):
        for name, said, true in (
            ("cp_size", cp_size, len(peers)),
            ("cp_local_rank", rank, here),
            ("cp_prev_global_rank", before, peers[here - 1]),
            ("cp_next_global_rank", after, peers[(here + 1) % len(peers)]),
        ):
            if said not in (None, true):
                raise ValueError(f"{name}={said} contradicts the group, where it is {true}; leave it out")
    return group
