"""Join partial attention results: softmax over two sets of keys from the softmax over each."""

from __future__ import annotations

import torch


def merge_(out: torch.Tensor, lse: torch.Tensor, part_BMHE: torch.Tensor, part_lse_BHM: torch.Tensor) -> None:
    """Fold a partial result into ``out`` and ``lse``, in place.

    With ``L = log(exp(l1) + exp(l2))`` the joint result is ``exp(l1 - L) * o1 + exp(l2 - L) * o2``
    (Dao 2023, arXiv:2307.08691, section 3.1). A row that no part has seen yet has lse ``-inf``; such
    rows stay 0.

    Args:
        out: ``[B, M, H, Dv]``, float32 or wider.
        lse: ``[B, H, M]``.
        part_BMHE: The partial result, of any float dtype.
        part_lse_BHM: Its lse.
    """
    joint = torch.logaddexp(lse, part_lse_BHM)
    base = joint.masked_fill(joint == float("-inf"), 0.0)
    old, new = ((x - base).exp().transpose(1, 2).unsqueeze(-1) for x in (lse, part_lse_BHM))
    out.mul_(old).add_(part_BMHE * new)
    lse.copy_(joint)
