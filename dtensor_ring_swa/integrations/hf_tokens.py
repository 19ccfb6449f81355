"""What the ranks must know of a forward's tokens: how many there are, and where documents begin."""

from __future__ import annotations

from dataclasses import dataclass
from zlib import crc32

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from dtensor_ring_swa.agreement import agree
from dtensor_ring_swa.autocast import autocast_dtype
from dtensor_ring_swa.documents import Documents
from dtensor_ring_swa.groups import group_of
from dtensor_ring_swa.layout import shard
from dtensor_ring_swa.sequence import gather_sequence

Mesh = DeviceMesh | ProcessGroup | None
# cu_seq_lens_q and cu_seq_lens_k.
Edges = tuple[torch.Tensor | None, torch.Tensor | None]

FACTS = (
    "the length of a shard", "the batch size", "the number of rows of position_ids", "cu_seq_lens_q",
    "the keywords that forward does not name, which the model may hand to its attention",
    "training or evaluation, whether gradients are on, autocast, or the dtype of what is computed with",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Tokens:
    """The sequence of one forward.

    Attributes:
        seq_len: Tokens of the whole sequence.
        documents: Where packed documents begin; None if nothing is packed.
    """

    seq_len: int
    documents: Documents | None = None


def ranks_of(mesh: Mesh) -> int:
    """How many ranks share the sequence."""
    return 1 if mesh is None else dist.get_world_size(group_of(mesh))


def settle(
    mesh: Mesh,
    batch: int,
    rows: int,
    position_ids: torch.Tensor | None = None,
    cu_seq_lens: Edges = (None, None),
    error: Exception | None = None,
    keywords: str = "",
    state: str = "",
) -> Tokens:
    """Let the ranks compare their inputs, and find the documents. Collective.

    Args:
        mesh: The context-parallel axis; None if the sequence is whole here.
        batch: Sequences of the batch.
        rows: Tokens of this rank's shard.
        position_ids: Positions of this rank's tokens ``[batch or 1, rows]``. Where they return to 0, a
            document begins.
        cu_seq_lens: Boundaries of documents in the whole sequence ``[N + 1]``, those of the queries and of the
            keys, which must be the same; needs a batch of 1.
        error: What this rank has found wrong already; then all ranks raise.
        keywords: What else the model was called with, which must be the same on all ranks.
        state: What holds around the call, which must be as well: see ``state_of``.

    Raises:
        ValueError: If the inputs do not fit together, on every rank.
        Exception: ``error`` itself.
    """
    edges = None
    try:
        edges = _read_edges(*cu_seq_lens)
        _check_shape(position_ids, batch, rows)
    except ValueError as problem:
        error = error or problem
    if mesh is None:
        if error is not None:
            raise error
        seq_len = rows
    else:
        others = crc32(repr(edges).encode()), crc32(keywords.encode()), crc32(state.encode())
        facts = (rows, batch, 0 if position_ids is None else len(position_ids), *others)
        seq_len = agree(group_of(mesh), FACTS, facts, error)
    if edges is not None:
        _check_edges(edges, batch, seq_len)
    if not len(shard(seq_len, ranks_of(mesh), ranks_of(mesh) - 1)):
        raise ValueError(
            f"{seq_len} tokens on {ranks_of(mesh)} ranks leave the last rank none, with which transformers cannot "
            "do; use fewer ranks, or longer sequences"
        )
    rows_of = _packed(mesh, seq_len, position_ids, edges)
    if all(len(row) == 2 for row in rows_of):
        return Tokens(seq_len)
    return Tokens(seq_len, Documents(rows_of[0] if len(set(rows_of)) == 1 else rows_of, mesh))


def state_of(module: nn.Module, x: torch.Tensor) -> str:
    """What decides, besides a call's arguments, whether a module raises and what its attention exchanges."""
    dtype = x.dtype if x.is_floating_point() else None
    return repr((module.training, torch.is_grad_enabled(), autocast_dtype(x.device), dtype))


def _read_edges(of_queries: object, of_keys: object) -> list[int] | None:
    """Boundaries as integers; None if there are none."""
    read: list[list[int] | None] = []
    for name, given in (("cu_seq_lens_q", of_queries), ("cu_seq_lens_k", of_keys)):
        if given is not None and (not isinstance(given, torch.Tensor) or given.is_floating_point()):
            found = given.dtype if isinstance(given, torch.Tensor) else type(given).__name__
            raise ValueError(f"{name} must be a tensor of integers, got {found}")
        read.append(None if given is None else given.flatten().tolist())
    edges, keys = read
    if keys not in (None, edges):
        raise ValueError(
            f"cu_seq_lens_k {keys} must be what cu_seq_lens_q is, {edges}: queries and keys are of the same documents"
        )
    return edges


def _check_shape(position_ids: object, batch: int, rows: int) -> None:
    """Raise ValueError unless positions are those of this rank's shard, or None."""
    if position_ids is None:
        return
    shape = list(position_ids.shape) if isinstance(position_ids, torch.Tensor) else type(position_ids).__name__
    if shape not in ([batch, rows], [1, rows]):
        raise ValueError(
            f"position_ids must have the shape [{batch} or 1, {rows}] of this rank's shard, got {shape}; shard them "
            "as input_ids are: shard_sequence(mesh, input_ids, position_ids)"
        )


def _packed(
    mesh: Mesh, seq_len: int, position_ids: torch.Tensor | None, edges: list[int] | None
) -> list[tuple[int, ...]]:
    """Boundaries of the documents of each row."""
    stated = tuple(sorted({0, seq_len, *(edges or ())}))
    if position_ids is None:
        return [stated]
    whole = position_ids.long() if mesh is None else gather_sequence(mesh, position_ids.long())
    found = [_restarts(row) for row in whole.cpu()]
    if edges is None:
        _refuse_local_positions(mesh, whole, found)
        return found
    if any(len(row) > 2 and row != stated for row in found):
        raise ValueError(
            f"cu_seq_lens_q {list(stated)} and position_ids, which restart at {list(found[0][1:-1])}, "
            "disagree on where documents begin; give one of them, or make them equal"
        )
    return [stated]


def _restarts(positions_S: torch.Tensor) -> tuple[int, ...]:
    """Boundaries of the documents in a row of positions of the whole sequence."""
    starts = (positions_S.diff() != 1).nonzero().flatten() + 1
    if positions_S[starts].any():
        at = int(starts[positions_S[starts].nonzero()[0]])
        raise ValueError(
            f"position_ids jump from {int(positions_S[at - 1])} to {int(positions_S[at])} at token {at}; they must "
            "count up by 1 and may restart at 0, where a document begins. Padding and other layouts than "
            "contiguous shards are not supported"
        )
    return (0, *starts.tolist(), len(positions_S))


def _refuse_local_positions(mesh: Mesh, whole: torch.Tensor, found: list[tuple[int, ...]]) -> None:
    """Raise if every rank counts from 0, as a model does when it is called without position_ids."""
    ranks, seq_len = ranks_of(mesh), whole.shape[1]
    starts = (shard(seq_len, ranks, rank).start for rank in range(ranks))
    counted_here = tuple(sorted({0, seq_len, *starts}))
    if ranks > 1 and len(counted_here) > 2 and not whole[:, 0].any() and all(row == counted_here for row in found):
        raise ValueError(
            "the positions of every rank's shard count from 0, as if its tokens were a sequence of their own; pass "
            "position_ids=positions(mesh, seq_len)[None], or use attach(model, mesh), which does; generate() passes "
            "its own, and is not supported. If each shard is one document, say so with cu_seq_lens_q="
            f"{list(counted_here)}"
        )


def _check_edges(edges: list[int], batch: int, seq_len: int) -> None:
    if batch != 1:
        raise ValueError(f"cu_seq_lens_q needs a batch of 1 with all documents in one row, got a batch of {batch}")
    if not edges or edges[0] != 0 or edges[-1] != seq_len or sorted(edges) != edges:
        raise ValueError(
            f"cu_seq_lens_q must rise from 0 to the {seq_len} tokens of the whole sequence, the same on every rank, "
            f"got {edges}"
        )
