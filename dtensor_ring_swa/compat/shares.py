"""Packed documents of which every rank holds a share: each is a sequence of its own, sharded like the others."""

from __future__ import annotations

from itertools import pairwise

import torch

from dtensor_ring_swa.compat.common import (
    CallOptions,
    agree_on_call,
    attend,
    check_longest,
    local_boundaries,
    ranks_of,
    refusing_together,
)
from dtensor_ring_swa.layout import runs

BETWEEN = {
    "cu_seqlens": "Where each document's share begins among this rank's tokens: int32 or int64 ``[N + 1]``,\n"
    "            the same on every rank. Read on the host: a CPU tensor spares a wait for the GPU.",
    "max_seqlen": "At least the longest share; not used otherwise.",
}


def attend_shares(
    q_THD: torch.Tensor,
    k_TGD: torch.Tensor,
    v_TGE: torch.Tensor,
    options: CallOptions,
    cu_seqlens: torch.Tensor,
    max_seqlen: int | None,
    *,
    layout: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's out ``[T_local, Hq, Dv]`` and lse ``[Hq, T_local]``.

    Documents of one length are the rows of one batch, so there is a call for each length.

    Args:
        q_THD: This rank's share of each document's queries ``[T_local, Hq, D]``, one after another.
        k_TGD: Of its keys ``[T_local, Hkv, D]``.
        v_TGE: Of its values ``[T_local, Hkv, Dv]``.
        options: Window, scale and group.
        cu_seqlens: Boundaries of the shares ``[N + 1]``.
        max_seqlen: At least the longest share.
        layout: How each document lies on the ranks.
    """
    ranks = ranks_of(options.group)
    with refusing_together(options.group):
        documents = local_boundaries(cu_seqlens, "cu_seqlens", q=q_THD, k=k_TGD, v=v_TGE)
        starts_of: dict[int, list[int]] = {}
        for start, stop in pairwise(documents.cu_seqlens.tolist()):
            if start < stop or documents.seq_len == 0:
                starts_of.setdefault(stop - start, []).append(start)
        longest = max(starts_of)
        check_longest("max_seqlen", max_seqlen, longest, "the longest document on this rank")
        for length in starts_of:
            runs(layout, length * ranks, ranks, 0)
    agree_on_call(options, documents, q_THD, k_TGD, v_TGE)

    held, outs, lses = [], [], []
    for length, starts in starts_of.items():
        rows = torch.cat([torch.arange(start, start + length) for start in starts]).to(q_THD.device)
        q, k, v = (x[rows].unflatten(0, (len(starts), length)) for x in (q_THD, k_TGD, v_TGE))
        out, lse = attend(q, k, v, options, layout=layout, load_balance="none", seq_len=length * ranks)
        held.append(rows)
        outs.append(out.flatten(0, 1))
        lses.append(lse.transpose(0, 1).flatten(1))
    back = torch.cat(held).argsort()
    return torch.cat(outs)[back], torch.cat(lses, dim=1)[:, back]
