"""What one rank receives in one call of ``ring_attention``, from the geometry alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from dtensor_ring_swa.bench.laps import Laps, laps_of, make_laps
from dtensor_ring_swa.bench.shapes import Shape
from dtensor_ring_swa.geometry import Geometry
from dtensor_ring_swa.layout import runs
from dtensor_ring_swa.packing import Boundaries
from dtensor_ring_swa.plan import Plan


@dataclass(frozen=True)
class Sizes:
    """Bytes an element: of the inputs, of a kernel's dk and dv, and of merged sums."""

    own: int
    grad: int
    wide: int


@dataclass(frozen=True)
class Traffic:
    """One call on one rank.

    Attributes:
        shape: The layer.
        batch: Sequences.
        layout: How positions lie on the ranks.
        load_balance: As ``ring_attention`` takes it.
        seq_len: Tokens of the whole sequence.
        ranks: Size of the group.
        rank: This rank.
        boundaries: Where packed documents begin and end; None for one document.
        sink_tokens: First tokens of each document that all of it sees.
    """

    shape: Shape
    batch: int
    layout: str
    load_balance: str
    seq_len: int
    ranks: int
    rank: int
    boundaries: Boundaries | None = None
    sink_tokens: int = 0

    @cached_property
    def geometry(self) -> Geometry:
        """What ``ring_attention`` makes of the call."""
        return Geometry(
            self.shape.window, self.sink_tokens, self.layout, self.load_balance, "auto", self.seq_len, self.ranks,
            self.rank,
        )  # fmt: skip

    @property
    def compute_layout(self) -> str:
        """The layout in which keys pass by."""
        return self.geometry.compute_layout(self.boundaries)

    @property
    def is_ring(self) -> bool:
        """Whether whole shards pass by, rather than a halo being held."""
        return self.geometry.is_ring(self.compute_layout, self.boundaries is not None)

    @property
    def laps(self) -> Laps:
        """This rank's part in the ring."""
        if self.boundaries or self.sink_tokens:
            return laps_of(self.geometry.ring(self.compute_layout, self.boundaries))
        return make_laps(self.compute_layout, self.seq_len, self.ranks, self.rank, self.shape.window)

    @property
    def plan(self) -> Plan:
        """This rank's part with a halo."""
        return self.geometry.plan(self.boundaries)

    @property
    def key_row(self) -> int:
        """Elements of one row of K and V, over the batch."""
        return self.batch * self.shape.kv_heads * (self.shape.head_dim + self.shape.v_head_dim)

    @property
    def q_row(self) -> int:
        """Elements of one row of q."""
        return self.batch * self.shape.q_heads * self.shape.head_dim

    @property
    def out_row(self) -> int:
        """Elements of one row of out."""
        return self.batch * self.shape.q_heads * self.shape.v_head_dim

    def received(self, sizes: Sizes) -> tuple[int, int]:
        """Bytes that this rank receives, forward and backward."""
        keys, dealt = self.keys(sizes), self.dealt(sizes)
        return keys[0] + dealt[0], keys[1] + dealt[1]

    def keys(self, sizes: Sizes) -> tuple[int, int]:
        """K and V, and in backward the gradients that come home; a ring fetches K and V again there."""
        if not self.is_ring:
            returned = sum(map(len, self.plan.sends))
            return self.plan.received_rows * self.key_row * sizes.own, returned * self.key_row * sizes.grad
        fetched = self.laps.received_rows * self.key_row * sizes.own
        return fetched, fetched + self.laps.returned_rows * self.key_row * sizes.grad

    def dealt(self, sizes: Sizes) -> tuple[int, int]:
        """What moves to another layout and back, if anything does."""
        if self.compute_layout == self.layout:
            return 0, 0
        there, back = self._moved(self.layout, self.compute_layout), self._moved(self.compute_layout, self.layout)
        lse = self.batch * self.shape.q_heads * sizes.wide
        inputs, out = (self.q_row + self.key_row) * sizes.own, self.out_row * sizes.own
        return there * inputs + back * (out + lse), there * (inputs + 2 * out + lse) + back * inputs

    def _moved(self, old: str, new: str) -> int:
        """Rows that come from other ranks: all but those that this one holds in either layout, one being contiguous."""
        before, after = (runs(layout, self.seq_len, self.ranks, self.rank) for layout in (old, new))
        whole, parts = (before, after) if old == "contiguous" else (after, before)
        kept = sum(len(part.within(run.start, run.stop)[1]) for run in whole for part in parts)
        return sum(map(len, after)) - kept
