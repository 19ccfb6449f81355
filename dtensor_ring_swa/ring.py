"""The geometry of the ring: keys pass by, one shard a step, and partial results merge.

For windows without limit, and for layouts in which neighbours in the sequence are not neighbours in
memory. A rank holds its own keys and at most two other shards at a time, whatever the number of
ranks. In step t each rank attends to keys of the rank t before it; the owner sends them directly: the
rows from the first to the last that any of its queries sees, and nothing where they see none.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from dtensor_ring_swa.block import Call
from dtensor_ring_swa.choice import is_rebalanced
from dtensor_ring_swa.layout import runs
from dtensor_ring_swa.packing import Boundaries, check_boundaries
from dtensor_ring_swa.plan import Transfer
from dtensor_ring_swa.visible import blocks_between
from dtensor_ring_swa.window import Window


@dataclass(frozen=True)
class Step:
    """The part of one rank's keys that is attended to at a time.

    Attributes:
        source: Whose keys, and which of its rows; None if this rank's queries see none of them.
        target: Who attends to this rank's keys in the same step, and to which rows, if anyone does.
        call: Rows of this rank's queries against rows of the source's keys; None without a source.
    """

    source: Transfer | None
    target: Transfer | None
    call: Call | None


@dataclass(frozen=True)
class Ring:
    """What one rank does when keys pass by.

    Attributes:
        seq_len: Tokens of the whole sequence.
        ranks: Size of the context-parallel group.
        rank: This rank.
        window: The window, in tokens.
        layout: How positions lie on the ranks.
        rows: Tokens on this rank.
        steps: One for each rank; the first is this rank's own shard.
    """

    seq_len: int
    ranks: int
    rank: int
    window: Window
    layout: str
    rows: int
    steps: tuple[Step, ...]

    @property
    def pairs(self) -> int:
        """(query, key) pairs that this rank computes."""
        return sum(block.pairs for step in self.steps if step.call for block in step.call.blocks)

    @property
    def received_rows(self) -> int:
        """Rows of K and V that come from other ranks in forward."""
        return sum(len(step.source) for step in self.steps[1:] if step.source)

    def bytes(
        self, *, kv_heads: int, head_dim: int, v_head_dim: int | None = None, batch: int = 1, itemsize: int = 2
    ) -> int:
        """Bytes of K and V that this rank receives in forward."""
        row = batch * kv_heads * (head_dim + (head_dim if v_head_dim is None else v_head_dim))
        return self.received_rows * row * itemsize

    def describe(self) -> str:
        """The ring in a few lines of English."""
        received = ", ".join(f"{len(s.source)} rows from rank {s.source.peer}" for s in self.steps[1:] if s.source)
        balance = imbalance(self.layout, self.seq_len, self.ranks, self.window)
        return (
            f"rank {self.rank} of {self.ranks}: {self.rows} of {self.seq_len} tokens, {self.layout}, "
            f"window ({self.window.left}, {self.window.right})\n"
            f"ring: two shards at a time; {received or 'nothing to receive'}\n"
            f"{self.pairs} (query, key) pairs; the busiest rank has {balance:.3f} times the mean"
        )


def make_ring(
    layout: str,
    seq_len: int,
    ranks: int,
    rank: int,
    window: Window,
    boundaries: Boundaries | None = None,
    sink_tokens: int = 0,
) -> Ring:
    """Plan one rank's ring, of packed documents if ``boundaries`` are given.

    Raises:
        ValueError: If the layout cannot deal out so many tokens, or the boundaries do not fit the sequence.
    """
    return _make_ring(layout, seq_len, ranks, rank, window, boundaries or (0, seq_len), sink_tokens)


# Not more: packed documents differ in every step, and a plan of thousands of them takes a megabyte.
@lru_cache(maxsize=256)
def _make_ring(
    layout: str, seq_len: int, ranks: int, rank: int, window: Window, boundaries: Boundaries, sink_tokens: int
) -> Ring:
    check_boundaries(boundaries, seq_len)
    mine = runs(layout, seq_len, ranks, rank)

    def call(query_rank: int, key_rank: int) -> Call | None:
        queries, keys = (runs(layout, seq_len, ranks, each) for each in (query_rank, key_rank))
        blocks = blocks_between(queries, keys, window, boundaries, sink_tokens)
        return Call.of(blocks) if blocks else None

    steps = []
    for distance in range(ranks):
        source, target = (rank - distance) % ranks, (rank + distance) % ranks
        own, theirs = call(rank, source), call(target, rank)
        steps.append(
            Step(
                own and Transfer(source, own.k_start, own.k_stop),
                theirs and Transfer(target, theirs.k_start, theirs.k_stop),
                own,
            )
        )
    return Ring(seq_len, ranks, rank, window, layout, sum(map(len, mine)), tuple(steps))


def balanced_layout(
    load_balance: str, seq_len: int, ranks: int, window: Window, boundaries: Boundaries | None = None
) -> str:
    """The layout to compute in, for contiguous shards: another one where that evens out the work.

    See ``is_rebalanced``; with packed documents, only if the plan predicts that the busiest rank gains a tenth.

    Raises:
        ValueError: If a layout is demanded that cannot deal out so many tokens.
    """
    if load_balance in ("striped", "zigzag"):
        runs(load_balance, seq_len, ranks, 0)
        return load_balance if ranks > 1 else "contiguous"
    if load_balance == "none" or not is_rebalanced(seq_len, ranks, window):
        return "contiguous"
    if boundaries is not None:
        now, then = (imbalance(layout, seq_len, ranks, window, boundaries) for layout in ("contiguous", "zigzag"))
        return "zigzag" if then < 0.9 * now else "contiguous"
    return "zigzag"


def imbalance(layout: str, seq_len: int, ranks: int, window: Window, boundaries: Boundaries | None = None) -> float:
    """(query, key) pairs of the busiest rank over the mean of all ranks."""
    return _imbalance(layout, seq_len, ranks, window, boundaries or (0, seq_len))


@lru_cache(maxsize=256)
def _imbalance(layout: str, seq_len: int, ranks: int, window: Window, boundaries: Boundaries) -> float:
    pairs = [make_ring(layout, seq_len, ranks, rank, window, boundaries).pairs for rank in range(ranks)]
    return max(pairs) * ranks / max(sum(pairs), 1)
