"""Ranks compare their calls, host to host, before any tensor moves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from dtensor_ring_swa.groups import host_group
from dtensor_ring_swa.layout import shard

T = TypeVar("T")
# Larger values are checksums, or as good as none to a reader.
_MOST_READABLE = 2**27


def agree(group: ProcessGroup, names: Sequence[str], facts: Sequence[int], error: Exception | None = None) -> int:
    """Let the ranks of ``group`` compare their calls on the host before any tensor moves.

    One message of a few integers each; no device is synchronised. A rank whose own check failed
    passes its ``error``: all ranks then raise, and none waits for a peer that will not come.

    Args:
        group: The context-parallel group; every rank of it calls.
        names: What the facts are called in errors; the same on every rank.
        facts: First the tokens of this rank's shard, which must fit ``torch.chunk``'s sizes, then
            what must be equal on all ranks. Not read if there is an ``error``.
        error: What this rank found wrong by itself.

    Returns:
        Tokens of the whole sequence.

    Raises:
        ValueError: If the ranks' facts do not fit together, or a peer passed an error.
        Exception: ``error`` itself.
    """
    ranks = dist.get_world_size(group)
    sound_and_facts = [0] * (1 + len(names)) if error is not None else [1, *facts]
    mine = torch.tensor(sound_and_facts, dtype=torch.int64)
    table = [torch.empty_like(mine) for _ in range(ranks)]
    dist.all_gather(table, mine, group=host_group(group))
    sound, rows, *others = zip(*(row.tolist() for row in table), strict=True)
    if error is not None:
        raise error
    if not all(sound):
        raise ValueError(
            f"rank {sound.index(0)} of the context-parallel group refused its arguments; its own error says why"
        )
    for name, values in zip(names[1:], others, strict=True):
        if len(set(values)) > 1:
            raise ValueError(f"the ranks disagree on {name}: {_told(values)}; pass the same on every rank")
    total = sum(rows)
    expected = [len(shard(total, ranks, rank)) for rank in range(ranks)]
    if list(rows) != expected:
        raise ValueError(
            f"shards of {list(rows)} tokens are not torch.chunk's of {total} tokens, {expected}; "
            "shard with shard_sequence(mesh, ...)"
        )
    return total


def _told(values: Sequence[int]) -> str:
    """The ranks' values or, where these are checksums, which ranks are not like the first."""
    if max(values) <= _MOST_READABLE:
        return str(list(values))
    others = [rank for rank, value in enumerate(values) if value != values[0]]
    return f"ranks {others} of the context-parallel group have another than rank 0"


def agree_on_rows(group: ProcessGroup, rows: int, seq_len: int) -> None:
    """Raise ValueError on every rank unless all hold ``rows`` of ``seq_len`` rows, as a graph has it. Collective."""
    total = agree(group, ("the length of a shard",), (rows,))
    if total != seq_len:
        ranks = group.size()
        raise ValueError(
            f"in a graph of torch.compile shards must be of one length, got {rows} tokens here and {total} on the "
            f"{ranks} ranks together; pad the sequence to {-(-total // ranks) * ranks} tokens"
        )


def gather_objects(group: ProcessGroup, mine: T) -> list[T]:
    """What every rank of ``group`` passes, by rank, sent between hosts. Collective.

    Let the ranks ``agree`` first: a rank that raises instead of calling leaves its peers waiting.
    """
    table: list[T] = [mine] * dist.get_world_size(group)
    dist.all_gather_object(table, mine, group=host_group(group))
    return table
