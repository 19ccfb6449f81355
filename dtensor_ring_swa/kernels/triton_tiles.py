"""How much of a call a Triton program takes at a time: tables chosen by hand, so that nothing is timed at run time."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from dtensor_ring_swa.kernels.request import Request
from dtensor_ring_swa.kernels.split_keys import TILE


class Tile(NamedTuple):
    """Packed query rows and keys that a program takes at a time, its warps, and the depth of its pipeline."""

    rows: int
    keys: int
    warps: int
    stages: int


class Sizes(NamedTuple):
    """What the programs know at compile time: head dims, heads that share keys, the tile, padded head dims."""

    D: int
    E: int
    G: int
    ROWS: int
    KEYS: int
    PADDED_D: int
    PADDED_E: int
    CAPPED: bool


# The programs: forward; dq; dk and dv; and dk and dv of keys that are split.
FORWARD, DQ, DKDV, SPLIT = range(4)
# Their tiles by the widest head dim, padded to a power of two, for 2 bytes an element.
_TILES = {
    # Of 8 to 10 tried on an H200 for 64/8 heads and windows of 127 tokens the fastest: 0.472, 0.549 and 0.522 ms.
    64: (Tile(64, 32, 4, 3), Tile(64, 32, 4, 3), Tile(64, 64, 4, 3), Tile(128, TILE, 4, 3)),
    128: (Tile(128, 64, 8, 3), Tile(128, 64, 8, 2), Tile(64, 128, 8, 2), Tile(64, TILE, 4, 2)),
    256: (Tile(128, 32, 8, 2), Tile(64, 32, 8, 2), Tile(32, 64, 8, 2), Tile(32, TILE, 4, 2)),
}
# For 4 bytes an element, whose products the tensor cores round too much.
_WIDE_TILES = {
    64: (*(Tile(32, 32, 4, 2),) * 3, Tile(32, TILE, 4, 2)),
    128: (Tile(16, 16, 4, 2), Tile(32, 16, 4, 2), Tile(16, 32, 4, 2), Tile(16, TILE, 4, 2)),
    256: (Tile(16, 16, 8, 2),) * 4,
}


def options_for(
    program: int, request: Request, q_BMHD: torch.Tensor, k_BNGD: torch.Tensor
) -> tuple[int, int, dict[str, Any]]:
    """Tiles of packed query rows, tiles of key rows, and the options to start the program with."""
    group = q_BMHD.shape[2] // k_BNGD.shape[2]
    padded = [max(16, 1 << (width - 1).bit_length()) for width in (request.head_dim, request.v_head_dim)]
    tables = _WIDE_TILES if request.dtype == torch.float32 else _TILES
    tile = tables[max(64, *padded)][program]
    sizes = Sizes(
        request.head_dim, request.v_head_dim, group, tile.rows, tile.keys, *padded, CAPPED=bool(request.softcap)
    )
    options = {"S": sizes, "num_warps": tile.warps, "num_stages": tile.stages}
    return -(-q_BMHD.shape[1] * group // tile.rows), -(-k_BNGD.shape[1] // tile.keys), options
