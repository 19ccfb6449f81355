"""The registered ops: attention, forward and backward.

One op a direction. On plain tensors an op works on this rank's shard, with the exchange inside; with
no group the shard is the whole sequence. On DTensors ``dtensor.py`` attaches a rule that unwraps them
and calls the same op on the shards.
"""

from __future__ import annotations

from typing import Any

import torch

from dtensor_ring_swa.exchange import Rows
from dtensor_ring_swa.kernels import Request, choose
from dtensor_ring_swa.schedule import Schedule


@torch.library.custom_op("dtensor_ring_swa::attention", mutates_args=())
def attention(
    q_BSHD: torch.Tensor,
    k_BSGD: torch.Tensor,
    v_BSGE: torch.Tensor,
    left: int,
    right: int,
    scale: float,
    softcap: float,
    kernel: str,
    deterministic: bool,
    layout: str,
    load_balance: str,
    seq_len: int,
    group_name: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Windowed attention of one shard.

    Args:
        q_BSHD: This rank's queries ``[B, S_local, Hq, D]``.
        k_BSGD: This rank's keys ``[B, S_local, Hkv, D]``.
        v_BSGE: This rank's values ``[B, S_local, Hkv, Dv]``.
        left: Earlier tokens visible; -1 is unlimited.
        right: Later tokens visible; -1 is unlimited.
        scale: Factor on the scores.
        softcap: Bound on the scores, 0.0 for none.
        kernel: A kernel's name or ``"auto"``.
        deterministic: Whether gradients must be bitwise reproducible.
        layout: How positions lie on the ranks.
        load_balance: Whether to compute contiguous shards in another layout: see ``balanced_layout``.
        seq_len: Tokens of the whole sequence.
        group_name: Process group that shares the sequence; ``""`` if this rank holds all of it.

    Returns:
        out ``[B, S_local, Hq, Dv]``; lse ``[B, Hq, S_local]``; and the halo's K and V rows, flat, kept
        for backward. The last has the same size on every rank, so that shapes do not depend on ranks.
    """
    schedule = Schedule.of(left, right, layout, load_balance, seq_len, group_name)
    schedule.check_rows(q_BSHD.shape[1])
    request = _request(q_BSHD, v_BSGE, scale, softcap, deterministic)
    chosen = choose(kernel, request)
    out, lse, halo = _empty_results(q_BSHD, k_BSGD, v_BSGE, schedule.halo_rows)
    schedule.forward(chosen, request, q_BSHD, k_BSGD, v_BSGE, halo, out, lse)
    return out, lse, halo


@torch.library.custom_op("dtensor_ring_swa::attention_backward", mutates_args=())
def attention_backward(
    dout_BSHE: torch.Tensor,
    q_BSHD: torch.Tensor,
    k_BSGD: torch.Tensor,
    v_BSGE: torch.Tensor,
    out_BSHE: torch.Tensor,
    lse_BHS: torch.Tensor,
    halo: torch.Tensor,
    left: int,
    right: int,
    scale: float,
    softcap: float,
    kernel: str,
    deterministic: bool,
    layout: str,
    load_balance: str,
    seq_len: int,
    group_name: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of ``attention``: dq, dk and dv, like q, k and v."""
    schedule = Schedule.of(left, right, layout, load_balance, seq_len, group_name)
    request = _request(q_BSHD, v_BSGE, scale, softcap, deterministic)
    chosen = choose(kernel, request)
    return schedule.backward(chosen, request, dout_BSHE, q_BSHD, k_BSGD, v_BSGE, out_BSHE, lse_BHS, halo)


@attention.register_fake
def _(
    q_BSHD: torch.Tensor,
    k_BSGD: torch.Tensor,
    v_BSGE: torch.Tensor,
    left: int,
    right: int,
    scale: float,
    softcap: float,
    kernel: str,
    deterministic: bool,
    layout: str,
    load_balance: str,
    seq_len: int,
    group_name: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    schedule = Schedule.of(left, right, layout, load_balance, seq_len, group_name)
    return _empty_results(q_BSHD, k_BSGD, v_BSGE, schedule.halo_rows)


@attention_backward.register_fake
def _(
    dout_BSHE: torch.Tensor, q_BSHD: torch.Tensor, k_BSGD: torch.Tensor, v_BSGE: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q_BSHD, k_BSGD, v_BSGE))
    return dq, dk, dv


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    q, k, v, *ctx.attributes = inputs
    out, lse, halo = output
    ctx.mark_non_differentiable(lse, halo)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, out, lse, halo)


def _backward(ctx: Any, dout: torch.Tensor | None, *_: None) -> tuple[torch.Tensor | None, ...]:
    if dout is None:
        return (None,) * (3 + len(ctx.attributes))
    grads = attention_backward(dout, *ctx.saved_tensors, *ctx.attributes)
    return (*grads, *(None for _ in ctx.attributes))


attention.register_autograd(_backward, setup_context=_setup_context)


def _request(q_BSHD: torch.Tensor, v_BSGE: torch.Tensor, scale: float, softcap: float, deterministic: bool) -> Request:
    return Request(q_BSHD.device, q_BSHD.dtype, q_BSHD.shape[3], v_BSGE.shape[3], scale, softcap, deterministic)


def _empty_results(
    q_BSHD: torch.Tensor, k_BSGD: torch.Tensor, v_BSGE: torch.Tensor, halo_rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """out, lse and halo, unwritten; their shapes are the same on all ranks with as many rows."""
    batch, rows, heads, _ = q_BSHD.shape
    out = q_BSHD.new_empty(batch, rows, heads, v_BSGE.shape[3])
    lse = q_BSHD.new_empty(batch, heads, rows, dtype=torch.promote_types(q_BSHD.dtype, torch.float32))
    return out, lse, k_BSGD.new_empty(Rows.of(k_BSGD, v_BSGE).numel(halo_rows))
