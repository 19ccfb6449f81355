"""Join partial attention results: softmax over two sets of keys from the softmax over each."""

from __future__ import annotations

import importlib
from functools import lru_cache
from types import ModuleType

import torch

# Rows of a learned sink's gradient to take at a time, which bounds the memory.
_SINK_ROWS = 4096


def merge_(out: torch.Tensor, lse: torch.Tensor, part_BMHE: torch.Tensor, part_lse_BHM: torch.Tensor) -> None:
    """Fold a partial result into ``out`` and ``lse``, in place.

    With ``L = log(exp(l1) + exp(l2))`` the joint result is ``exp(l1 - L) * o1 + exp(l2 - L) * o2``
    (Dao 2023, arXiv:2307.08691, section 3.1). A row that no part has seen yet has lse ``-inf``; such
    rows stay 0.

    Args:
        out: ``[B, M, H, Dv]``, of any float dtype; the sum is taken in lse's, and rounded once.
        lse: ``[B, H, M]``.
        part_BMHE: The partial result, of any float dtype.
        part_lse_BHM: Its lse.
    """
    fused = _fused(out, lse, part_BMHE, part_lse_BHM)
    if fused is not None:
        fused.merge_(out, lse, part_BMHE, part_lse_BHM)
        return
    joint = torch.logaddexp(lse, part_lse_BHM)
    base = joint.masked_fill(joint == float("-inf"), 0.0)
    old, new = ((x - base).exp().transpose(1, 2).unsqueeze(-1) for x in (lse, part_lse_BHM))
    out.copy_((out * old).add_(part_BMHE * new))
    lse.copy_(joint)


def _fused(out: torch.Tensor, lse: torch.Tensor, *parts: torch.Tensor) -> ModuleType | None:
    """The Triton program, where it can be used: it reads and writes each element once."""
    suits = out.is_cuda and torch.version.hip is None and lse.dtype == torch.float32
    return _triton() if suits and all(x.stride(-1) == 1 for x in (out, lse, *parts)) else None


@lru_cache(maxsize=1)
def _triton() -> ModuleType | None:
    try:
        return importlib.import_module("dtensor_ring_swa.merge_triton")
    except ImportError:
        return None


def join_sinks_(out: torch.Tensor, lse: torch.Tensor, sinks_H: torch.Tensor) -> None:
    """Fold learned sinks into ``out`` and ``lse``, in place: a sink is the partial result (0, sink).

    Args:
        out: ``[B, M, H, Dv]``, of any float dtype.
        lse: ``[B, H, M]``.
        sinks_H: A logit a head.
    """
    joint = torch.logaddexp(lse, sinks_H.to(lse.dtype)[:, None])
    share = (lse - joint.masked_fill(joint == float("-inf"), 0.0)).exp()
    out.mul_(share.transpose(1, 2).unsqueeze(-1))
    lse.copy_(joint)


def add_sinks_gradient_(
    dsinks_H: torch.Tensor | None,
    sinks_H: torch.Tensor | None,
    dout_BMHE: torch.Tensor,
    out_BMHE: torch.Tensor,
    lse_BHM: torch.Tensor,
) -> None:
    """Add the gradient of learned sinks, from the joint out and lse, to ``dsinks_H``; nothing if there are none.

    A sink's share of a row's softmax is ``p = exp(sink - lse)`` and its value is zero, so that its
    gradient is ``-sum p * rowsum(dout * out)`` (the row term of Dao 2023, arXiv:2307.08691, section 3.1.2).

    Args:
        dsinks_H: The sum, in lse's dtype; None without sinks.
        sinks_H: A logit a head; None without sinks.
        dout_BMHE: Gradient of out.
        out_BMHE: The joint result.
        lse_BHM: The joint lse.
    """
    if sinks_H is None or dsinks_H is None:
        return
    total = lse_BHM.new_zeros(sinks_H.shape)
    sinks = sinks_H.to(lse_BHM.dtype)[:, None]
    for first in range(0, out_BMHE.shape[1], _SINK_ROWS):
        span = slice(first, first + _SINK_ROWS)
        row_sums = (dout_BMHE[:, span].to(lse_BHM.dtype) * out_BMHE[:, span]).sum(-1).transpose(1, 2)
        # Where the sink is -inf, so may the lse be, and the share is none.
        share = (sinks - lse_BHM[:, :, span]).exp().masked_fill(sinks == float("-inf"), 0.0)
        total -= (share * row_sums).sum((0, 2))
    dsinks_H += total
