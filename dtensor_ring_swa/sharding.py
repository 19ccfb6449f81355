"""How q, k and v lie on a mesh, read from their placements and checked.

Only what every rank sees alike is checked, before anything is sent, so that either all ranks raise or
none does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Shard

from dtensor_ring_swa.groups import group_of, refuse_outsider

_BATCH, _SEQUENCE, _HEADS = 0, 1, 2
_LSE_DIM = {_BATCH: 0, _HEADS: 1, _SEQUENCE: 2}


@dataclass(frozen=True, eq=False)
class ThisMesh:
    """A mesh as the key of a cache: itself, and not one that equals it.

    A mesh made after the process groups were destroyed and made anew equals the old one, whose groups are gone.
    """

    mesh: DeviceMesh

    def __hash__(self) -> int:
        return id(self.mesh)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ThisMesh) and self.mesh is other.mesh


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
        where = f"on mesh axis {axis_name(mesh, axis)}"
        for name, placement in (("q", q[axis]), ("k and v", k[axis])):
            if not (placement.is_replicate() or shard_dim(placement) in _LSE_DIM):
                raise ValueError(
                    f"{name} cannot be {placement!r} {where}; accepted are Shard(0) (batch), Shard(1) (sequence), "
                    "Shard(2) (heads) and Replicate(): redistribute() it first"
                )
        if mesh.size(axis) == 1:
            continue
        q_dim, k_dim = shard_dim(q[axis]), shard_dim(k[axis])
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
        names = [axis_name(mesh, axis) for axis in sequence_axes]
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
        ValueError: If their meshes or placements do not fit together, this rank is not in their mesh, heads do
            not divide over the ranks that share them, or ``mesh`` has other ranks than the sequence.
    """
    if not q.device_mesh == k.device_mesh == v.device_mesh:
        raise ValueError(f"q, k and v lie on different meshes: {[x.device_mesh for x in (q, k, v)]}")
    refuse_outsider(q.device_mesh)
    how = sharding(q.device_mesh, q.placements, k.placements, v.placements)
    q_heads, kv_heads = q.shape[_HEADS], k.shape[_HEADS]
    ranks = math.prod([q.device_mesh.size(axis) for axis in how.head_axes])
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


def shard_dim(placement: Placement) -> int | None:
    """The dim that a placement shards, if it does."""
    # Exactly Shard: a strided or ragged shard lays the rows out in another order.
    return placement.dim if type(placement) is Shard else None


def place_of(x: DTensor) -> str:
    """This rank's place on the mesh: its coordinates and its groups.

    A traced graph holds the group and the heads of the rank that traced it, which the caches of
    torch.compile cannot tell from the DTensors: they would serve it to a rank elsewhere on the mesh
    (seen on torch 2.13). So while Dynamo traces, the op is called with the place in place of a group's
    name. The rule does not read it, but the cache's key has it.
    """
    mesh = x.device_mesh
    return f"{mesh.get_coordinate()} {[mesh.get_group(axis).group_name for axis in range(mesh.ndim)]}"


def axis_name(mesh: DeviceMesh, axis: int) -> str | int:
    """What to call a mesh axis."""
    return axis if mesh.mesh_dim_names is None else mesh.mesh_dim_names[axis]
