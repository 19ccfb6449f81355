"""All-gather of K and V, on the same kernel as ours."""

from __future__ import annotations

import torch
import torch.distributed as dist

from dtensor_ring_swa.bench.methods import Given, Gradients, Method, attend, attend_backward
from dtensor_ring_swa.bench.wire import GATHER, SCATTER

Partial = tuple[torch.Tensor, torch.Tensor]


class AllGather(Method):
    """All-gather K and V, then one kernel call on the keys that the rows reach.

    Backward uses the gathered K and V that forward kept, and reduce-scatters dk and dv.
    """

    name = "allgather"

    def forward(self, given: Given) -> tuple[Partial, torch.Tensor, torch.Tensor]:
        """Gather and attend."""
        k, v = (self._gather(x)[:, self.case.reached] for x in (given.k, given.v))
        return attend(self.case, given.q, k, v, self.case.band), k, v

    def backward(self, given: Given, state: tuple[Partial, torch.Tensor, torch.Tensor]) -> Gradients:
        """Attend backward and scatter the sums."""
        partial, k, v = state
        # The kernel writes into the rows that it reaches of the buffers to scatter.
        dk, dv = (self._whole(x) for x in (given.k, given.v))
        keys = Given(given.q, k, v, given.dout)
        dq, *_ = attend_backward(
            self.case, keys, partial, self.case.band, (dk[:, self.case.reached], dv[:, self.case.reached])
        )
        return dq, self._scatter(dk, given.k), self._scatter(dv, given.v)

    def output(self, state: tuple[Partial, torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """The output."""
        return state[0][0]

    def predicted_bytes(self) -> tuple[int, int]:
        """Every other rank's rows, either way; what a ring algorithm receives."""
        case = self.case
        numel = (case.environment.ranks - 1) * case.rows * case.row_numel
        return numel * case.request.dtype.itemsize, numel * case.grad_dtype.itemsize

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        """``[B, rows, G, D]`` of all ranks as ``[B, S, G, D]``; a view for one sequence."""
        ranks = self.case.environment.ranks
        whole = x.new_empty(ranks, *x.shape)
        getattr(dist, GATHER)(whole.flatten(0, 1), x, group=self.case.environment.group)
        return whole.movedim(0, 1).flatten(1, 2)

    def _whole(self, like: torch.Tensor) -> torch.Tensor:
        """Zeros ``[B, S, G, D]`` for gradients."""
        case = self.case
        return like.new_zeros(case.batch, case.seq_len, *like.shape[2:], dtype=case.grad_dtype)

    def _scatter(self, whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks of this rank's rows."""
        case = self.case
        by_rank = whole.unflatten(1, (case.environment.ranks, case.rows)).movedim(1, 0).contiguous()
        own = whole.new_empty(like.shape)
        getattr(dist, SCATTER)(own, by_rank.flatten(0, 1), group=case.environment.group)
        return own.to(like.dtype)
