"""Random inputs of a case, in any layout."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from dtensor_ring_swa.bench.case import Case
from dtensor_ring_swa.layout import Run, runs

_TENSORS = ("q", "k", "v", "dout")


@dataclass(frozen=True)
class Inputs:
    """One set of random inputs. Any rank can make any rank's shard, so baselines need no set-up messages.

    The sequence is the same whatever the layout; it is made in contiguous shards.
    """

    case: Case
    index: int
    _own: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)

    def own(self, tensor: str, layout: str = "contiguous") -> torch.Tensor:
        """This rank's rows of ``"q"``, ``"k"``, ``"v"`` or ``"dout"``, made once and shared."""
        if (tensor, layout) not in self._own:
            environment = self.case.environment
            held = runs(layout, self.case.seq_len, environment.ranks, environment.rank)
            parts = [self.run_of(tensor, run) for run in held]
            self._own[tensor, layout] = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return self._own[tensor, layout]

    def shard(self, tensor: str, rank: int) -> torch.Tensor:
        """``rank``'s contiguous shard."""
        case, shape = self.case, self.case.shape
        seed = (self.index * case.environment.ranks + rank) * len(_TENSORS) + _TENSORS.index(tensor)
        generator = torch.Generator(case.request.device).manual_seed(seed)
        heads = shape.q_heads if tensor in ("q", "dout") else shape.kv_heads
        width = shape.head_dim if tensor in ("q", "k") else shape.v_head_dim
        size = (case.batch, case.rows, heads, width)
        return torch.randn(size, dtype=case.request.dtype, device=case.request.device, generator=generator)

    def whole(self, tensor: str) -> torch.Tensor:
        """The whole sequence."""
        return self.run_of(tensor, Run(0, self.case.seq_len))

    def run_of(self, tensor: str, run: Run) -> torch.Tensor:
        """The rows at these global positions, wherever they lie."""
        rows = self.case.rows
        parts = []
        for rank in range(run.start // rows, -(-run.stop // rows)):
            begin = rank * rows
            first = max(run.start, begin + (run.start - begin) % run.step)
            parts.append(self.shard(tensor, rank)[:, first - begin : min(run.stop - begin, rows) : run.step])
        return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, dim=1)
