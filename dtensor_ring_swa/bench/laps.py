"""A ring's steps, counted where they are alike, so that predicting thousands of ranks takes milliseconds.

``make_ring`` plans each of a rank's steps, one for each rank. Most of them differ only in the peer. As the peer
goes up through the ranks its positions move one way only, and so does each edge of what two ranks show each other.
So between two peers with the same blocks all have them, and the steps are found by halving.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache

from dtensor_ring_swa.block import Block, Call
from dtensor_ring_swa.layout import Run, runs
from dtensor_ring_swa.ring import Ring
from dtensor_ring_swa.visible import blocks_between
from dtensor_ring_swa.window import Window

_Blocks = tuple[Block, ...]


@dataclass(frozen=True)
class Lap:
    """Steps that follow each other and are alike but for the peer.

    Attributes:
        count: How many.
        blocks: What is computed in each.
        source_rows: Rows of K and V that come for each.
        target_rows: Rows of K and V that go out for each, whose gradients come home.
    """

    count: int
    blocks: _Blocks
    source_rows: int
    target_rows: int

    @property
    def pairs(self) -> int:
        """(query, key) pairs of one step."""
        return sum(block.pairs for block in self.blocks)


@dataclass(frozen=True)
class Laps:
    """One rank's ring: its own shard, then what comes and goes.

    Attributes:
        rows: Tokens on this rank.
        own: The first step, in which nothing travels.
        others: The other steps, in their order.
    """

    rows: int
    own: Lap
    others: tuple[Lap, ...]

    @property
    def pairs(self) -> int:
        """(query, key) pairs that this rank computes."""
        return self.own.pairs + sum(lap.count * lap.pairs for lap in self.others)

    @property
    def steps(self) -> int:
        """Shards of which this rank sees a key, its own among them."""
        return bool(self.own.blocks) + sum(lap.count for lap in self.others if lap.blocks)

    @property
    def received_rows(self) -> int:
        """Rows of K and V that come from other ranks."""
        return sum(lap.count * lap.source_rows for lap in self.others)

    @property
    def returned_rows(self) -> int:
        """Rows whose gradients come home from other ranks."""
        return sum(lap.count * lap.target_rows for lap in self.others)

    def places(self) -> Iterator[tuple[int, Lap | None, Lap, Lap | None]]:
        """How many steps have the same step before, none for the own shard's, and the same one after them."""
        before: Lap | None = None
        for place, lap in enumerate(self.others):
            after = self.others[place + 1] if place + 1 < len(self.others) else None
            if lap.count == 1:
                yield 1, before, lap, after
            else:
                yield 1, before, lap, lap
                if lap.count > 2:
                    yield lap.count - 2, lap, lap, lap
                yield 1, lap, lap, after
            before = lap


@lru_cache(maxsize=256)
def make_laps(layout: str, seq_len: int, ranks: int, rank: int, window: Window) -> Laps:
    """One rank's ring, as ``make_ring`` plans it.

    Raises:
        ValueError: If the layout cannot deal out so many tokens.
    """

    @cache
    def held(at: int) -> tuple[Run, ...]:
        return tuple(runs(layout, seq_len, ranks, at))

    @cache
    def seen(query_rank: int, key_rank: int) -> _Blocks:
        return tuple(blocks_between(held(query_rank), held(key_rank), window, (0, seq_len)))

    def from_source(distance: int) -> _Blocks:
        return seen(rank, (rank - distance) % ranks)

    def to_target(distance: int) -> _Blocks:
        return seen((rank + distance) % ranks, rank)

    # The peer's number goes one way within each of the two parts.
    coming = [*_alike(from_source, 1, rank), *_alike(from_source, rank + 1, ranks - 1)]
    going = [*_alike(to_target, 1, ranks - 1 - rank), *_alike(to_target, ranks - rank, ranks - 1)]
    own = seen(rank, rank)
    return Laps(sum(map(len, held(rank))), Lap(1, own, 0, 0), tuple(_joined(coming, going)))


def laps_of(ring: Ring) -> Laps:
    """Any ring, step by step: with packed documents and sink tokens each may differ."""
    own, *others = (
        Lap(1, step.call.blocks if step.call else (), len(step.source or ()), len(step.target or ()))
        for step in ring.steps
    )
    return Laps(ring.rows, own, tuple(others))


def _alike(blocks_at: Callable[[int], _Blocks], first: int, last: int) -> Iterator[tuple[int, _Blocks]]:
    """How many distances from ``first`` to ``last`` have the same blocks, in their order."""
    if first > last:
        return
    if blocks_at(first) == blocks_at(last):
        yield last - first + 1, blocks_at(first)
        return
    middle = (first + last) // 2
    yield from _alike(blocks_at, first, middle)
    yield from _alike(blocks_at, middle + 1, last)


def _joined(coming: list[tuple[int, _Blocks]], going: list[tuple[int, _Blocks]]) -> Iterator[Lap]:
    """Both lists as one, cut where either changes."""
    coming, going = coming[::-1], going[::-1]
    while coming:
        (arrivals, mine), (departures, theirs) = coming.pop(), going.pop()
        count = min(arrivals, departures)
        if arrivals > count:
            coming.append((arrivals - count, mine))
        if departures > count:
            going.append((departures - count, theirs))
        yield Lap(count, mine, _key_rows(mine), _key_rows(theirs))


def _key_rows(blocks: _Blocks) -> int:
    """From the first to the last key row that any of the blocks shows."""
    return Call.of(blocks).k_len if blocks else 0
