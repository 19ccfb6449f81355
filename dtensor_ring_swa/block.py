"""Kernel calls as integers: which rows see which keys."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TypeVar

from dtensor_ring_swa.band import Band

_T = TypeVar("_T")


@dataclass(frozen=True)
class Rectangle:
    """Query rows ``q_start:q_stop`` and key rows ``k_start:k_stop``."""

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int

    @property
    def q_len(self) -> int:
        """Query rows."""
        return self.q_stop - self.q_start

    @property
    def k_len(self) -> int:
        """Key rows."""
        return self.k_stop - self.k_start

    @property
    def rows(self) -> slice:
        """The query rows, as a slice."""
        return slice(self.q_start, self.q_stop)

    @property
    def keys(self) -> slice:
        """The key rows, as a slice."""
        return slice(self.k_start, self.k_stop)


@dataclass(frozen=True)
class Block(Rectangle):
    """Query rows ``q_start:q_stop`` against the key rows ``k_start:k_stop``, as far as the band shows."""

    band: Band

    @property
    def pairs(self) -> int:
        """(query, key) pairs that the band shows."""
        return self.band.pairs(self.q_len, self.k_len)

    def moved(self, q_by: int, k_by: int) -> Block:
        """The same block where rows count from elsewhere."""
        return Block(self.q_start + q_by, self.q_stop + q_by, self.k_start + k_by, self.k_stop + k_by, self.band)


@dataclass(frozen=True)
class Call(Rectangle):
    """One kernel call: rows that attend, each to all keys that any of the blocks shows it.

    Attributes:
        q_start: First query row of the call.
        q_stop: One past its last query row.
        k_start: First key row of the call.
        k_stop: One past its last key row.
        blocks: Rows of a block count from ``q_start`` and ``k_start``. A row may be in several, which
            never show it a key twice, or in none.
    """

    blocks: tuple[Block, ...]

    @classmethod
    def of(cls, blocks: Sequence[Block]) -> Call:
        """The call that computes these blocks."""
        q_start, k_start = min(b.q_start for b in blocks), min(b.k_start for b in blocks)
        return cls(
            q_start, max(b.q_stop for b in blocks), k_start, max(b.k_stop for b in blocks),
            tuple(b.moved(-q_start, -k_start) for b in blocks),
        )  # fmt: skip

    @classmethod
    def single(cls, q_len: int, k_len: int, band: Band) -> Call:
        """The call of one band between ``q_len`` queries and ``k_len`` keys."""
        return cls(0, q_len, 0, k_len, (Block(0, q_len, 0, k_len, band),))

    @cached_property
    def layers(self) -> tuple[Call, ...]:
        """The fewest calls on this call's rows and keys in which no query row is in two blocks.

        One in most calls; sink tokens make a second one.
        """
        ordered = sorted(self.blocks, key=lambda b: b.q_start)
        return tuple(map(Call.of, in_layers(ordered, lambda before, after: before.q_stop <= after.q_start)))

    @cached_property
    def keys_overlap(self) -> bool:
        """Whether a key row is in more than one block."""
        return _overlap((b.k_start, b.k_stop) for b in self.blocks)

    @cached_property
    def covers_rows(self) -> bool:
        """Whether every query row is in a block."""
        return _covers(((b.q_start, b.q_stop) for b in self.blocks), self.q_len)

    @cached_property
    def covers_keys(self) -> bool:
        """Whether every key row is in a block."""
        return _covers(((b.k_start, b.k_stop) for b in self.blocks), self.k_len)

    @cached_property
    def _hash(self) -> int:
        return hash((self.q_start, self.q_stop, self.k_start, self.k_stop, self.blocks))

    def __hash__(self) -> int:
        # Kept: kernels look up what they prepared for a call at each layer, and documents are many.
        return self._hash


def in_layers(ordered: Iterable[_T], may_precede: Callable[[_T, _T], bool]) -> list[list[_T]]:
    """Share things out, in their order, so that each thing may follow the one before it in its layer."""
    layers: list[list[_T]] = []
    for thing in ordered:
        layer = next((layer for layer in layers if may_precede(layer[-1], thing)), None)
        if layer is None:
            layers.append([thing])
        else:
            layer.append(thing)
    return layers


def _overlap(spans: Iterable[tuple[int, int]]) -> bool:
    ordered = sorted(spans)
    return any(first[1] > second[0] for first, second in pairwise(ordered))


def _covers(spans: Iterable[tuple[int, int]], length: int) -> bool:
    reached = 0
    for start, stop in sorted(spans):
        if start > reached:
            return False
        reached = max(reached, stop)
    return reached >= length
