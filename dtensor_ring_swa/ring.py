"""The geometry of the ring: whole shards of keys pass by, one a step, and partial results merge.

For windows without limit, and for layouts in which neighbours in the sequence are not neighbours in
memory. A rank holds its own keys and at most two other shards at a
time, whatever the number of ranks. In step t each rank attends to the shard of the rank t before it;
the owner sends it directly, and only where the window shows some of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

from dtensor_ring_swa.band import Band
from dtensor_ring_swa.layout import Run, chunk_length, runs
from dtensor_ring_swa.plan import Block
from dtensor_ring_swa.window import UNLIMITED, Window

_UNLIMITED_SHARDS, _LIMITED_SHARDS = 2, 8


@dataclass(frozen=True)
class Step:
    """One shard of keys, as rank ``source`` owns it.

    Attributes:
        source: Whose keys are attended to; None if the window shows none of the shard due now.
        source_rows: How many there are.
        target: Who attends to this rank's keys in the same step, if anyone.
        blocks: Kernel calls: rows of this rank's queries against rows of the source's keys.
    """

    source: int | None
    source_rows: int
    target: int | None
    blocks: tuple[Block, ...]


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
        return sum(block.pairs for step in self.steps for block in step.blocks)

    @property
    def received_rows(self) -> int:
        """Rows of K and V that come from other ranks in forward."""
        return sum(step.source_rows for step in self.steps[1:])

    def bytes(
        self, *, kv_heads: int, head_dim: int, v_head_dim: int | None = None, batch: int = 1, itemsize: int = 2
    ) -> int:
        """Bytes of K and V that this rank receives in forward."""
        row = batch * kv_heads * (head_dim + (head_dim if v_head_dim is None else v_head_dim))
        return self.received_rows * row * itemsize

    def describe(self) -> str:
        """The ring in a few lines of English."""
        received = [step.source for step in self.steps[1:] if step.source is not None]
        balance = imbalance(self.layout, self.seq_len, self.ranks, self.window)
        return (
            f"rank {self.rank} of {self.ranks}: {self.rows} of {self.seq_len} tokens, {self.layout}, "
            f"window ({self.window.left}, {self.window.right})\n"
            f"ring: whole shards, two at a time, from ranks {received}\n"
            f"{self.pairs} (query, key) pairs; the busiest rank has {balance:.3f} times the mean"
        )


@lru_cache(maxsize=4096)
def make_ring(layout: str, seq_len: int, ranks: int, rank: int, window: Window) -> Ring:
    """Plan one rank's ring.

    Raises:
        ValueError: If the layout cannot deal out so many tokens.
    """
    mine = runs(layout, seq_len, ranks, rank)
    steps = []
    for distance in range(ranks):
        source, target = (rank - distance) % ranks, (rank + distance) % ranks
        theirs = runs(layout, seq_len, ranks, source)
        blocks = _blocks(mine, theirs, window)
        wanted = _blocks(runs(layout, seq_len, ranks, target), mine, window)
        steps.append(
            Step(
                source if blocks else None,
                sum(map(len, theirs)) if blocks else 0,
                target if wanted else None,
                blocks,
            )
        )
    return Ring(seq_len, ranks, rank, window, layout, sum(map(len, mine)), tuple(steps))


def uses_ring(layout: str, seq_len: int, ranks: int, window: Window) -> bool:
    """Whether keys pass by in a ring rather than being held as a halo: the same answer on every rank.

    The halo needs exactly the rows that the window reaches and merges nothing, so it is preferred
    until it would hold too many shards: two for a window without limit, which would otherwise hold
    the whole sequence, and eight for a limited one.
    """
    if layout != "contiguous":
        return True
    chunk = chunk_length(seq_len, ranks)
    halo = min(sum(window.reach(seq_len)), seq_len - chunk)
    return halo > (_UNLIMITED_SHARDS if UNLIMITED in window else _LIMITED_SHARDS) * chunk


def balanced_layout(load_balance: str, seq_len: int, ranks: int, window: Window) -> str:
    """The layout to compute in, for contiguous shards: another one where that evens out the work.

    Only windows that are unlimited on one side load the ranks unevenly enough to matter.

    Raises:
        ValueError: If a layout is demanded that cannot deal out so many tokens.
    """
    if load_balance in ("striped", "zigzag"):
        runs(load_balance, seq_len, ranks, 0)
        return load_balance if ranks > 1 else "contiguous"
    lopsided = (window.left == UNLIMITED) != (window.right == UNLIMITED)
    if load_balance == "none" or not lopsided or ranks == 1 or seq_len % (2 * ranks):
        return "contiguous"
    return "zigzag"


@lru_cache(maxsize=256)
def imbalance(layout: str, seq_len: int, ranks: int, window: Window) -> float:
    """(query, key) pairs of the busiest rank over the mean of all ranks."""
    pairs = [make_ring(layout, seq_len, ranks, rank, window).pairs for rank in range(ranks)]
    return max(pairs) * ranks / max(sum(pairs), 1)


def _blocks(queries: tuple[Run, ...], keys: tuple[Run, ...], window: Window) -> tuple[Block, ...]:
    """The visible blocks between the runs of two ranks."""
    blocks, q_start = [], 0
    for q_run in queries:
        k_start = 0
        for k_run in keys:
            band = Band.between(q_run, k_run, window)
            if band.pairs(len(q_run), len(k_run)):
                blocks.append(Block(q_start, q_start + len(q_run), k_start, k_start + len(k_run), band))
            k_start += len(k_run)
        q_start += len(q_run)
    return tuple(_fused(blocks))


def _fused(blocks: list[Block]) -> list[Block]:
    """Fewer blocks that show the same: where two join to one band, one kernel call does for both.

    All of a step's blocks do in the zigzag layout of a causal window: each row's keys are a run of
    the other rank's rows, although not of positions.
    """
    for first, second in combinations(blocks, 2):
        joint = _joint(first, second)
        if joint is not None:
            return _fused([joint, *(block for block in blocks if block not in (first, second))])
    return blocks


def _joint(first: Block, second: Block) -> Block | None:
    """The smallest block around two, if its band shows no more than theirs."""
    pair = (first, second)
    q_start, q_stop = min(b.q_start for b in pair), max(b.q_stop for b in pair)
    k_start, k_stop = min(b.k_start for b in pair), max(b.k_stop for b in pair)
    bounds = []
    for block in pair:
        tight = Band(
            max(block.band.lower, block.q_start - block.q_stop + 1),
            min(block.band.upper, block.k_stop - block.k_start - 1),
        )
        shift = (block.k_start - k_start) - (block.q_start - q_start)
        bounds.append((tight.lower + shift, tight.upper + shift))
    lowers, uppers = zip(*bounds, strict=True)
    joint = Block(q_start, q_stop, k_start, k_stop, Band(min(lowers), max(uppers)))
    # It shows all that they do; with equal counts it shows nothing else.
    return joint if joint.pairs == first.pairs + second.pairs else None
