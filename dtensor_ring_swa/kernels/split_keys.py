"""Few keys that very many queries see, as sink tokens are: their queries are shared out among programs.

In the pass of dk and dv a program takes a tile of keys and walks over all queries that see it. For such
keys that would take far longer than all the rest. So each chunk of their queries is a part of its own,
with its own copy of the keys, and the parts are summed in float32, always in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from dtensor_ring_swa.block import Call
from dtensor_ring_swa.device import cached_per_stream, to_device
from dtensor_ring_swa.kernels.intervals import KEPT, intervals_of_keys

# Key rows of a part, and its query rows.
TILE = 16
_CHUNK = 512
# A block is split if it has as many query rows, and as many for each key row.
_QUERIES, _QUERIES_A_KEY = 1024, 16


class SplitKeys(NamedTuple):
    """Key rows in parts. The parts of a tile of key rows follow each other.

    Attributes:
        rows: The key rows.
        copies: The key row that each row of the parts is a copy of.
        bounds: The queries of each row of the parts, as ``intervals_of_keys``.
        parts: How many parts each tile has.
        places: Where each of ``rows`` lies among the rows of the tiles.
    """

    rows: torch.Tensor
    copies: torch.Tensor
    bounds: torch.Tensor
    parts: torch.Tensor
    places: torch.Tensor

    def new_parts(self, grads: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
        """Room ``[B, rows of the parts, G, D]`` for each of the gradients, part by part in memory."""
        batch, _, groups, _ = grads[0].shape
        return [x.new_empty(len(self.copies), batch, groups, x.shape[3], dtype=dtype).transpose(0, 1) for x in grads]

    def put(self, grads: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> None:
        """Write the sums of the parts into their rows of the gradients."""
        for grad, part in zip(grads, parts, strict=True):
            grad.index_copy_(1, self.rows, self.sums(part).to(grad.dtype))

    def sums(self, parts_BVGD: torch.Tensor) -> torch.Tensor:
        """``[B, rows, G, D]`` of the parts' shares."""
        by_part = parts_BVGD.transpose(0, 1).unflatten(0, (-1, TILE)).flatten(1)
        sums = torch.segment_reduce(by_part, "sum", lengths=self.parts, axis=0, unsafe=True)
        batch, _, *row = parts_BVGD.shape
        return sums.view(-1, batch, *row).transpose(0, 1).index_select(1, self.places)


@cached_per_stream(KEPT)
def split_keys(call: Call, device: torch.device) -> tuple[torch.Tensor, SplitKeys | None]:
    """``intervals_of_keys`` without the keys that are split, and those."""
    bounds, tiles = intervals_of_keys(call, device), _tiles(call)
    if not tiles:
        return bounds, None
    copies, edges, places = [], [], []
    for index, (keys, queries) in enumerate(tiles):
        places += range(index * TILE, index * TILE + len(keys))
        for start in queries:
            copies += [*keys, *[keys[-1]] * (TILE - len(keys))]
            edges += [(start, start + _CHUNK)] * len(keys) + [(0, 0)] * (TILE - len(keys))
    rows = to_device([row for keys, _ in tiles for row in keys], device)
    which = to_device(copies, device)
    lo, hi = bounds.index_select(2, which).unbind(1)
    first, last = to_device(edges, device).unbind(1)
    lo, hi = torch.maximum(lo, first), torch.minimum(hi, last)
    part_bounds = torch.stack((lo, hi), dim=1).masked_fill_((lo >= hi)[:, None], 0)
    parts = to_device([len(queries) for _, queries in tiles], device).long()
    rest = bounds.index_fill(2, rows.long(), 0)
    return rest, SplitKeys(rows.long(), which.long(), part_bounds, parts, to_device(places, device).long())


def _tiles(call: Call) -> list[tuple[range, range]]:
    """Tiles of the key rows to split, and where the chunks of their queries begin."""
    tall = sorted(
        (block.k_start, block.k_stop)
        for block in call.blocks
        if block.q_len >= max(_QUERIES, _QUERIES_A_KEY * block.k_len)
    )
    tiles, reached = [], 0
    for start, stop in tall:
        for first in range(max(start, reached), stop, TILE):
            keys = range(first, min(first + TILE, stop))
            seen = [block for block in call.blocks if block.k_start < keys.stop and keys.start < block.k_stop]
            queries = range(min(block.q_start for block in seen), max(block.q_stop for block in seen), _CHUNK)
            tiles.append((keys, queries))
        reached = max(reached, stop)
    return tiles
