"""What the ops do: attention of one shard, with the exchange inside. Without a group the shard is the sequence."""

from __future__ import annotations

import torch

from dtensor_ring_swa.agreement import agree_on_rows
from dtensor_ring_swa.cut import cut
from dtensor_ring_swa.groups import exchange_group, resolve_group
from dtensor_ring_swa.options import Names
from dtensor_ring_swa.prepare import prepare
from dtensor_ring_swa.wire import RowShape


def attention_on_shard(
    q_BSHD: torch.Tensor,
    k_BSGD: torch.Tensor,
    v_BSGE: torch.Tensor,
    sinks_H: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    tokens: list[int],
    factors: list[float],
    names: str,
    group_name: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Windowed attention of one shard.

    Args:
        q_BSHD: This rank's queries ``[B, S_local, Hq, D]``.
        k_BSGD: This rank's keys ``[B, S_local, Hkv, D]``.
        v_BSGE: This rank's values ``[B, S_local, Hkv, Dv]``.
        sinks_H: Learned sink logits ``[Hq]``, if any.
        cu_seqlens: Boundaries of documents ``[N + 1]``, or ``[B, N + 1]`` for each batch row its own,
            int64 on the CPU, if any.
        tokens: The window's left and right, -1 for unlimited; the first tokens of each document that its
            later tokens see besides their window; and the tokens of the whole sequence.
        factors: The factor on the scores, and their bound, 0.0 for none.
        names: See ``Names``.
        group_name: Process group that shares the sequence; ``""`` if this rank holds all of it.

    Returns:
        out ``[B, S_local, Hq, Dv]``; lse ``[B, Hq, S_local]``; and the K and V rows of other ranks, flat,
        kept for backward. In a graph (see ``Names``) the last has the same size on every rank.
    """
    group = resolve_group(group_name)
    if group is not None and Names.of(names).assumed:
        agree_on_rows(group, q_BSHD.shape[1], tokens[3])
    call = prepare(q_BSHD, v_BSGE, cu_seqlens is not None, tokens, factors, names, group)
    out, lse, kept = empty_results(q_BSHD, k_BSGD, v_BSGE, call.kept_rows)
    # Every rank comes through here, also those that will have nothing to say: making the group is collective.
    group = None if group is None else exchange_group(group, q_BSHD.device)
    for rows, schedule in call.sequences(cu_seqlens, q_BSHD.shape[0]):
        tensors = _rows_of(rows, kept, q_BSHD, k_BSGD, v_BSGE, out, lse)
        schedule.forward(group, call.kernel, call.request, *tensors, sinks_H=sinks_H)
    return out, lse, kept


def attention_backward_on_shard(
    dout_BSHE: torch.Tensor,
    q_BSHD: torch.Tensor,
    k_BSGD: torch.Tensor,
    v_BSGE: torch.Tensor,
    sinks_H: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    out_BSHE: torch.Tensor,
    lse_BHS: torch.Tensor,
    kept: torch.Tensor,
    tokens: list[int],
    factors: list[float],
    names: str,
    group_name: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of ``attention_on_shard``: dq, dk, dv and dsinks, like q, k, v and sinks.

    The gradient of sinks is this shard's contribution; without sinks it is empty.
    """
    group = resolve_group(group_name)
    call = prepare(q_BSHD, v_BSGE, cu_seqlens is not None, tokens, factors, names, group)
    group = None if group is None else exchange_group(group, q_BSHD.device)
    dsinks = None if sinks_H is None else lse_BHS.new_zeros(sinks_H.shape)
    grads = []
    for rows, schedule in call.sequences(cu_seqlens, q_BSHD.shape[0]):
        tensors = _rows_of(rows, kept, dout_BSHE, q_BSHD, k_BSGD, v_BSGE, out_BSHE, lse_BHS)
        grads.append(schedule.backward(group, call.kernel, call.request, *tensors, sinks_H=sinks_H, dsinks_H=dsinks))
    if grads:
        dq, dk, dv = grads[0] if len(grads) == 1 else (torch.cat(parts) for parts in zip(*grads, strict=True))
    else:
        dq, dk, dv = empty_gradients(q_BSHD, k_BSGD, v_BSGE)
    return dq, dk, dv, dq.new_empty(0) if sinks_H is None or dsinks is None else dsinks.to(sinks_H.dtype)


def empty_results(
    q_BSHD: torch.Tensor, k_BSGD: torch.Tensor, v_BSGE: torch.Tensor, kept_rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """out, lse and what is kept for backward, unwritten."""
    batch, rows, heads, _ = q_BSHD.shape
    out = q_BSHD.new_empty(batch, rows, heads, v_BSGE.shape[3])
    lse = q_BSHD.new_empty(batch, heads, rows, dtype=torch.promote_types(q_BSHD.dtype, torch.float32))
    return out, lse, k_BSGD.new_empty(RowShape.of(k_BSGD, v_BSGE).numel(kept_rows))


def empty_gradients(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Gradients of these tensors, unwritten: contiguous, whatever the tensors are."""
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors]


def _rows_of(rows: slice | None, kept: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What belongs to these batch rows, all if None: their part of the flat buffer, and of the tensors."""
    if rows is None:
        return kept, *tensors
    width = kept.numel() // tensors[0].shape[0]
    return cut(kept, slice(rows.start * width, rows.stop * width), 0), *(cut(x, rows, 0) for x in tensors)
