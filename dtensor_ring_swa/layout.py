"""Which global positions lie on which rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

LAYOUTS = ("contiguous", "striped", "zigzag")


@dataclass(frozen=True)
class Run:
    """Rows at the positions ``start, start + step, ...`` below ``stop``, in this order."""

    start: int
    stop: int
    step: int = 1

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def positions(self) -> range:
        """The global position of each row."""
        return range(self.start, self.stop, self.step)

    def within(self, first: int, last: int) -> tuple[int, Run]:
        """The rows at positions in ``[first, last)``: how many come before them, and their run."""
        skipped = max(0, -(-(first - self.start) // self.step))
        return skipped, Run(self.start + skipped * self.step, min(self.stop, last), self.step)


def chunk_length(seq_len: int, ranks: int) -> int:
    """Tokens on the first rank: ``torch.chunk`` gives every rank this many until none are left."""
    return -(-seq_len // ranks)


def shard(seq_len: int, ranks: int, rank: int) -> Run:
    """The contiguous shard of ``rank``, of ``torch.chunk``'s size: trailing ranks may hold nothing.

    Example: 5 tokens on 4 ranks lie as 2, 2, 1, 0.
    """
    chunk = chunk_length(seq_len, ranks)
    return Run(min(rank * chunk, seq_len), min((rank + 1) * chunk, seq_len))


@lru_cache(maxsize=4096)
def runs(layout: str, seq_len: int, ranks: int, rank: int) -> tuple[Run, ...]:
    """The positions that a rank holds, in the order of its rows.

    * ``contiguous``: ``torch.chunk``'s shard, of any length.
    * ``striped``: token i on rank ``i % ranks``.
    * ``zigzag``: of ``2 * ranks`` slices, rank r holds r and ``2 * ranks - 1 - r``.

    One rank holds a sequence of any length in its own order.

    Raises:
        ValueError: For another layout, or a length that the layout cannot deal out evenly.
    """
    if layout == "contiguous":
        return (shard(seq_len, ranks, rank),)
    parts = {"striped": ranks, "zigzag": 2 * ranks}.get(layout)
    if parts is None:
        raise ValueError(f"layout must be one of {LAYOUTS}, got {layout!r}")
    if ranks == 1:
        return (Run(0, seq_len),)
    if seq_len % parts:
        raise ValueError(
            f"layout={layout!r} on {ranks} ranks needs a multiple of {parts} tokens, got {seq_len}; pad the sequence"
        )
    if layout == "striped":
        return (Run(min(rank, seq_len), seq_len, ranks),)
    width = seq_len // parts
    return tuple(Run(part * width, (part + 1) * width) for part in (rank, parts - 1 - rank))
