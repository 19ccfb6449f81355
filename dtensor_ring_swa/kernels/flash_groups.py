"""Blocks that one FlashAttention call can compute: documents side by side, under one window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch

from dtensor_ring_swa.block import Block, Call
from dtensor_ring_swa.device import cached_per_stream, to_device
from dtensor_ring_swa.kernels.flash_band import FlashWindow


@dataclass(frozen=True, eq=False)
class Group:
    """Blocks whose rows and keys follow one another, under one window of the aligned last query and key.

    Attributes:
        rows: Query rows of the call.
        keys: Key rows of the call.
        window: What each block's queries see.
        q_lens: Queries of each block.
        k_lens: Keys of each block.
    """

    rows: slice
    keys: slice
    window: FlashWindow
    q_lens: tuple[int, ...]
    k_lens: tuple[int, ...]

    @property
    def is_packed(self) -> bool:
        """Whether there is more than one block."""
        return len(self.q_lens) > 1


@cached_per_stream(256)
def boundaries_on(group: Group, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Where each block's queries and keys begin, and the last ones end: int32, ready on the device."""
    q_starts, k_starts = (to_device([0, *accumulate(lengths)], device) for lengths in (group.q_lens, group.k_lens))
    return q_starts, k_starts


@lru_cache(maxsize=256)
def flash_groups(call: Call) -> tuple[Group, ...] | None:
    """The fewest calls that compute each block once; None if blocks do not suit.

    They suit if no key is in two and every row is in one, and if no block has more queries
    than keys (see ``flash_band``). The last document of a shard may be a call of its own: where a
    window has a right side, its last key is not aligned with its last query as in the others.
    """
    if call.keys_overlap or not call.covers_rows:
        return None
    if any(b.q_len > b.k_len for b in call.blocks):
        return None
    groups: list[list[Block]] = []
    for block in sorted(call.blocks, key=lambda b: b.q_start):
        if groups and _follows(groups[-1][-1], block) and _window([*groups[-1], block]) is not None:
            groups[-1].append(block)
        else:
            groups.append([block])
    return tuple(map(_group, groups))


def _follows(first: Block, second: Block) -> bool:
    return (first.q_stop, first.k_stop) == (second.q_start, second.k_start)


def _window(blocks: Sequence[Block]) -> FlashWindow | None:
    """The window that shows every block what its band shows, if there is one."""
    sizes = [(b.q_len, b.k_len) for b in blocks]
    windows = [b.band.flash_window(*size) for b, size in zip(blocks, sizes, strict=True)]
    left = _side([w[0] for w in windows], [k_len - 1 for _, k_len in sizes])
    right = _side([w[1] for w in windows], [q_len - 1 for q_len, _ in sizes])
    return (*left, *right) if left and right else None


def _side(reaches: Sequence[int], needs: Sequence[int]) -> tuple[int | None] | tuple[()]:
    """One side of the window: its reach, or None if it hides nothing anywhere; no side at all if blocks differ.

    A side hides nothing of a block from the reach that the block needs upwards; blocks of which it
    hides something must have just this reach.
    """
    hiding = {reach for reach, need in zip(reaches, needs, strict=True) if reach < need}
    if not hiding:
        return (None,)
    (reach, *others) = hiding
    fits = not others and all(need <= reach for r, need in zip(reaches, needs, strict=True) if r != reach)
    return (reach,) if fits else ()


def _group(blocks: Sequence[Block]) -> Group:
    window = _window(blocks)
    assert window is not None
    rows, keys = (slice(blocks[0].q_start, blocks[-1].q_stop), slice(blocks[0].k_start, blocks[-1].k_stop))
    return Group(rows, keys, window, tuple(b.q_len for b in blocks), tuple(b.k_len for b in blocks))
