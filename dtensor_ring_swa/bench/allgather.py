"""All-gather of K and V, on the same kernel as ours."""

from __future__ import annotations

import torch
import torch.distributed as dist

from dtensor_ring_swa.band import Band
from dtensor_ring_swa.bench.case import Case
from dtensor_ring_swa.bench.extras import Extras
from dtensor_ring_swa.bench.methods import Given, Gradients, Method, attend, attend_backward
from dtensor_ring_swa.bench.shapes import Shape
from dtensor_ring_swa.bench.wire import GATHER, SCATTER
from dtensor_ring_swa.layout import Run, runs

State = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class AllGather(Method):
    """All-gather K and V, then one kernel call for each run of rows, on the keys that it reaches.

    Backward uses the gathered K and V that forward kept, and reduce-scatters dk and dv.
    """

    name = "allgather"

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        ranks = case.environment.ranks
        self._held = [runs(self.layout, case.seq_len, ranks, rank) for rank in range(ranks)]
        self._calls: list[tuple[slice, slice, Band]] = []
        (left, right), first = case.reach, 0
        for run in self._held[case.environment.rank]:
            keys = Run(max(0, run.start - left), min(case.seq_len, run.stop + right))
            band = Band.between(run, keys, *case.shape.window.sides)
            self._calls.append((slice(first, first + len(run)), slice(keys.start, keys.stop), band))
            first += len(run)

    def forward(self, given: Given) -> State:
        """Gather and attend."""
        k, v = (self._gather(x) for x in (given.k, given.v))
        parts = [attend(self.case, given.q[:, rows], k[:, keys], v[:, keys], band) for rows, keys, band in self._calls]
        outs, lses = zip(*parts, strict=True)
        return _joined(outs, 1), _joined(lses, 2), k, v

    def backward(self, given: Given, state: State) -> Gradients:
        """Attend backward and scatter the sums."""
        out, lse, k, v = state
        case, dq = self.case, []
        dk, dv = (x.new_zeros(x.shape, dtype=case.grad_dtype) for x in (k, v))
        for call, (rows, keys, band) in enumerate(self._calls):
            # The kernel writes into the rows that it reaches of the buffers to scatter; a second call is added.
            whole = (dk[:, keys], dv[:, keys])
            into = tuple(torch.empty_like(x) for x in whole) if call else whole
            part = Given(given.q[:, rows], k[:, keys], v[:, keys], given.dout[:, rows])
            dq.append(attend_backward(case, part, (out[:, rows], lse[:, :, rows]), band, (into[0], into[1]))[0])
            for total, share in zip(whole, into, strict=True):
                if call:
                    total += share
        return _joined(dq, 1), self._scatter(dk, given.k), self._scatter(dv, given.v)

    def output(self, state: State) -> torch.Tensor:
        """The output."""
        return state[0]

    def predicted_bytes(self) -> tuple[int, int]:
        """Every other rank's rows, either way; what a ring algorithm receives."""
        case = self.case
        numel = (case.environment.ranks - 1) * case.rows * case.row_numel
        return numel * case.request.dtype.itemsize, numel * case.grad_dtype.itemsize

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        """``[B, rows, G, D]`` of all ranks as ``[B, S, G, D]`` in the order of the sequence.

        A view for one sequence in contiguous shards.
        """
        by_rank = x.new_empty(self.case.environment.ranks, *x.shape)
        getattr(dist, GATHER)(by_rank.flatten(0, 1), x, group=self.case.environment.group)
        if self.layout == "contiguous":
            return by_rank.movedim(0, 1).flatten(1, 2)
        parts: dict[int, torch.Tensor] = {}
        for rows, held in zip(by_rank, self._held, strict=True):
            pieces = rows.split([len(run) for run in held], dim=1)
            parts |= {run.start: piece for run, piece in zip(held, pieces, strict=True)}
        return torch.cat([parts[start] for start in sorted(parts)], dim=1)

    def _scatter(self, whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks of this rank's rows."""
        case = self.case
        if self.layout != "contiguous":
            whole = torch.cat([whole[:, run.start : run.stop] for held in self._held for run in held], dim=1)
        by_rank = whole.unflatten(1, (case.environment.ranks, case.rows)).movedim(1, 0).contiguous()
        own = whole.new_empty(like.shape)
        getattr(dist, SCATTER)(own, by_rank.flatten(0, 1), group=case.environment.group)
        return own.to(like.dtype)


class AllGatherZigzag(AllGather):
    """The same with the rows dealt head to tail, as Llama 3 was trained: each rank has equal work."""

    name = "allgather-zigzag"
    layout = "zigzag"

    @classmethod
    def suits(cls, shape: Shape, extras: Extras) -> bool:
        """Where contiguous shards have unequal work."""
        return shape.lopsided

    @classmethod
    def gap(cls, case: Case) -> str | None:
        """Whether the length divides."""
        try:
            runs(cls.layout, case.seq_len, case.environment.ranks, 0)
        except ValueError as problem:
            return str(problem)
        return None


def _joined(parts: list[torch.Tensor] | tuple[torch.Tensor, ...], dim: int) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)
