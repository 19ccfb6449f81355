"""How much of a call a Triton program takes at a time: tables chosen by hand, so that nothing is timed at run time."""

from __future__ import annotations

from functools import lru_cache
from math import inf
from typing import NamedTuple

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


class StartOptions(NamedTuple):
    """What a program is started with besides its arguments."""

    sizes: Sizes
    warps: int
    stages: int


# The programs: forward; dq; dk and dv; dk and dv of keys that are split; and dq that takes few keys along.
FORWARD, DQ, DKDV, SPLIT, DQ_FEW = range(5)
# Their tiles by the widest head dim, padded to a power of two, for 2 bytes an element.
_TILES = {
    # Of 8 to 10 tried on an H200 for 64/8 heads and windows of 127 tokens the fastest: 0.472, 0.549 and 0.522 ms.
    64: (Tile(64, 32, 4, 3), Tile(64, 32, 4, 3), Tile(64, 64, 4, 3), Tile(128, TILE, 4, 3), Tile(64, 32, 4, 3)),
    128: (Tile(128, 64, 8, 3), Tile(128, 64, 8, 2), Tile(64, 128, 8, 2), Tile(64, TILE, 4, 2), Tile(128, 64, 8, 2)),
    256: (Tile(128, 32, 8, 2), Tile(64, 32, 8, 2), Tile(32, 64, 8, 2), Tile(32, TILE, 4, 2), Tile(64, 32, 8, 2)),
}
# What takes their place on GPUs with at most so many bytes of shared memory a program, the least first: where they need
# more, or all of it. Chosen to fit, and not timed.
_SMALLER_TILES = {
    # AMD: gfx90a, gfx942, gfx11.
    65536: {
        (64, SPLIT): Tile(64, TILE, 4, 3),
        (128, FORWARD): Tile(128, 64, 8, 2),
        (128, DKDV): Tile(32, 128, 8, 2),
    },
    # NVIDIA: compute capability 8.6, 8.9 and 12.
    101376: {
        (128, DQ_FEW): Tile(64, 64, 8, 2),
        (256, FORWARD): Tile(64, 32, 8, 2),
        (256, DQ): Tile(32, 32, 8, 2),
        (256, DKDV): Tile(32, 32, 8, 2),
        (256, DQ_FEW): Tile(32, 32, 8, 2),
    },
}
# For 4 bytes an element, whose products the tensor cores round too much.
_WIDE_TILES = {
    64: (*(Tile(32, 32, 4, 2),) * 3, Tile(32, TILE, 4, 2), Tile(32, 32, 4, 2)),
    128: (Tile(16, 16, 4, 2), Tile(32, 16, 4, 2), Tile(16, 32, 4, 2), Tile(16, TILE, 4, 2), Tile(32, 16, 4, 2)),
    256: (Tile(16, 16, 8, 2),) * 5,
}


def options_for(
    program: int, request: Request, q_BMHD: torch.Tensor, k_BNGD: torch.Tensor
) -> tuple[int, int, StartOptions]:
    """Tiles of packed query rows, tiles of key rows, and the options to start the program with."""
    group = q_BMHD.shape[2] // k_BNGD.shape[2]
    options = _options(program, request, group, shared_memory(q_BMHD.device))
    return -(-q_BMHD.shape[1] * group // options.sizes.ROWS), -(-k_BNGD.shape[1] // options.sizes.KEYS), options


@lru_cache(maxsize=256)
def _options(program: int, request: Request, group: int, limit: float) -> StartOptions:
    padded = [max(16, 1 << (width - 1).bit_length()) for width in (request.head_dim, request.v_head_dim)]
    tile = _tile(program, max(64, *padded), request.dtype, limit)
    sizes = Sizes(
        request.head_dim, request.v_head_dim, group, tile.rows, tile.keys, *padded, CAPPED=bool(request.softcap)
    )
    return StartOptions(sizes, tile.warps, tile.stages)


@lru_cache
def shared_memory(device: torch.device) -> float:
    """Bytes of shared memory that a program may take; no limit where Triton's interpreter runs it."""
    if device.type != "cuda":
        return inf
    # What Triton compares with when it starts a program. torch's builds for AMD may lack it: all have 64 KB at least.
    name = "shared_memory_per_block" if torch.version.hip else "shared_memory_per_block_optin"
    return getattr(torch.cuda.get_device_properties(device), name, 65536)


def _tile(program: int, width: int, dtype: torch.dtype, limit: float) -> Tile:
    if dtype == torch.float32:
        return _WIDE_TILES[width][program]
    for most, tiles in _SMALLER_TILES.items():
        if limit <= most and (width, program) in tiles:
            return tiles[width, program]
    return _TILES[width][program]
