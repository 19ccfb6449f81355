"""Which blocks of query and key rows see each other, from the positions that they hold."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from dtensor_ring_swa.band import Band
from dtensor_ring_swa.block import Block
from dtensor_ring_swa.layout import Run
from dtensor_ring_swa.packing import Boundaries, documents_within
from dtensor_ring_swa.window import Window


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
        # Bounds beyond the block's corners change nothing in it, but would in the joint one.
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
