"""Move rows from one layout to another, and back: one message for each pair of ranks.

The geometry is where two ranks' runs meet; tensors follow it. Dealing back is the same geometry with
the layouts swapped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch.distributed import ProcessGroup

from dtensor_ring_swa.beside import Beside
from dtensor_ring_swa.exchange import Exchange
from dtensor_ring_swa.layout import Run, runs


@dataclass(frozen=True)
class Deal:
    """For each rank in turn, which of our rows go to it and where its rows come to lie.

    Attributes:
        rank: This rank.
        gives: Slices of the rows in the old layout, by receiving rank.
        takes: Slices of the rows in the new layout, by giving rank, in the giver's order.
        rows: Rows in the new layout.
    """

    rank: int
    gives: tuple[tuple[slice, ...], ...]
    takes: tuple[tuple[slice, ...], ...]
    rows: int


@lru_cache(maxsize=256)
def make_deal(old: str, new: str, seq_len: int, ranks: int, rank: int) -> Deal:
    """Plan one rank's part in moving a sequence from layout ``old`` to ``new``, of which one is contiguous.

    Raises:
        ValueError: If a layout cannot deal out so many tokens.
    """
    mine_old, mine_new = (runs(layout, seq_len, ranks, rank) for layout in (old, new))
    meetings = [
        (_meetings(mine_old, runs(new, seq_len, ranks, peer)), _meetings(runs(old, seq_len, ranks, peer), mine_new))
        for peer in range(ranks)
    ]
    return Deal(
        rank,
        tuple(tuple(here for here, _ in giving) for giving, _ in meetings),
        tuple(tuple(there for _, there in taking) for _, taking in meetings),
        sum(map(len, mine_new)),
    )


def deal(moves: Deal, group: ProcessGroup, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Move tensors ``[B, S_local, ...]`` of one dtype, all in one message for each pair of ranks.

    Args:
        moves: Where rows go.
        group: The ranks that share the sequence.
        *tensors: Tensors with their rows on dim 1.

    Returns:
        The tensors with the rows of the new layout, which other ranks held in the old one.
    """
    new = [x.new_empty(x.shape[0], moves.rows, *x.shape[2:]) for x in tensors]
    peers = [peer for peer in range(len(moves.gives)) if peer != moves.rank]
    sends = [(p, _pack(tensors, moves.gives[p])) for p in peers if moves.gives[p]]
    receives = [(p, tensors[0].new_empty(_numel(new, moves.takes[p]))) for p in peers if moves.takes[p]]
    exchange = Exchange(group, sends, receives)
    beside = Beside(tensors[0].device)
    for here, there in zip(moves.gives[moves.rank], moves.takes[moves.rank], strict=True):
        for old_x, new_x in zip(tensors, new, strict=True):
            new_x[:, there] = old_x[:, here]
    for (peer, _), message in zip(receives, beside.finish(exchange.wait), strict=True):
        parts = [x[:, rows] for rows in moves.takes[peer] for x in new]
        for part, flat in zip(parts, message.split([part.numel() for part in parts]), strict=True):
            part.copy_(flat.view(part.shape))
    return new


def _pack(tensors: Sequence[torch.Tensor], slices: Sequence[slice]) -> torch.Tensor:
    return torch.cat([x[:, rows].flatten() for rows in slices for x in tensors])


def _numel(tensors: Sequence[torch.Tensor], slices: Sequence[slice]) -> int:
    return sum(x[:, rows].numel() for rows in slices for x in tensors)


def _meetings(old: Sequence[Run], new: Sequence[Run]) -> list[tuple[slice, slice]]:
    """Rows of one rank in the old layout and of another in the new that are the same positions."""
    found, old_start = [], 0
    for a in old:
        new_start = 0
        for b in new:
            # One of the two has step 1, so what they share are positions of the other.
            step = max(a.step, b.step)
            origin = a.start if a.step == step else b.start
            first, stop = max(a.start, b.start), min(a.stop, b.stop)
            first += (origin - first) % step
            if first < stop:
                found.append((_rows(a, old_start, first, stop, step), _rows(b, new_start, first, stop, step)))
            new_start += len(b)
        old_start += len(a)
    return found


def _rows(run: Run, offset: int, first: int, stop: int, step: int) -> slice:
    """The local rows of the positions ``first, first + step, ...`` below ``stop``."""
    start = offset + (first - run.start) // run.step
    return slice(start, start + (stop - 1 - first) // run.step + 1, step // run.step)
