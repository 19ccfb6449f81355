"""The dispatch rules: what the ops do when q, k and v are DTensors.

A rule reads placements, unwraps the shards, runs the same op on them with the process group of the
mesh axis that shards the sequence, and wraps the results. It checks only what every rank sees alike,
before anything is sent, so that either all ranks raise or none does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Shard

from dtensor_ring_swa.groups import group_of
from dtensor_ring_swa.ops import attention, attention_backward

_BATCH, _SEQUENCE, _HEADS = 0, 1, 2
_LSE_DIM = {_BATCH: 0, _HEADS: 1, _SEQUENCE: 2}


@dataclass(frozen=True)
class Sharding:
    """How q, k and v lie on a mesh, read from their placements.

    Attributes:
        sequence_axis: Mesh axis that shards the sequence; None if every rank has all of it.
        head_axes: Mesh axes that shard q's heads.
        shared_kv: Whether k and v are replicated over the head axes: each rank uses its heads' part.
        q: Placements of q, out and dq.
        lse: Placements of the lse ``[B, H, S]``.
        kv_grad: Placements of dk and dv: partial sums where ranks share k and v.
    """

    sequence_axis: int | None
    head_axes: tuple[int, ...]
    shared_kv: bool
    q: tuple[Placement, ...]
    lse: tuple[Placement, ...]
    kv_grad: tuple[Placement, ...]


@lru_cache(maxsize=256)
def sharding(
    mesh: DeviceMesh, q: tuple[Placement, ...], k: tuple[Placement, ...], v: tuple[Placement, ...]
) -> Sharding:
    """Read and check the placements of q, k and v.

    Raises:
        ValueError: If they do not describe batch, sequence and heads sharded alike.
    """
    if k != v:
        raise ValueError(f"k and v must have the same placements, got {k} and {v}; redistribute one of them")
    sequence_axes, head_axes, shared = [], [], set()
    for axis in range(mesh.ndim):
        where = f"on mesh axis {_axis_name(mesh, axis)}"
        for name, placement in (("q", q[axis]), ("k and v", k[axis])):
            if not (placement.is_replicate() or _shard_dim(placement) in _LSE_DIM):
                raise ValueError(
                    f"{name} cannot be {placement!r} {where}; accepted are Shard(0) (batch), Shard(1) (sequence), "
                    "Shard(2) (heads) and Replicate(): redistribute() it first"
                )
        if mesh.size(axis) == 1:
            continue
        q_dim, k_dim = _shard_dim(q[axis]), _shard_dim(k[axis])
        if q_dim == _HEADS and k_dim in (None, _HEADS):
            head_axes.append(axis)
            shared.add(k_dim is None)
        elif q_dim != k_dim:
            raise ValueError(
                f"q is {q[axis]!r} and k and v are {k[axis]!r} {where}; batch and sequence must be sharded alike "
                "(k and v may be Replicate() where q is sharded on heads)"
            )
        elif q_dim == _SEQUENCE:
            sequence_axes.append(axis)
    if len(sequence_axes) > 1:
        names = [_axis_name(mesh, axis) for axis in sequence_axes]
        raise ValueError(
            f"the sequence is sharded on the mesh axes {names}; shard it on one, for example "
            "their flattened axis: mesh[...]._flatten()"
        )
    if len(shared) > 1:
        raise ValueError(
            f"k and v are sharded on some and replicated on others of the mesh axes that shard q's heads: q {q}, k {k}"
        )
    return Sharding(
        sequence_axis=sequence_axes[0] if sequence_axes else None,
        head_axes=tuple(head_axes),
        shared_kv=True in shared,
        q=q,
        lse=tuple(Shard(_LSE_DIM[p.dim]) if isinstance(p, Shard) else p for p in q),
        kv_grad=tuple(Partial() if axis in head_axes and True in shared else p for axis, p in enumerate(k)),
    )


def check_dtensors(q: DTensor, k: DTensor, v: DTensor, mesh: DeviceMesh | ProcessGroup | None) -> Sharding:
    """How three DTensors are sharded, if attention can be computed on them as they lie.

    Raises:
        ValueError: If their meshes or placements do not fit together, heads do not divide over the
            ranks that share them, or ``mesh`` has other ranks than the sequence.
    """
    if not q.device_mesh == k.device_mesh == v.device_mesh:
        raise ValueError(f"q, k and v lie on different meshes: {[x.device_mesh for x in (q, k, v)]}")
    how = sharding(q.device_mesh, q.placements, k.placements, v.placements)
    q_heads, kv_heads = q.shape[_HEADS], k.shape[_HEADS]
    ranks = math.prod(q.device_mesh.size(axis) for axis in how.head_axes)
    if q_heads % ranks or (kv_heads % ranks and not how.shared_kv):
        raise ValueError(
            f"{q_heads} query heads and {kv_heads} key/value heads do not divide over {ranks} ranks; with "
            "fewer key/value heads than ranks, replicate k and v on that mesh axis"
        )
    if mesh is not None and mesh != q.device_mesh:
        _check_same_ranks(mesh, q.device_mesh, how.sequence_axis)
    return how


def _check_same_ranks(mesh: DeviceMesh | ProcessGroup, own: DeviceMesh, axis: int | None) -> None:
    given = dist.get_process_group_ranks(group_of(mesh))
    mine = [dist.get_rank()] if axis is None else dist.get_process_group_ranks(own.get_group(axis))
    if given != mine:
        raise ValueError(
            f"mesh= has the ranks {given}, but the DTensors' sequence lies on the ranks {mine} of their own "
            f"mesh {own}; leave mesh= out for DTensors"
        )


@dataclass(frozen=True)
class _Heads:
    """The part of replicated k and v that this rank's query heads use, and the way back.

    Attributes:
        total: Key/value heads of the whole tensor.
        used: Heads taken, in order; repeated for each query head where they do not share evenly.
    """

    total: int
    used: tuple[int, ...]

    @classmethod
    def of(cls, mesh: DeviceMesh, axes: Sequence[int], q_heads: int, kv_heads: int) -> _Heads:
        ranks, index = 1, 0
        for axis in axes:
            ranks, index = ranks * mesh.size(axis), index * mesh.size(axis) + mesh.get_local_rank(axis)
        mine = range(index * q_heads // ranks, (index + 1) * q_heads // ranks)
        per_query = [head * kv_heads // q_heads for head in mine]
        distinct = sorted(set(per_query))
        shared_evenly = len({per_query.count(head) for head in distinct}) == 1
        return cls(kv_heads, tuple(distinct if shared_evenly else per_query))

    @property
    def _span(self) -> slice | None:
        first, last = self.used[0], self.used[-1]
        return slice(first, last + 1) if self.used == tuple(range(first, last + 1)) else None

    def take(self, x_BSGD: torch.Tensor) -> torch.Tensor:
        if self._span is not None:
            return x_BSGD[:, :, self._span]
        return x_BSGD[:, :, list(self.used)]

    def give(self, grad: torch.Tensor) -> torch.Tensor:
        """The transpose of ``take``: zero for the heads that other ranks use."""
        full = grad.new_zeros(*grad.shape[:2], self.total, grad.shape[3])
        if self._span is not None:
            full[:, :, self._span] = grad
            return full
        return full.index_add_(2, torch.tensor(self.used, device=grad.device), grad)


@dataclass(frozen=True)
class _Shards:
    """The unwrapped call: shards, and how to wrap the results."""

    how: Sharding
    mesh: DeviceMesh
    heads: _Heads | None
    locals: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    group_name: str

    def wrap(self, local: torch.Tensor, placements: tuple[Placement, ...], shape: Sequence[int]) -> DTensor:
        return wrap(local, self.mesh, placements, shape)


def _unwrap(q: DTensor, k: DTensor, v: DTensor) -> _Shards:
    how, mesh = check_dtensors(q, k, v, None), q.device_mesh
    local_q, local_k, local_v = (x._local_tensor for x in (q, k, v))
    heads = _Heads.of(mesh, how.head_axes, q.shape[_HEADS], k.shape[_HEADS]) if how.shared_kv else None
    if heads is not None:
        local_k, local_v = heads.take(local_k), heads.take(local_v)
    axis = how.sequence_axis
    group_name = "" if axis is None else mesh.get_group(axis).group_name
    return _Shards(how, mesh, heads, (local_q, local_k, local_v), group_name)


def wrap(local: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], shape: Sequence[int]) -> DTensor:
    """A DTensor of a shard; the global shape is given, since uneven shards do not tell it."""
    stride = [1]
    for size in reversed(shape[1:]):
        stride.insert(0, stride[0] * max(size, 1))
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(stride))


def _attention_rule(
    cls: type, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
) -> tuple[DTensor, DTensor, torch.Tensor]:
    q, k, v, *attributes, _ = args
    shards = _unwrap(q, k, v)
    out, lse, halo = attention(*shards.locals, *attributes, shards.group_name)
    batch, rows, heads, _ = q.shape
    return (
        shards.wrap(out, shards.how.q, (batch, rows, heads, v.shape[3])),
        shards.wrap(lse, shards.how.lse, (batch, heads, rows)),
        halo,
    )


def _backward_rule(
    cls: type, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
) -> tuple[DTensor, DTensor, DTensor]:
    dout, q, k, v, out, lse, halo, *attributes, _ = args
    shards = _unwrap(q, k, v)
    if dout.placements != shards.how.q:
        dout = dout.redistribute(placements=shards.how.q)
    grads = attention_backward(
        dout._local_tensor, *shards.locals, out._local_tensor, lse._local_tensor, halo, *attributes, shards.group_name
    )
    dq, dk, dv = grads
    if shards.heads is not None:
        dk, dv = shards.heads.give(dk), shards.heads.give(dv)
    return (
        shards.wrap(dq, shards.how.q, q.shape),
        shards.wrap(dk, shards.how.kv_grad, k.shape),
        shards.wrap(dv, shards.how.kv_grad, v.shape),
    )


def _shard_dim(placement: Placement) -> int | None:
    # Exactly Shard: a strided or ragged shard lays the rows out in another order.
    return placement.dim if type(placement) is Shard else None


def _axis_name(mesh: DeviceMesh, axis: int) -> str | int:
    return axis if mesh.mesh_dim_names is None else mesh.mesh_dim_names[axis]


attention.register_torch_dispatch(DTensor, _attention_rule)
attention_backward.register_torch_dispatch(DTensor, _backward_rule)
