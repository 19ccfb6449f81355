"""Calls as intervals: which run of keys each query row sees, and which run of queries sees each key row.

A row that is in several blocks has an interval in several layers. Intervals are int32 tensors on the
device, made there from a few integers a block, and kept: the layers of a model share their calls.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from functools import lru_cache

import torch

from dtensor_ring_swa.block import Block, Call

# Calls whose intervals are kept; each costs 8 bytes a row and layer.
_KEPT = 64
# A kernel's tile walks from the first to the last row that any of its rows sees. Rows closer than this
# may share a tile, and what they see has to lie closer than this too.
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

    def seen_from(self, first: int, last: int) -> tuple[int, int]:
        """Bounds of what the rows ``first:last``, counted from the span's first, see."""
        lo, hi = max(first + self.lower, 0), max(last + self.upper, 0)
        return self.start + min(lo, self.length), self.start + min(hi, self.length)


def intervals_of_queries(call: Call, device: torch.device) -> torch.Tensor:
    """The keys that each query row sees: int32 ``[layers, 2, q_len]``, first and end; 0 and 0 if none."""
    return _intervals(call, False, device, _stream(device))


def intervals_of_keys(call: Call, device: torch.device) -> torch.Tensor:
    """The queries that see each key row: int32 ``[layers, 2, k_len]``, first and end; 0 and 0 if none."""
    return _intervals(call, True, device, _stream(device))


def _stream(device: torch.device) -> int:
    """What was queued on one stream must not be read on another, so each has its own."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


@lru_cache(maxsize=_KEPT)
def _intervals(call: Call, of_keys: bool, device: torch.device, stream: int) -> torch.Tensor:
    layers = _layers([_key_span(block) if of_keys else _query_span(block) for block in call.blocks])
    longest = max(1, *map(len, layers))
    padding = _Span(_FAR, _FAR, 0, 0, 0, 0)
    table = torch.tensor(
        [[astuple(span) for span in layer + [padding] * (longest - len(layer))] for layer in layers], dtype=torch.int32
    )
    if device.type == "cuda":
        # From pinned memory, so that nothing waits for the device.
        table = table.pin_memory().to(device, non_blocking=True)
    rows = torch.arange(call.k_len if of_keys else call.q_len, dtype=torch.int32, device=device)
    return _expanded(table, rows.repeat(len(layers), 1))


def _expanded(table: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """``[layers, 2, rows]`` from the spans ``[layers, spans, 6]``."""
    index = torch.searchsorted(table[..., 0].contiguous(), rows, right=True).sub_(1).clamp_(min=0)
    first, last, start, length, lower, upper = (column.gather(1, index) for column in table.unbind(-1))
    lo, hi = (
        start + torch.minimum((rows - first + side).clamp_(min=0), length) for side in (lower, upper + 1)
    )  # fmt: skip
    hidden = (rows < first) | (rows >= last) | (lo >= hi)
    return torch.stack((lo, hi), dim=1).masked_fill_(hidden[:, None], 0)


def _layers(spans: list[_Span]) -> list[list[_Span]]:
    """Share the spans out, so that no row is twice in a layer and neighbours in one see what is near."""
    layers: list[list[_Span]] = []
    for span in sorted(spans, key=lambda span: span.first):
        layer = next((layer for layer in layers if _may_follow(layer[-1], span)), None)
        if layer is None:
            layers.append([span])
        else:
            layer.append(span)
    return layers or [[]]


def _may_follow(before: _Span, after: _Span) -> bool:
    if not 0 <= after.first - before.last < _NEAR:
        return before.last <= after.first
    rows = before.last - before.first
    (lo, hi), (after_lo, after_hi) = before.seen_from(max(0, rows - _NEAR), rows), after.seen_from(0, _NEAR)
    return max(after_lo - hi, lo - after_hi) <= _NEAR


def _query_span(block: Block) -> _Span:
    keys, band = block.k_stop - block.k_start, block.band
    return _Span(block.q_start, block.q_stop, block.k_start, keys, band.lower, band.upper)


def _key_span(block: Block) -> _Span:
    queries, band = block.q_stop - block.q_start, block.band
    return _Span(block.k_start, block.k_stop, block.q_start, queries, -band.upper, -band.lower)
