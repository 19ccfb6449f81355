"""The geometry of one rank's attention, in integers: what to send, what to receive, what to compute.

Nothing here knows tensors. A plan costs time proportional to the neighbours it talks to and the
documents it holds, not to the number of ranks, is hashable, and is cached: the layers of a model share it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from dtensor_ring_swa.block import Block, Call
from dtensor_ring_swa.choice import choose_exchange, is_rebalanced
from dtensor_ring_swa.visible import fused
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
        """(query, key) pairs of the interior."""
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
        peers = ", ".join(f"{len(t)} rows from rank {t.peer}" for t in self.receives)
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
