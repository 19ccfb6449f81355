"""The registered ops: attention, forward and backward.

One op a direction. On plain tensors an op works on this rank's shard, with the exchange inside; with
no group the shard is the whole sequence. On DTensors ``dtensor.py`` attaches a rule that unwraps them
and calls the same op on the shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from dtensor_ring_swa.autocast import without_autocast
from dtensor_ring_swa.exchange import Rows
from dtensor_ring_swa.kernels import Request, choose
from dtensor_ring_swa.schedule import Geometry, Schedule
from dtensor_ring_swa.window import Window


class Names(NamedTuple):
    """What a caller asks for by name, as one argument of the ops.

    ``assumed`` says that the length of the sequence was taken from equal shards, which the ranks have yet to compare.

    Torch's autograd wrapper of registered ops takes time that grows with the square of their number of
    arguments (seen on torch 2.13: 257 us for 17, on a slow core), so that the ops have few.
    """

    kernel: str
    layout: str
    load_balance: str
    exchange: str
    deterministic: bool
    assumed: bool = False

    @property
    def text(self) -> str:
        """The argument."""
        gradients = "deterministic" if self.deterministic else "any"
        length = "assumed" if self.assumed else "known"
        return f"{self.kernel} {self.layout} {self.load_balance} {self.exchange} {gradients} {length}"

    @classmethod
    def of(cls, text: str) -> Names:
        """Read the argument."""
        kernel, layout, load_balance, exchange, gradients, length = text.split()
        return cls(kernel, layout, load_balance, exchange, gradients == "deterministic", length == "assumed")


# torch.compile(mode="reduce-overhead") makes CUDA graphs, from here on of what is around the ops: in the memory that it
# gives to a graph it must not find the integers that kernels keep on the device for later calls.
_TAGS = (torch.Tag.cudagraph_unsafe,)


@torch.library.custom_op("dtensor_ring_swa::attention", mutates_args=(), tags=_TAGS)
@without_autocast
def attention(
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
        kept for backward. The last has the same size on every rank, so that shapes do not depend on ranks.
    """
    asked = Names.of(names)
    geometry = _geometry(tokens, asked, group_name)
    if asked.assumed:
        geometry.compare_rows(q_BSHD.shape[1])
    geometry.check_rows(q_BSHD.shape[1])
    request = _request(q_BSHD, v_BSGE, geometry.window, factors, asked)
    chosen = choose(asked.kernel, request)
    out, lse, kept = _empty_results(q_BSHD, k_BSGD, v_BSGE, geometry.kept_rows(cu_seqlens is not None))
    for rows, schedule in _sequences(geometry, cu_seqlens, q_BSHD.shape[0]):
        halo = _rows_of(kept, rows, q_BSHD.shape[0])
        schedule.forward(chosen, request, q_BSHD[rows], k_BSGD[rows], v_BSGE[rows], halo, out[rows], lse[rows], sinks_H)
    return out, lse, kept


@torch.library.custom_op("dtensor_ring_swa::attention_backward", mutates_args=(), tags=_TAGS)
@without_autocast
def attention_backward(
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
    asked = Names.of(names)
    geometry = _geometry(tokens, asked, group_name)
    request = _request(q_BSHD, v_BSGE, geometry.window, factors, asked)
    chosen = choose(asked.kernel, request)
    dsinks = None if sinks_H is None else lse_BHS.new_zeros(sinks_H.shape)
    grads = []
    for rows, schedule in _sequences(geometry, cu_seqlens, q_BSHD.shape[0]):
        halo = _rows_of(kept, rows, q_BSHD.shape[0])
        share = schedule.backward(
            chosen, request, dout_BSHE[rows], q_BSHD[rows], k_BSGD[rows], v_BSGE[rows], out_BSHE[rows], lse_BHS[rows],
            halo, sinks_H, dsinks,
        )  # fmt: skip
        grads.append(share)
    if grads:
        dq, dk, dv = grads[0] if len(grads) == 1 else (torch.cat(parts) for parts in zip(*grads, strict=True))
    else:
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q_BSHD, k_BSGD, v_BSGE))
    return dq, dk, dv, dq.new_empty(0) if sinks_H is None or dsinks is None else dsinks.to(sinks_H.dtype)


@attention.register_fake
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
    geometry = _geometry(tokens, Names.of(names), group_name)
    return _empty_results(q_BSHD, k_BSGD, v_BSGE, geometry.kept_rows(cu_seqlens is not None))


@attention_backward.register_fake
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


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    *tensors, ctx.attributes = *inputs[:5], inputs[5:]
    out, lse, kept = output
    ctx.mark_non_differentiable(lse, kept)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, out, lse, kept)


def _backward(ctx: Any, dout: torch.Tensor | None, *_: None) -> tuple[torch.Tensor | None, ...]:
    if dout is None:
        return (None,) * (5 + len(ctx.attributes))
    q, k, v, sinks, cu_seqlens, out, lse, kept = ctx.saved_tensors
    dq, dk, dv, dsinks = attention_backward(dout, q, k, v, sinks, cu_seqlens, out, lse, kept, *ctx.attributes)
    return (dq, dk, dv, None if sinks is None else dsinks, None, *(None for _ in ctx.attributes))


attention.register_autograd(_backward, setup_context=_setup_context)


def _sequences(geometry: Geometry, cu_seqlens: torch.Tensor | None, batch: int) -> list[tuple[slice, Schedule]]:
    """Schedules and the batch rows that follow each: all of them, or where rows have own documents, one.

    A rank without batch rows, as an uneven split over data parallelism leaves, has nothing to do: its peers in the
    sequence hold the same rows.
    """
    if not batch:
        return []
    if cu_seqlens is None or cu_seqlens.ndim == 1:
        return [(slice(0, batch), Schedule(geometry, None if cu_seqlens is None else tuple(cu_seqlens.tolist())))]
    return [
        (slice(row, row + 1), Schedule(geometry, tuple(boundaries)))
        for row, boundaries in enumerate(cu_seqlens.tolist())
    ]


def _rows_of(kept: torch.Tensor, rows: slice, batch: int) -> torch.Tensor:
    """The part of the flat buffer that belongs to these batch rows."""
    width = kept.numel() // max(batch, 1)
    return kept[rows.start * width : rows.stop * width]


def _geometry(tokens: Sequence[int], names: Names, group_name: str) -> Geometry:
    left, right, sink_tokens, seq_len = tokens
    # torch.compile(dynamic=True) makes these symbolic, too; a graph is for one window.
    window = Window(int(left), int(right))
    return Geometry(window, int(sink_tokens), names.layout, names.load_balance, names.exchange, seq_len, group_name)


def _request(
    q_BSHD: torch.Tensor, v_BSGE: torch.Tensor, window: Window, factors: Sequence[float], names: Names
) -> Request:
    left, right = window.sides
    reach = None if left is None or right is None else left + right
    scale, softcap = factors
    return Request(
        q_BSHD.device, q_BSHD.dtype, q_BSHD.shape[3], v_BSGE.shape[3], scale, softcap, names.deterministic, reach
    )  # fmt: skip


def _empty_results(
    q_BSHD: torch.Tensor, k_BSGD: torch.Tensor, v_BSGE: torch.Tensor, kept_rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """out, lse and halo, unwritten; their shapes are the same on all ranks with as many rows."""
    batch, rows, heads, _ = q_BSHD.shape
    out = q_BSHD.new_empty(batch, rows, heads, v_BSGE.shape[3])
    lse = q_BSHD.new_empty(batch, heads, rows, dtype=torch.promote_types(q_BSHD.dtype, torch.float32))
    return out, lse, k_BSGD.new_empty(Rows.of(k_BSGD, v_BSGE).numel(kept_rows))
