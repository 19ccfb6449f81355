"""Where documents lie in a packed sequence, as integers."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator

# Positions at which documents begin, and the length of the sequence at the end; repeats are empty documents.
Boundaries = tuple[int, ...]


def check_boundaries(boundaries: Boundaries, seq_len: int | None = None, name: str = "cu_seqlens") -> None:
    """Raise ValueError unless these cut a sequence of ``seq_len`` tokens into documents; name the entry."""
    if len(boundaries) < 2 or boundaries[0] != 0:
        raise ValueError(
            f"{name} must start at 0 and have at least 2 entries, got {len(boundaries)} entries"
            + (f", {name}[0] = {boundaries[0]}" if boundaries else "")
        )
    for index in range(1, len(boundaries)):
        if boundaries[index] < boundaries[index - 1]:
            raise ValueError(
                f"{name} must not decrease, got {name}[{index}] = {boundaries[index]} after {boundaries[index - 1]}"
            )
    if seq_len is not None and boundaries[-1] != seq_len:
        raise ValueError(
            f"{name} must end at the {seq_len} tokens of the whole sequence, got {name}[-1] = "
            f"{boundaries[-1]}; make padding a document of its own"
        )


def document_at(boundaries: Boundaries, position: int) -> tuple[int, int]:
    """First position and end of the document that holds ``position``."""
    index = bisect_right(boundaries, position)
    return boundaries[index - 1], boundaries[index]


def documents_within(boundaries: Boundaries, *spans: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """First position and end of each document that has a token in every ``[start, stop)`` of ``spans``."""
    if any(start >= stop for start, stop in spans):
        return
    first = max(bisect_right(boundaries, start) for start, _ in spans)
    last = min(bisect_left(boundaries, stop) for _, stop in spans)
    for index in range(first, last + 1):
        if boundaries[index - 1] < boundaries[index]:
            yield boundaries[index - 1], boundaries[index]
