"""Kernel calls as integers: which rows see which keys."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, pairwise
from typing import TypeVar

from dtensor_ring_swa.band import Band
from dtensor_ring_swa.layout import Run
from dtensor_ring_swa.packing import Boundaries, documents_within
from dtensor_ring_swa.window import Window

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


def blocks_between(
    queries: Sequence[Run], keys: Sequence[Run], window: Window, boundaries: Boundaries, sink_tokens: int = 0
) -> list[Block]:
    """The blocks in which rows at the positions of ``queries`` see rows at the positions of ``keys``.

    A query sees its window's keys in its own document, and the document's first ``sink_tokens`` as far
    as they lie before the window.

    Args:
        queries: The query rows, run after run.
        keys: The key rows, run after run, with the steps of ``queries``.
        window: Neighbours visible, in tokens.
        boundaries: Where documents begin and end.
        sink_tokens: First tokens of a document that all of its later tokens see.
    """
    left, right = window.sides
    spans = ((min(run.start for run in runs), max(run.stop for run in runs)) for runs in (queries, keys))
    found: list[Block] = []
    for document in documents_within(boundaries, *spans):
        blocks = _visible(queries, keys, document, document, left, right)
        if sink_tokens and left is not None:
            sinks = document[0], min(document[0] + sink_tokens, document[1])
            blocks += _visible(queries, keys, document, sinks, None, -left - 1)
        found += fused(blocks)
    return found


def _visible(
    queries: Sequence[Run],
    keys: Sequence[Run],
    q_span: tuple[int, int],
    k_span: tuple[int, int],
    left: int | None,
    right: int | None,
) -> list[Block]:
    """Blocks between the query rows and the key rows at positions in two spans, cut to what is shown."""
    found, q_start = [], 0
    for q_run in queries:
        q_skipped, q_part = q_run.within(*q_span)
        k_start = 0
        for k_run in keys:
            k_skipped, k_part = k_run.within(*k_span)
            if len(q_part) and len(k_part):
                rows, columns, band = Band.between(q_part, k_part, left, right).trim(len(q_part), len(k_part))
                if rows:
                    block = Block(
                        rows.start, rows.stop, columns.start, columns.stop, band.clip(len(rows), len(columns))
                    )
                    found.append(block.moved(q_start + q_skipped, k_start + k_skipped))
            k_start += len(k_run)
        q_start += len(q_run)
    return found


def fused(blocks: list[Block]) -> list[Block]:
    """Fewer blocks that show the same: where two join to one band, one kernel call does for both.

    All of a step's blocks do in the zigzag layout of a causal window: each row's keys are a run of
    the other rank's rows, although not of positions.
    """
    for first, second in combinations(blocks, 2):
        joint = _joint(first, second)
        if joint is not None:
            return fused([joint, *(block for block in blocks if block not in (first, second))])
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
