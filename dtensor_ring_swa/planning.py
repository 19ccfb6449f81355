"""Make a plan: what one rank needs, sends and receives, and which of its rows wait for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from dtensor_ring_swa.block import Block
from dtensor_ring_swa.layout import Run, chunk_length, shard
from dtensor_ring_swa.packing import Boundaries, check_boundaries, document_at
from dtensor_ring_swa.plan import Plan, Transfer
from dtensor_ring_swa.visible import blocks_between
from dtensor_ring_swa.window import Window


def make_plan(
    seq_len: int,
    ranks: int,
    rank: int,
    window: Window | tuple[int | None, int | None],
    cu_seqlens: Sequence[int] | None = None,
    sink_tokens: int = 0,
) -> Plan:
    """Plan one rank's share of attention over a contiguously sharded sequence.

    Args:
        seq_len: Tokens of the whole sequence.
        ranks: Size of the context-parallel group.
        rank: The rank to plan for.
        window: Neighbours visible to each token.
        cu_seqlens: Boundaries of packed documents, from 0 to ``seq_len``.
        sink_tokens: First tokens of each document that its later tokens see besides their window.

    Returns:
        The plan. The neighbours' plans agree with it: what one sends, the other receives.

    Raises:
        ValueError: If ``ranks`` < 1, ``rank`` is not one of them, ``seq_len`` or ``sink_tokens`` < 0, or the
            window is no window, or ``cu_seqlens`` do not cut the sequence into documents.
    """
    if ranks < 1 or not 0 <= rank < ranks or seq_len < 0 or sink_tokens < 0:
        raise ValueError(
            f"a plan needs seq_len >= 0, 0 <= rank < ranks and sink_tokens >= 0, got seq_len={seq_len}, rank={rank}, "
            f"ranks={ranks}, sink_tokens={sink_tokens}"
        )
    packed = cu_seqlens is not None
    boundaries = tuple(cu_seqlens) if packed else (0, seq_len)
    return _make_plan(seq_len, ranks, rank, Window.of(window), boundaries, sink_tokens, packed)


# Not more: packed documents differ in every step, and a plan of thousands of them takes a megabyte.
@lru_cache(maxsize=256)
def _make_plan(
    seq_len: int,
    ranks: int,
    rank: int,
    window: Window,
    boundaries: Boundaries,
    sink_tokens: int,
    packed: bool = False,
) -> Plan:
    check_boundaries(boundaries, seq_len)
    mine = shard(seq_len, ranks, rank)
    whole = _Needs(seq_len, ranks, window, boundaries, sink_tokens)
    sinks, left, right = needs = whole.of(rank)
    # Key rows as runs of positions; sinks that reach up to the halo are one run with it.
    near = Run(left.start, right.stop)
    keys = [Run(sinks.start, near.stop)] if sinks.stop == near.start else [sinks, near]

    def blocks(spans: Sequence[tuple[int, int]]) -> tuple[Block, ...]:
        return tuple(
            block.moved(first - mine.start, 0)
            for first, last in spans
            for block in blocks_between([Run(first, last)], keys, window, boundaries, sink_tokens)
        )

    interior, boundary = _split(mine, needs, window.reach(seq_len), boundaries, sink_tokens)
    return Plan(
        seq_len, ranks, rank, window, mine.start, mine.stop, len(sinks), len(left), len(right),
        sends=tuple(_sends(mine, whole, rank)),
        receives=tuple(_receives(needs, chunk_length(seq_len, ranks))),
        interior=blocks(interior),
        boundary=blocks(boundary),
        packed=packed,
    )  # fmt: skip


@dataclass(frozen=True)
class _Needs:
    """Which positions on other ranks each rank sees."""

    seq_len: int
    ranks: int
    window: Window
    boundaries: Boundaries
    sink_tokens: int

    def of(self, rank: int) -> tuple[Run, Run, Run]:
        """Sinks, left halo and right halo of a rank; all empty if it has no tokens."""
        mine, (reach_left, reach_right) = shard(self.seq_len, self.ranks, rank), self.window.reach(self.seq_len)
        if not len(mine):
            return mine, mine, mine
        # Only the documents at the shard's two ends have tokens elsewhere.
        first, _ = document_at(self.boundaries, mine.start)
        _, last = document_at(self.boundaries, mine.stop - 1)
        left = Run(max(first, mine.start - reach_left), mine.start)
        right = Run(mine.stop, min(last, mine.stop + reach_right))
        return Run(first, min(first + self.sink_tokens, left.start)), left, right


def _split(
    mine: Run, needs: tuple[Run, Run, Run], reach: tuple[int, int], boundaries: Boundaries, sink_tokens: int
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Positions of the interior and of the boundary rows, as spans ``[first, last)``."""
    if not len(mine):
        return [], []
    sinks, left, right = needs
    start, stop = mine.start, mine.stop
    if len(left) or len(sinks):
        # Sinks on an earlier rank are seen by all rows of their document; they may lie in the left halo.
        reached = mine.stop if sink_tokens else start + reach[0]
        start = min(mine.stop, reached, document_at(boundaries, mine.start)[1])
    if len(right):
        stop = max(mine.start, stop - reach[1], document_at(boundaries, mine.stop - 1)[0])
    interior = [(start, stop)] if start < stop else []
    boundary = [(mine.start, start), (stop, mine.stop)]
    if not interior and document_at(boundaries, mine.start)[1] >= mine.stop:
        # All rows are of one document, and none is in the interior: one run.
        boundary = [(mine.start, mine.stop)]
    return interior, [(first, last) for first, last in boundary if first < last]


def _receives(needs: tuple[Run, Run, Run], chunk: int) -> Iterator[Transfer]:
    """Cut what is needed at the owners' edges."""
    row = 0
    for run in needs:
        position = run.start
        while position < run.stop:
            stop = min(run.stop, (position // chunk + 1) * chunk)
            yield Transfer(position // chunk, row, row + stop - position)
            row, position = row + stop - position, stop


def _sends(mine: Run, whole: _Needs, rank: int) -> Iterator[Transfer]:
    """The rows of this shard that other ranks need, in the order in which they receive them."""
    for direction in (-1, 1):
        peer = rank + direction
        while 0 <= peer < whole.ranks and len(mine):
            needs = [run for run in whole.of(peer) if len(run)]
            # What peers further on need ends, or begins, no nearer.
            if not needs or (needs[-1].stop <= mine.start if direction < 0 else needs[0].start >= mine.stop):
                break
            for run in needs:
                start, stop = max(run.start, mine.start), min(run.stop, mine.stop)
                if start < stop:
                    yield Transfer(peer, start - mine.start, stop - mine.start)
            peer += direction
