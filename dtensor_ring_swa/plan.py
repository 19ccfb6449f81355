"""The geometry of one rank's attention, in integers: what to send, what to receive, what to compute.

Nothing here knows tensors. A plan costs time proportional to the neighbours it talks to, not to the
number of ranks, is hashable, and is cached: the layers of a model share it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from dtensor_ring_swa.band import Band
from dtensor_ring_swa.layout import chunk_length, shard
from dtensor_ring_swa.window import Window


@dataclass(frozen=True)
class Transfer:
    """Rows ``start:stop`` of a buffer go to, or come from, the rank ``peer`` as one message."""

    peer: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Block:
    """One kernel call: query rows ``q_start:q_stop`` against the key rows ``k_start:k_stop``.

    Query rows count from the shard's first. Key rows count from the first row of the left halo, in
    the order left halo, shard, right halo: one run of consecutive positions.
    """

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    band: Band

    @property
    def pairs(self) -> int:
        """(query, key) pairs that the band shows."""
        return self.band.pairs(self.q_stop - self.q_start, self.k_stop - self.k_start)


@dataclass(frozen=True)
class Plan:
    """What one rank does for one window over a contiguously sharded sequence.

    Attributes:
        seq_len: Tokens of the whole sequence.
        ranks: Size of the context-parallel group.
        rank: This rank, 0-based.
        window: The window, in tokens.
        start: Global position of the shard's first token.
        stop: Global position one past the shard's last token.
        left: Rows of the left halo: earlier keys that the shard's queries reach.
        right: Rows of the right halo.
        sends: Shard rows for each neighbour that reaches into this shard.
        receives: Halo rows (left halo first, then right) from each neighbour, by position.
        interior: Rows whose window lies inside the shard; they need not wait for the halo.
        boundary: All other rows. No row is in two blocks, so no results are ever merged.
    """

    seq_len: int
    ranks: int
    rank: int
    window: Window
    start: int
    stop: int
    left: int
    right: int
    sends: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]
    interior: tuple[Block, ...]
    boundary: tuple[Block, ...]

    @property
    def rows(self) -> int:
        """Tokens on this rank."""
        return self.stop - self.start

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Every kernel call, the interior first."""
        return self.interior + self.boundary

    @property
    def pairs(self) -> int:
        """(query, key) pairs that this rank computes."""
        return sum(block.pairs for block in self.blocks)

    @property
    def received_rows(self) -> int:
        """Rows of K and V that come from other ranks in forward."""
        return self.left + self.right

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
        """The plan in a few lines of English."""
        inner = sum(block.q_stop - block.q_start for block in self.interior)
        peers = ", ".join(f"{t.stop - t.start} rows from rank {t.peer}" for t in self.receives)
        return (
            f"rank {self.rank} of {self.ranks}: tokens [{self.start}, {self.stop}) of {self.seq_len}, "
            f"window ({self.window.left}, {self.window.right})\n"
            f"halo: {peers or 'nothing to receive'}\n"
            f"rows: {inner} interior, {self.rows - inner} boundary; {self.pairs} (query, key) pairs"
        )


def make_plan(seq_len: int, ranks: int, rank: int, window: Window | tuple[int | None, int | None]) -> Plan:
    """Plan one rank's share of attention over a contiguously sharded sequence.

    Args:
        seq_len: Tokens of the whole sequence.
        ranks: Size of the context-parallel group.
        rank: The rank to plan for.
        window: Neighbours visible to each token.

    Returns:
        The plan. The neighbours' plans agree with it: what one sends, the other receives.

    Raises:
        ValueError: If ``ranks`` < 1, ``rank`` is not one of them, ``seq_len`` < 0, or the window is
            not one.
    """
    if ranks < 1 or not 0 <= rank < ranks or seq_len < 0:
        raise ValueError(
            f"a plan needs seq_len >= 0 and 0 <= rank < ranks, got seq_len={seq_len}, rank={rank}, ranks={ranks}"
        )
    return _make_plan(seq_len, ranks, rank, Window.of(window))


@lru_cache(maxsize=4096)
def _make_plan(seq_len: int, ranks: int, rank: int, window: Window) -> Plan:
    reach_left, reach_right = window.reach(seq_len)
    mine = shard(seq_len, ranks, rank)
    rows = mine.stop - mine.start
    left = min(reach_left, mine.start) if rows else 0
    right = min(reach_right, seq_len - mine.stop) if rows else 0
    boundary_left = min(reach_left, rows) if left else 0
    boundary_right = min(reach_right, rows) if right else 0

    def block(q_start: int, q_stop: int) -> Block:
        """The rows with every key that they reach."""
        k_start = max(0, left + q_start - reach_left)
        k_stop = min(left + rows + right, left + q_stop + reach_right)
        q_start_in_keys = left + q_start - k_start
        band = Band(q_start_in_keys - reach_left, q_start_in_keys + reach_right)
        return Block(q_start, q_stop, k_start, k_stop, band.clip(q_stop - q_start, k_stop - k_start))

    if boundary_left + boundary_right >= rows:
        interior, boundary = (), ((0, rows),)
    else:
        interior = ((boundary_left, rows - boundary_right),)
        boundary = ((0, boundary_left), (rows - boundary_right, rows))
    return Plan(
        seq_len,
        ranks,
        rank,
        window,
        mine.start,
        mine.stop,
        left,
        right,
        sends=_sends(seq_len, ranks, rank, reach_left, reach_right),
        receives=_receives(seq_len, ranks, rank, left, right),
        interior=tuple(block(*span) for span in interior if span[0] < span[1]),
        boundary=tuple(block(*span) for span in boundary if span[0] < span[1]),
    )


def _receives(seq_len: int, ranks: int, rank: int, left: int, right: int) -> tuple[Transfer, ...]:
    """Cut the halo, ``left`` rows before the shard and ``right`` after it, at the owners' edges."""
    chunk = chunk_length(seq_len, ranks)
    mine = shard(seq_len, ranks, rank)
    transfers: list[Transfer] = []
    for first, last, halo_start in ((mine.start - left, mine.start, 0), (mine.stop, mine.stop + right, left)):
        position = first
        while position < last:
            stop = min(last, (position // chunk + 1) * chunk)
            transfers.append(Transfer(position // chunk, halo_start + position - first, halo_start + stop - first))
            position = stop
    return tuple(transfers)


def _sends(seq_len: int, ranks: int, rank: int, reach_left: int, reach_right: int) -> tuple[Transfer, ...]:
    """The rows of this shard that lie in each neighbour's halo."""
    mine = shard(seq_len, ranks, rank)
    transfers: list[Transfer] = []
    for direction in (-1, 1):
        peer = rank + direction
        while 0 <= peer < ranks and mine.start < mine.stop:
            theirs = shard(seq_len, ranks, peer)
            first = mine.start if direction < 0 else max(mine.start, theirs.start - reach_left)
            last = min(mine.stop, theirs.stop + reach_right) if direction < 0 else mine.stop
            if first >= last or theirs.start == theirs.stop:
                break
            transfers.append(Transfer(peer, first - mine.start, last - mine.start))
            peer += direction
    return tuple(transfers)
