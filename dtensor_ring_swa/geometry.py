"""What one call asks of one rank, as far as integers go."""

from __future__ import annotations

from dataclasses import dataclass

from dtensor_ring_swa.choice import choose_exchange
from dtensor_ring_swa.deal import Deal, make_deal
from dtensor_ring_swa.layout import runs
from dtensor_ring_swa.packing import Boundaries
from dtensor_ring_swa.plan import Plan
from dtensor_ring_swa.planning import make_plan
from dtensor_ring_swa.ring import Ring, balanced_layout, make_ring
from dtensor_ring_swa.window import Window


@dataclass(frozen=True)
class Geometry:
    """What a caller asks, as far as integers go: the same on every rank but for its place.

    Attributes:
        window: The window, in tokens.
        sink_tokens: First tokens of each document that its later tokens see besides their window.
        layout: How positions lie on the ranks.
        load_balance: Whether to compute contiguous shards in another layout: see ``balanced_layout``.
        exchange: Halo or ring: see ``choose_exchange``.
        seq_len: Tokens of the whole sequence.
        ranks: Ranks that share the sequence.
        rank: This one of them.
    """

    window: Window
    sink_tokens: int
    layout: str
    load_balance: str
    exchange: str
    seq_len: int
    ranks: int
    rank: int

    def compute_layout(self, boundaries: Boundaries | None = None) -> str:
        """The layout to compute in.

        Raises:
            ValueError: If a layout cannot deal out so many tokens.
        """
        if self.layout != "contiguous" or (self.exchange == "halo" and self.load_balance == "auto"):
            return self.layout
        return balanced_layout(self.load_balance, self.seq_len, self.ranks, self.window, boundaries)

    def is_ring(self, compute_layout: str, packed: bool) -> bool:
        """Whether keys pass by in a ring rather than being held as a halo."""
        choice = choose_exchange(self.exchange, compute_layout, self.seq_len, self.ranks, self.window, packed)
        return choice.exchange == "ring"

    def kept_rows(self, packed: bool, in_graph: bool) -> int:
        """Rows of K and V to keep for backward, known before the documents are; in a graph the same on every rank."""
        if self.ranks == 1 or self.is_ring(self.compute_layout(), packed):
            return 0
        if not packed and not in_graph:
            return self.plan(None).received_rows
        return sum(self.window.reach(self.seq_len)) + min(self.sink_tokens, self.seq_len)

    def check_rows(self, rows: int) -> None:
        """Raise ValueError unless this rank holds the rows that its layout gives it."""
        expected = sum(map(len, runs(self.layout, self.seq_len, self.ranks, self.rank)))
        if rows != expected:
            raise ValueError(
                f"rank {self.rank} of {self.ranks} holds {rows} of {self.seq_len} tokens, but layout "
                f"{self.layout!r} gives it {expected}; seq_len= counts the whole sequence, and a DTensor made by "
                "from_local of uneven shards needs its global shape"
            )

    def plan(self, boundaries: Boundaries | None) -> Plan:
        """This rank's part with a halo, with the boundaries of documents if there are any."""
        return make_plan(self.seq_len, self.ranks, self.rank, self.window, boundaries, self.sink_tokens)

    def ring(self, compute_layout: str, boundaries: Boundaries | None) -> Ring:
        """This rank's part in the ring, in the layout to compute in."""
        return make_ring(
            compute_layout, self.seq_len, self.ranks, self.rank, self.window, boundaries, self.sink_tokens
        )  # fmt: skip

    def deal(self, old: str, new: str) -> Deal:
        """This rank's part in moving the sequence from one layout to another."""
        return make_deal(old, new, self.seq_len, self.ranks, self.rank)
