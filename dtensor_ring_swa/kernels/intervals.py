"""Calls as intervals: which run of keys each query row sees, and which run of queries sees each key row.

A row that is in several blocks has an interval in several layers. Intervals are int32 tensors on the
device, made there from a few integers a block, and kept: the layers of a model share their calls.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

import torch

from dtensor_ring_swa.block import Block, Call, in_layers
from dtensor_ring_swa.device import cached_per_stream, to_device

# Calls that are kept; the intervals of one take 8 bytes a row and layer.
KEPT = 64
# A tile walks from the first to the last row that any of its rows sees. Rows closer than this may share
# a tile, and what they see has to lie closer than this too.
_NEAR = 128
_FAR = 2**31 - 1


@dataclass(frozen=True)
class _Span:
    """Rows ``first:last`` see, of ``length`` rows from ``start`` on, those whose distance is in the band."""

    first: int
    last: int
    start: int
    length: int
    lower: int
    upper: int

    @classmethod
    def of_queries(cls, block: Block) -> _Span:
        return cls(block.q_start, block.q_stop, block.k_start, block.k_len, block.band.lower, block.band.upper)

    @classmethod
    def of_keys(cls, block: Block) -> _Span:
        return cls(block.k_start, block.k_stop, block.q_start, block.q_len, -block.band.upper, -block.band.lower)

    def seen_from(self, first: int, last: int) -> tuple[int, int]:
        """Bounds of what the rows ``first:last``, counted from the span's first, see."""
        lo, hi = max(first + self.lower, 0), max(last + self.upper, 0)
        return self.start + min(lo, self.length), self.start + min(hi, self.length)

    def may_precede(self, other: _Span) -> bool:
        """Whether both may lie in one layer: no row is in both, and rows of one tile see what is near."""
        if not 0 <= other.first - self.last < _NEAR:
            return self.last <= other.first
        rows = self.last - self.first
        (lo, hi), (other_lo, other_hi) = self.seen_from(max(0, rows - _NEAR), rows), other.seen_from(0, _NEAR)
        return max(other_lo - hi, lo - other_hi) <= _NEAR


@cached_per_stream(KEPT)
def intervals_of_queries(call: Call, device: torch.device) -> torch.Tensor:
    """The keys that each query row sees: int32 ``[layers, 2, q_len]``, first and end; 0 and 0 if none."""
    return _intervals([_Span.of_queries(block) for block in call.blocks], call.q_len, device)


@cached_per_stream(KEPT)
def intervals_of_keys(call: Call, device: torch.device) -> torch.Tensor:
    """The queries that see each key row: int32 ``[layers, 2, k_len]``, first and end; 0 and 0 if none."""
    return _intervals([_Span.of_keys(block) for block in call.blocks], call.k_len, device)


def _intervals(spans: list[_Span], count: int, device: torch.device) -> torch.Tensor:
    layers = in_layers(sorted(spans, key=lambda span: span.first), _Span.may_precede) or [[]]
    longest = max(1, *map(len, layers))
    padding = _Span(_FAR, _FAR, 0, 0, 0, 0)
    table = to_device(
        [[astuple(span) for span in layer + [padding] * (longest - len(layer))] for layer in layers], device
    )
    rows = torch.arange(count, dtype=torch.int32, device=device).repeat(len(layers), 1)
    index = torch.searchsorted(table[..., 0].contiguous(), rows, right=True).sub_(1).clamp_(min=0)
    first, last, start, length, lower, upper = (column.gather(1, index) for column in table.unbind(-1))
    lo = start + torch.minimum((rows - first + lower).clamp_(min=0), length)
    hi = start + torch.minimum((rows - first + upper + 1).clamp_(min=0), length)
    hidden = (rows < first) | (rows >= last) | (lo >= hi)
    return torch.stack((lo, hi), dim=1).masked_fill_(hidden[:, None], 0)
