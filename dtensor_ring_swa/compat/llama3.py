"""The llama3 functions of ring-flash-attention: documents packed into one contiguous sequence."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.distributed as dist

from dtensor_ring_swa.agreement import gather_objects
from dtensor_ring_swa.compat.common import (
    CallOptions,
    agree_on_call,
    attend,
    check_longest,
    local_boundaries,
    ranks_of,
    refusing_together,
)
from dtensor_ring_swa.compat.family import make_family
from dtensor_ring_swa.documents import Documents

__all__ = [
    "llama3_flash_attn_prepare_cu_seqlens",
    "llama3_flash_attn_varlen_func",
    "llama3_flash_attn_varlen_kvpacked_func",
    "llama3_flash_attn_varlen_qkvpacked_func",
]

BETWEEN = {
    "cu_seqlens_q": "Where each document's queries begin among this rank's tokens: int32 or int64 ``[n + 1]``;\n"
    "            this and the next three as ``llama3_flash_attn_prepare_cu_seqlens`` gives them.",
    "cu_seqlens_k": "Where its keys begin in ``local_k_slice``.",
    "max_seqlen_q": "At least the longest document's queries here; not used otherwise.",
    "max_seqlen_k": "At least the longest document's keys; not used otherwise.",
    "heads_k_stride": "Not used: heads do not travel in turns.",
    "local_k_slice": "The keys of the whole sequence that this rank's queries may see.",
}


def llama3_flash_attn_prepare_cu_seqlens(
    cu_seqlens: torch.Tensor, causal: bool, rank: int, world_size: int
) -> tuple[torch.Tensor, torch.Tensor, int, int, slice]:
    """One rank's part of the boundaries of packed documents.

    Args:
        cu_seqlens: Boundaries in the whole sequence ``[N + 1]``, int32 or int64.
        causal: Whether keys after the rank's last query are left out.
        rank: The rank.
        world_size: Ranks that share the sequence.

    Returns:
        ``cu_seqlens_q``, ``cu_seqlens_k`` (like ``cu_seqlens``), ``max_seqlen_q``, ``max_seqlen_k`` and
        ``local_k_slice``.

    Raises:
        ValueError: For boundaries that ``Documents`` refuses, no such rank, or a length that ranks cannot share evenly.
    """
    documents = Documents(cu_seqlens)
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be one of world_size ranks, got rank={rank} and world_size={world_size}")
    if documents.seq_len % world_size:
        raise ValueError(f"{documents.seq_len} tokens do not divide over {world_size} ranks; pad the sequence")
    rows = documents.seq_len // world_size
    first, stop = rank * rows, (rank + 1) * rows
    here = [(a, b) for a, b in pairwise(documents.cu_seqlens.tolist()) if a < b and a < stop and b > first]
    start, end = (here[0][0], stop if causal else here[-1][1]) if here else (first, first)
    queries = [0, *(min(b, stop) - first for _, b in here)]
    keys = [0, *(min(b, end) - start for _, b in here)]
    longest_q, longest_k = (max((b - a for a, b in pairwise(edges)), default=0) for edges in (queries, keys))
    return cu_seqlens.new_tensor(queries), cu_seqlens.new_tensor(keys), longest_q, longest_k, slice(start, end)


def _attend(
    q_THD: torch.Tensor, k_TGD: torch.Tensor, v_TGE: torch.Tensor, options: CallOptions, cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor, max_seqlen_q: int | None, max_seqlen_k: int | None, heads_k_stride: int,
    local_k_slice: slice,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    group = options.group
    ranks, rank = ranks_of(group), 0 if group is None else dist.get_rank(group)
    with refusing_together(group):
        queries = local_boundaries(cu_seqlens_q, "cu_seqlens_q", q=q_THD, k=k_TGD, v=v_TGE)
        edges = {"q": queries.cu_seqlens.tolist(), "k": Documents(cu_seqlens_k).cu_seqlens.tolist()}
        mine = _keys_of_documents(edges["q"], edges["k"], local_k_slice, rank * len(q_THD))
        for name, said in (("q", max_seqlen_q), ("k", max_seqlen_k)):
            longest = max(b - a for a, b in pairwise(edges[name]))
            check_longest(f"max_seqlen_{name}", said, longest, "the longest document")
    seq_len = agree_on_call(options, None, q_THD, k_TGD, v_TGE)
    if seq_len % ranks:
        raise ValueError(f"{seq_len} tokens do not divide over {ranks} ranks; pad the sequence")
    table = [mine] if group is None or ranks == 1 else gather_objects(group, mine)
    documents = _join(table, seq_len, options.window.right == 0)
    return attend(q_THD, k_TGD, v_TGE, options, load_balance="none", seq_len=seq_len, cu_seqlens=documents)


def _keys_of_documents(queries: list[int], keys: list[int], local_k_slice: slice, first: int) -> list[tuple[int, int]]:
    """Positions ``[start, end)`` of the keys of each document on the rank whose first token is at ``first``."""
    if not isinstance(local_k_slice, slice) or not isinstance(local_k_slice.start, int):
        raise ValueError(
            f"local_k_slice must be a slice of the whole sequence's keys that begins at an integer, got {local_k_slice}"
        )
    cuts, keys_at = [first + x for x in queries], [local_k_slice.start + x for x in keys]
    if keys_at[1:-1] != cuts[1:-1] or keys_at[0] > cuts[0] or keys_at[-1] < cuts[-1]:
        raise ValueError(
            f"cu_seqlens_q={queries}, cu_seqlens_k={keys} and local_k_slice={local_k_slice} do not describe documents "
            f"around the tokens [{cuts[0]}, {cuts[-1]}) of this rank; pass what llama3_flash_attn_prepare_cu_seqlens "
            "gives for this rank and this group"
        )
    return [(a, b) for a, b in pairwise(keys_at) if a < b]


def _join(table: list[list[tuple[int, int]]], seq_len: int, causal: bool) -> Documents:
    """The documents of the whole sequence, from what each rank knows of them; the same on every rank.

    Raises:
        ValueError: If the ranks contradict each other.
    """
    boundaries = [*sorted({start for keys in table for start, _ in keys} | {0}), seq_len]
    end_of, rows = dict(pairwise(boundaries)), seq_len // len(table)
    for rank, keys in enumerate(table):
        for start, end in keys:
            ends = {end_of[start]} | ({min(end_of[start], (rank + 1) * rows)} if causal else set())
            if end not in ends:
                raise ValueError(
                    f"rank {rank} of the group has keys [{start}, {end}) for a document that, by the boundaries of all "
                    f"ranks, is [{start}, {end_of[start]}); prepare cu_seqlens from the same boundaries everywhere, "
                    "and with the causal of this call"
                )
    return Documents(boundaries)


llama3_flash_attn_varlen_func, llama3_flash_attn_varlen_kvpacked_func, llama3_flash_attn_varlen_qkvpacked_func = (
    make_family(
        __name__,
        "llama3_flash_attn_varlen",
        "Attention within documents that are packed into one sequence, over its contiguous shards.",
        "only the halo of the window travels (there all keys of all ranks did), so heads_k_stride is not\n"
        "    used. The ranks join their boundaries in small messages between hosts at each call; ``ring_attention``\n"
        "    with ``cu_seqlens=Documents(...)``, built once a step, spares these. Shards must be equal, as there.",
        _attend,
        BETWEEN,
    )
)
