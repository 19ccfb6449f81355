"""The registered ops: attention, forward and backward.

One op a direction. On plain tensors an op works on this rank's shard, see ``on_shard.py``. On DTensors
``dtensor.py`` attaches a rule that unwraps them and calls the same op on the shards.
"""

from __future__ import annotations

from typing import Any

import torch

from dtensor_ring_swa.autocast import without_autocast
from dtensor_ring_swa.groups import resolve_group
from dtensor_ring_swa.library import below_autograd, define, differentiate
from dtensor_ring_swa.on_shard import attention_backward_on_shard, attention_on_shard, empty_gradients, empty_results
from dtensor_ring_swa.prepare import kept_rows

attention = define("attention", without_autocast(attention_on_shard))
attention_backward = define("attention_backward", without_autocast(attention_backward_on_shard))


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
    rows = kept_rows(tokens, names, cu_seqlens is not None, resolve_group(group_name))
    return empty_results(q_BSHD, k_BSGD, v_BSGE, rows)


@torch.library.register_fake(attention_backward)
def _(
    dout_BSHE: torch.Tensor,
    q_BSHD: torch.Tensor,
    k_BSGD: torch.Tensor,
    v_BSGE: torch.Tensor,
    sinks_H: torch.Tensor | None,
    *_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    dq, dk, dv = empty_gradients(q_BSHD, k_BSGD, v_BSGE)
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


# A gradient may be asked of q, k, v and sinks; and of all tensors that backward takes.
differentiate(attention, _Attention, 4)
differentiate(attention_backward, _AttentionBackward, 9)
