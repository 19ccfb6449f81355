"""Halo or ring: how a window's keys come to the queries that see them."""

from __future__ import annotations

from dataclasses import dataclass

from dtensor_ring_swa.layout import chunk_length
from dtensor_ring_swa.window import UNLIMITED, Window

EXCHANGES = ("auto", "halo", "ring")
# The most shards that a halo may hold: of a window without limit on some side, and of a limited one.
_UNLIMITED_SHARDS, _LIMITED_SHARDS = 2, 8


@dataclass(frozen=True)
class Choice:
    """How keys travel.

    Attributes:
        exchange: ``"halo"``: a rank holds all keys that it sees, and no results are merged; or
            ``"ring"``: shards pass by, two at a time, and partial results are merged.
        reason: Why, in a few words.
    """

    exchange: str
    reason: str


def is_rebalanced(seq_len: int, ranks: int, window: Window) -> bool:
    """Whether ``load_balance="auto"`` deals contiguous shards to the zigzag layout, where no documents are packed.

    Only windows that are unlimited on one side load the ranks unevenly enough to matter.
    """
    lopsided = (window.left == UNLIMITED) != (window.right == UNLIMITED)
    return lopsided and ranks > 1 and seq_len % (2 * ranks) == 0


def choose_exchange(
    exchange: str, layout: str, seq_len: int, ranks: int, window: Window, packed: bool = False
) -> Choice:
    """Decide from what every rank knows, so that all decide alike.

    The halo needs exactly the rows that the window reaches and merges nothing, so it is preferred
    until it would hold too many shards: two for a window without limit, which would otherwise hold
    the whole sequence, and eight for a limited one. Packed documents do not enter: what is kept for
    backward has a size that does not depend on the data.
    """
    if exchange != "auto":
        return Choice(exchange, "it was asked for")
    if ranks == 1:
        return Choice("halo", "one rank holds everything")
    if layout != "contiguous":
        return Choice("ring", f"layout {layout!r} scatters each window over the ranks")
    chunk = chunk_length(seq_len, ranks)
    halo = min(sum(window.reach(seq_len)), seq_len - chunk)
    unlimited = UNLIMITED in window
    shards = _UNLIMITED_SHARDS if unlimited else _LIMITED_SHARDS
    if unlimited and packed:
        return Choice("ring", "a document may be as long as the sequence")
    if halo > shards * chunk:
        return Choice("ring", f"a halo may hold {halo} rows, more than {shards} shards of {chunk}")
    return Choice("halo", f"it holds at most {halo} rows, no more than {shards} shards of {chunk}")
