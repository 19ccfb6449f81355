"""Which global positions lie on which rank."""

from __future__ import annotations

from dataclasses import dataclass


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


def chunk_length(seq_len: int, ranks: int) -> int:
    """Tokens on the first rank: ``torch.chunk`` gives every rank this many until none are left."""
    return -(-seq_len // ranks)


def shard(seq_len: int, ranks: int, rank: int) -> Run:
    """The contiguous shard of ``rank``, of ``torch.chunk``'s size: trailing ranks may hold nothing.

    Example: 5 tokens on 4 ranks lie as 2, 2, 1, 0.
    """
    chunk = chunk_length(seq_len, ranks)
    return Run(min(rank * chunk, seq_len), min((rank + 1) * chunk, seq_len))
