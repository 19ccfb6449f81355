"""Around the attention: cut a sequence over the ranks, gather it, number it."""

from __future__ import annotations

from typing import overload
from zlib import crc32

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from dtensor_ring_swa.agreement import agree
from dtensor_ring_swa.dtensor import wrap
from dtensor_ring_swa.groups import group_of
from dtensor_ring_swa.layout import Run, chunk_length, runs
from dtensor_ring_swa.option_checks import check_layout, check_seq_len

# The first is checked against torch.chunk's sizes; all others must be equal on every rank.
_FACTS = (
    "the length of a shard",
    "how many tensors to gather",
    "the dtype, the device, the layout, or sizes of other dims",
)


@overload
def shard_sequence(
    mesh: DeviceMesh | ProcessGroup, tensor: torch.Tensor, /, *, dim: int = ..., layout: str = ..., even: bool = ...
) -> torch.Tensor: ...
@overload
def shard_sequence(
    mesh: DeviceMesh | ProcessGroup,
    first: torch.Tensor,
    second: torch.Tensor,
    /,
    *more: torch.Tensor,
    dim: int = ...,
    layout: str = ...,
    even: bool = ...,
) -> tuple[torch.Tensor, ...]: ...
def shard_sequence(
    mesh: DeviceMesh | ProcessGroup,
    /,
    *tensors: torch.Tensor,
    dim: int = 1,
    layout: str = "contiguous",
    even: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """This rank's shard of tensors that every rank holds whole. Nothing is sent.

    Args:
        mesh: The context-parallel axis: a 1-D DeviceMesh or a ProcessGroup.
        *tensors: Tensors with the whole sequence on ``dim``, for example tokens and labels ``[B, S]``.
        dim: The sequence dim.
        layout: How positions lie on the ranks; see ``ring_attention``.
        even: Raise unless the length divides over the ranks. Set it where the shards go into code that
            ``torch.compile`` traces: unequal shards cannot be in its graphs, and here, outside of them,
            all ranks see the whole length and raise alike.

    Returns:
        The shard of one tensor, or a tuple of shards of several; sizes are ``torch.chunk``'s, so
        trailing ranks may get fewer tokens or none. Shards are views.

    Raises:
        ValueError: If the tensors' lengths differ, ``dim`` is not one of theirs, they are DTensors, this rank is
            not in the mesh, or the length does not divide over the ranks and ``even`` is set.
    """
    check_layout(layout)
    _check_dim(dim)
    group = group_of(mesh)
    ranks = dist.get_world_size(group)
    lengths = {x.shape[dim] for x in tensors if _has_dim(x, dim)}
    if len(lengths) != 1 or not all(_has_dim(x, dim) for x in tensors):
        raise ValueError(f"shard_sequence needs plain tensors of one length on dim {dim}, got {_kinds(tensors)}")
    length = lengths.pop()
    mine = runs(layout, length, ranks, dist.get_rank(group))
    if even and length % ranks:
        raise ValueError(
            f"even=True needs a length that divides over the {ranks} ranks, got {length} tokens on dim {dim}; pad them "
            f"to {chunk_length(length, ranks) * ranks}, or leave even out where torch.compile traces nothing"
        )
    shards = tuple(_take(x, dim, mine) for x in tensors)
    return shards[0] if len(shards) == 1 else shards


@overload
def gather_sequence(
    mesh: DeviceMesh | ProcessGroup, tensor: torch.Tensor, /, *, dim: int = ..., layout: str = ...
) -> torch.Tensor: ...
@overload
def gather_sequence(
    mesh: DeviceMesh | ProcessGroup,
    first: torch.Tensor,
    second: torch.Tensor,
    /,
    *more: torch.Tensor,
    dim: int = ...,
    layout: str = ...,
) -> tuple[torch.Tensor, ...]: ...
def gather_sequence(
    mesh: DeviceMesh | ProcessGroup, /, *tensors: torch.Tensor, dim: int = 1, layout: str = "contiguous"
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """The whole sequence on every rank, from ``shard_sequence``'s shards. Collective.

    It can be differentiated: each rank's gradient is its own rows of the gradient of the whole, which
    is right where every rank computes the same from it.

    Args:
        mesh: The context-parallel axis: a 1-D DeviceMesh or a ProcessGroup.
        *tensors: Shards with the sequence on ``dim``.
        dim: The sequence dim.
        layout: How positions lie on the ranks; see ``ring_attention``.

    Returns:
        One whole tensor, or a tuple of them.

    Raises:
        ValueError: If the shards' lengths are not ``torch.chunk``'s, the ranks' tensors do not fit together,
            or ``dim`` is not one of theirs; on every rank. If this rank is not in the mesh; on it alone.
    """
    group = group_of(mesh)
    try:
        check_layout(layout)
        _check_dim(dim)
        if not tensors or not all(_has_dim(x, dim) for x in tensors):
            raise ValueError(f"gather_sequence needs plain tensors with a dim {dim}, got {_kinds(tensors)}")
    except ValueError as problem:
        agree(group, _FACTS, (), problem)
    axis = mesh if isinstance(mesh, DeviceMesh) else DeviceMesh.from_group(mesh, tensors[0].device.type)
    wholes = []
    for x in tensors:
        shape = list(x.shape)
        sizes = [*shape[: dim % x.ndim], 0, *shape[dim % x.ndim + 1 :]]
        others = repr((x.dtype, x.device.type, layout, dim % x.ndim, sizes))
        shape[dim] = agree(group, _FACTS, (x.shape[dim], len(tensors), crc32(others.encode())))
        dealt = wrap(x, axis, (Shard(dim % x.ndim),), shape).full_tensor()
        if layout != "contiguous":
            ranks = dist.get_world_size(group)
            held = [_positions(runs(layout, shape[dim], ranks, rank), x.device) for rank in range(ranks)]
            dealt = dealt.index_select(dim, torch.cat(held).argsort())
        wholes.append(dealt)
    return wholes[0] if len(wholes) == 1 else tuple(wholes)


def _check_dim(dim: object) -> None:
    """Raise ValueError unless it is an integer."""
    # Dynamo answers isinstance for an integer that varies, but not hasattr (seen on torch 2.13).
    if not (isinstance(dim, int) or hasattr(dim, "__index__")):
        raise ValueError(f"dim must be an integer, the number of the sequence dim, got {dim!r}")


def _has_dim(x: object, dim: int) -> bool:
    """Whether it is a plain tensor with this dim."""
    return isinstance(x, torch.Tensor) and not isinstance(x, DTensor) and -x.ndim <= dim < x.ndim


def _kinds(tensors: tuple[object, ...]) -> list[object]:
    """The sizes of plain tensors, and what others are."""
    return [list(x.shape) if type(x) is torch.Tensor else type(x).__name__ for x in tensors]


def _take(x: torch.Tensor, dim: int, mine: tuple[Run, ...]) -> torch.Tensor:
    """The rows of these runs: a view where they are one run."""
    before = (slice(None),) * (dim % x.ndim)
    parts = [x[(*before, slice(run.start, run.stop, run.step))] for run in mine]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)


def positions(
    mesh: DeviceMesh | ProcessGroup | None,
    seq_len: int,
    layout: str = "contiguous",
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """Global positions of this rank's tokens, for rotary embeddings.

    Args:
        mesh: The context-parallel axis; None if the sequence is whole here.
        seq_len: Tokens of the whole sequence.
        layout: How positions lie on the ranks; see ``ring_attention``.
        device: Where to put them.

    Returns:
        int64 ``[S_local]``.

    Raises:
        ValueError: If ``seq_len`` is not a number of tokens, or one that the layout cannot deal out, or this
            rank is not in the mesh.
    """
    check_layout(layout)
    check_seq_len(seq_len)
    group = None if mesh is None else group_of(mesh)
    ranks, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    return _positions(runs(layout, seq_len, ranks, rank), device)


def _positions(held: tuple[Run, ...], device: torch.device | str | None) -> torch.Tensor:
    return torch.cat([torch.arange(run.start, run.stop, run.step, device=device) for run in held])
