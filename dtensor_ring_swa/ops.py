"""The registered ops: attention, forward and backward.

One op a direction. On plain tensors an op works on this rank's shard, with the exchange inside; with
no group the shard is the whole sequence. On DTensors ``dtensor.py`` attaches a rule that unwraps them
and calls the same op on the shards.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import ProcessGroup

from dtensor_ring_swa.agreement import agree_on_rows
from dtensor_ring_swa.autocast import without_autocast
from dtensor_ring_swa.cut import cut
from dtensor_ring_swa.groups import exchange_group, resolve_group
from dtensor_ring_swa.library import below_autograd, define, differentiate
from dtensor_ring_swa.options import Names
from dtensor_ring_swa.prepare import kept_rows, prepare
from dtensor_ring_swa.wire import RowShape


def _attention(
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
    group = _group(group_name)
    if group is not None and Names.of(names).assumed:
        agree_on_rows(group, q_BSHD.shape[1], tokens[3])
    call = prepare(q_BSHD, v_BSGE, cu_seqlens is not None, tokens, factors, names, group)
    out, lse, kept = _empty_results(q_BSHD, k_BSGD, v_BSGE, call.kept_rows)
    # Every rank comes through here, also those that will have nothing to say: making the group is collective.
    group = None if group is None else exchange_group(group, q_BSHD.device)
    for rows, schedule in call.sequences(cu_seqlens, q_BSHD.shape[0]):
        tensors = _rows_of(rows, kept, q_BSHD, k_BSGD, v_BSGE, out, lse)
        schedule.forward(group, call.kernel, call.request, *tensors, sinks_H=sinks_H)
    return out, lse, kept


def _attention_backward(
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
    """The gradients of ``attention``: dq, dk, dv and dsinks, like q, k, v and sinks.

    The gradient of sinks is this shard's contribution; without sinks it is empty.
    """
    group = _group(group_name)
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
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q_BSHD, k_BSGD, v_BSGE))
    return dq, dk, dv, dq.new_empty(0) if sinks_H is None or dsinks is None else dsinks.to(sinks_H.dtype)


attention = define("attention", without_autocast(_attention))
attention_backward = define("attention_backward", without_autocast(_attention_backward))


@torch.library.register_fake(attention)
def _(
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
    rows = kept_rows(tokens, names, cu_seqlens is not None, _group(group_name))
    return _empty_results(q_BSHD, k_BSGD, v_BSGE, rows)


@torch.library.register_fake(attention_backward)
def _(
    dout_BSHE: torch.Tensor,
    q_BSHD: torch.Tensor,
    k_BSGD: torch.Tensor,
    v_BSGE: torch.Tensor,
    sinks_H: torch.Tensor | None,
    *_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q_BSHD, k_BSGD, v_BSGE))
    return dq, dk, dv, dq.new_empty(0) if sinks_H is None else torch.empty_like(sinks_H)


class _Attention(torch.autograd.Function):
    """Saves what backward needs, and calls the op of the other direction."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[torch.Tensor, ...]:
        out, lse, kept = below_autograd(attention, *args)
        ctx.mark_non_differentiable(lse, kept)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*args[:5], out, lse, kept)
        ctx.attributes = args[5:]
        return out, lse, kept

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        dout = grads[0]
        if dout is None:
            return (None,) * (5 + len(ctx.attributes))
        q, k, v, sinks, cu_seqlens, out, lse, kept = ctx.saved_tensors
        dq, dk, dv, dsinks = attention_backward(dout, q, k, v, sinks, cu_seqlens, out, lse, kept, *ctx.attributes)
        return (dq, dk, dv, None if sinks is None else dsinks, None, *(None for _ in ctx.attributes))


class _AttentionBackward(torch.autograd.Function):
    """Says that it ends here, where gradients are to be differentiated again."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[torch.Tensor, ...]:
        return below_autograd(attention_backward, *args)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        raise RuntimeError(
            f"{attention_backward} has no autograd formula: gradients of ring_attention cannot be differentiated again"
        )


differentiate(attention, _Attention, 4)
differentiate(attention_backward, _AttentionBackward, 9)


def _group(name: str) -> ProcessGroup | None:
    return resolve_group(name) if name else None


def _rows_of(rows: slice | None, kept: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What belongs to these batch rows, all if None: their part of the flat buffer, and of the tensors."""
    if rows is None:
        return kept, *tensors
    width = kept.numel() // tensors[0].shape[0]
    return cut(kept, slice(rows.start * width, rows.stop * width), 0), *(cut(x, rows, 0) for x in tensors)


def _empty_results(
    q_BSHD: torch.Tensor, k_BSGD: torch.Tensor, v_BSGE: torch.Tensor, kept_rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """out, lse and what is kept for backward, unwritten."""
    batch, rows, heads, _ = q_BSHD.shape
    out = q_BSHD.new_empty(batch, rows, heads, v_BSGE.shape[3])
    lse = q_BSHD.new_empty(batch, heads, rows, dtype=torch.promote_types(q_BSHD.dtype, torch.float32))
    return out, lse, k_BSGD.new_empty(RowShape.of(k_BSGD, v_BSGE).numel(kept_rows))
