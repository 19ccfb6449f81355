"""The geometry of one rank's attention, in integers: what to send, what to receive, what to compute.

Nothing here knows tensors. A plan costs time proportional to the neighbours it talks to and the
documents it holds, not to the number of ranks, is hashable, and is cached: the layers of a model share it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

from dtensor_ring_swa.block import Block, Call, blocks_between, fused
from dtensor_ring_swa.choice import choose_exchange, is_rebalanced
from dtensor_ring_swa.layout import Run, chunk_length, shard
from dtensor_ring_swa.packing import Boundaries, check_boundaries, document_at
from dtensor_ring_swa.window import Window


@dataclass(frozen=True)
class Transfer:
    """Rows ``start:stop`` of a buffer go to, or come from, the rank ``peer`` as one message."""

    peer: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def rows(self) -> slice:
        """The rows, as a slice."""
        return slice(self.start, self.stop)


@dataclass(frozen=True)
class Plan:
    """What one rank does for one window over a contiguously sharded sequence.

    Query rows count from the shard's first. Key rows count in the order sink rows, left halo, shard,
    right halo.

    Attributes:
        seq_len: Tokens of the whole sequence.
        ranks: Size of the context-parallel group.
        rank: This rank, 0-based.
        window: The window, in tokens.
        start: Global position of the shard's first token.
        stop: Global position one past the shard's last token.
        sinks: Sink rows that come from other ranks and lie before the left halo: the first tokens of
            the document that began on an earlier rank.
        left: Rows of the left halo: earlier keys that the shard's queries reach.
        right: Rows of the right halo.
        sends: Shard rows for each neighbour that reaches into this shard.
        receives: Rows that come, sinks first, then left halo, then right; each from its owner.
        interior: Rows that see nothing outside the shard; they need not wait for what comes.
        boundary: All other rows.
        packed: Whether documents were given.
    """

    seq_len: int
    ranks: int
    rank: int
    window: Window
    start: int
    stop: int
    sinks: int
    left: int
    right: int
    sends: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]
    interior: tuple[Block, ...]
    boundary: tuple[Block, ...]
    packed: bool = False

    @property
    def rows(self) -> int:
        """Tokens on this rank."""
        return self.stop - self.start

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Every block, the interior first."""
        return self.interior + self.boundary

    @cached_property
    def interior_calls(self) -> tuple[Call, ...]:
        """The interior as one kernel call, if there is any."""
        return (Call.of(self.interior),) if self.interior else ()

    @cached_property
    def boundary_calls(self) -> tuple[Call, ...]:
        """The boundary, a kernel call for each run of rows: no row is in two, so nothing is merged."""
        runs: list[list[Block]] = []
        for block in self.boundary:
            if runs and block.q_start < max(b.q_stop for b in runs[-1]):
                runs[-1].append(block)
            else:
                runs.append([block])
        return tuple(Call.of(run) for run in runs)

    @cached_property
    def joint_calls(self) -> tuple[Call, ...]:
        """All rows as one kernel call, which waits for what comes; the boundary is among them."""
        return (Call.of(fused([*self.interior, *self.boundary])),)

    @property
    def pairs(self) -> int:
        """(query, key) pairs that this rank computes."""
        return sum(block.pairs for block in self.blocks)

    @cached_property
    def interior_pairs(self) -> int:
        """Those of the interior."""
        return sum(block.pairs for block in self.interior)

    @cached_property
    def interior_rows(self) -> int:
        """Query rows of the interior."""
        return sum(call.q_len for call in self.interior_calls)

    @cached_property
    def key_edges(self) -> tuple[int, ...]:
        """Where the key rows of each message, and of the shard, begin, in their order; and where the last end."""
        lengths = [len(t) for t in self.receives]
        lengths.insert(self.shard_piece, self.rows)
        return 0, *accumulate(lengths)

    @cached_property
    def shard_piece(self) -> int:
        """Which of the pieces between ``key_edges`` is the shard."""
        return sum(t.stop <= self.sinks + self.left for t in self.receives)

    @property
    def received_rows(self) -> int:
        """Rows of K and V that come from other ranks in forward."""
        return self.sinks + self.left + self.right

    def bytes(
        self, *, kv_heads: int, head_dim: int, v_head_dim: int | None = None, batch: int = 1, itemsize: int = 2
    ) -> int:
        """Bytes of K and V that this rank receives in forward.

        The transposed exchange of backward sends the same number, in the dtype of the gradients.
        """
        row = batch * kv_heads * (head_dim + (head_dim if v_head_dim is None else v_head_dim))
        return self.received_rows * row * itemsize

    def flops(self, *, q_heads: int, head_dim: int, v_head_dim: int | None = None, batch: int = 1) -> int:
        """Useful floating-point operations of forward: two matrix products over the visible pairs.

        Backward does five products, 2.5 times as many (Dao 2023, arXiv:2307.08691, section 4.1).
        """
        width = head_dim + (head_dim if v_head_dim is None else v_head_dim)
        return 2 * self.pairs * batch * q_heads * width

    def describe(self) -> str:
        """The plan in a few lines of English, and whether ``ring_attention`` would follow it by itself."""
        inner = self.interior_rows
        peers = ", ".join(f"{t.stop - t.start} rows from rank {t.peer}" for t in self.receives)
        dealt = not self.packed and is_rebalanced(self.seq_len, self.ranks, self.window)
        layout = "zigzag" if dealt else "contiguous"
        choice = choose_exchange("auto", layout, self.seq_len, self.ranks, self.window, self.packed)
        return (
            f"rank {self.rank} of {self.ranks}: tokens [{self.start}, {self.stop}) of {self.seq_len}, "
            f"window ({self.window.left}, {self.window.right})\n"
            f"halo: {peers or 'nothing to receive'}\n"
            f"rows: {inner} interior, {self.rows - inner} boundary; {self.pairs} (query, key) pairs\n"
            f"exchange='auto' takes the {choice.exchange}: {choice.reason}"
            + ("; load_balance='auto' deals the shards to it" if dealt else "")
        )


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
            window or the boundaries are none.
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
    """Which positions of other ranks any rank sees: sinks, left halo and right halo."""

    seq_len: int
    ranks: int
    window: Window
    boundaries: Boundaries
    sink_tokens: int

    def of(self, rank: int) -> tuple[Run, Run, Run]:
        """Only the documents that straddle the shard's two ends have tokens elsewhere."""
        mine, (reach_left, reach_right) = shard(self.seq_len, self.ranks, rank), self.window.reach(self.seq_len)
        if not len(mine):
            return mine, mine, mine
        first, _ = document_at(self.boundaries, mine.start)
        _, last = document_at(self.boundaries, mine.stop - 1)
        left = Run(max(first, mine.start - reach_left), mine.start)
        right = Run(mine.stop, min(last, mine.stop + reach_right))
        return Run(first, min(first + self.sink_tokens, left.start)), left, right


def _split(
    mine: Run, needs: tuple[Run, Run, Run], reach: tuple[int, int], boundaries: Boundaries, sink_tokens: int
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Positions of the interior and of the boundary rows, as spans."""
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
    if start >= stop:
        # Rows that need both sides, or only rows that wait: one run, if one document holds them.
        edge = document_at(boundaries, mine.start)[1]
        spans = [(mine.start, mine.stop)] if edge >= mine.stop else [(mine.start, start), (stop, mine.stop)]
        return [], [span for span in spans if span[0] < span[1]]
    return [(start, stop)], [span for span in ((mine.start, start), (stop, mine.stop)) if span[0] < span[1]]


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
