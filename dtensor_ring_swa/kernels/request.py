"""What a kernel is asked, and what it has to offer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from dtensor_ring_swa.block import Call


@dataclass(frozen=True)
class Request:
    """One call in the terms that decide whether a kernel can do it; the same on every rank.

    Attributes:
        device: The device that computes.
        dtype: Dtype of q, k, v and of the result.
        head_dim: Width of q and k.
        v_head_dim: Width of v and of the result.
        scale: Factor on the scores.
        softcap: Scores become ``softcap * tanh(scores / softcap)``; 0.0 leaves them.
        deterministic: Bitwise the same gradients on every run.
        neighbours: Tokens that the window shows besides the query's own; None if it has no limit.
    """

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    v_head_dim: int
    scale: float
    softcap: float = 0.0
    deterministic: bool = False
    neighbours: int | None = None


class Kernel(Protocol):
    """Attention of the rows of a ``Call``. A module with these names is a kernel.

    Shapes: q ``[B, M, Hq, D]``, k ``[B, N, Hkv, D]``, v ``[B, N, Hkv, Dv]``, out ``[B, M, Hq, Dv]``,
    lse ``[B, Hq, M]`` (natural log, float32, or float64 for float64 inputs). Kernels write into the
    tensors they are given, which may be row slices of larger ones.
    """

    @property
    def NAME(self) -> str:
        """What ``kernel=`` calls it."""
        ...

    def supports(self, request: Request) -> str | None:
        """None, or why the request cannot be served here and what can."""
        ...

    def partial_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The widest dtype in which it writes partial results, to be joined or added, for inputs of ``dtype``."""
        ...

    def forward(
        self,
        request: Request,
        q_BMHD: torch.Tensor,
        k_BNGD: torch.Tensor,
        v_BNGE: torch.Tensor,
        call: Call,
        out_BMHE: torch.Tensor,
        lse_BHM: torch.Tensor,
        sinks_H: torch.Tensor | None = None,
    ) -> None:
        """Write out and lse of all rows, joined with learned sinks if there are any.

        A row that sees no key gets 0 and ``-inf``, or the sink.
        """
        ...

    def backward(
        self,
        request: Request,
        dout_BMHE: torch.Tensor,
        q_BMHD: torch.Tensor,
        k_BNGD: torch.Tensor,
        v_BNGE: torch.Tensor,
        out_BMHE: torch.Tensor,
        lse_BHM: torch.Tensor,
        call: Call,
        dq_BMHD: torch.Tensor,
        dk_BNGD: torch.Tensor,
        dv_BNGE: torch.Tensor,
        sinks_H: torch.Tensor | None = None,
        dsinks_H: torch.Tensor | None = None,
    ) -> None:
        """Write dq of all rows, in q's dtype or ``partial_dtype``, and dk and dv of all keys, in ``partial_dtype``.

        With learned sinks, out and lse are the joint ones, and the call's share of their gradient is
        added to ``dsinks_H`` (lse's dtype).
        """
        ...
