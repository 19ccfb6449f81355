"""Learned sinks beside q, k and v: whether they fit, and with DTensors the part of them that is a rank's.

They may lie whole on a rank, as a plain tensor or a DTensor, where q's heads are sharded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

from dtensor_ring_swa.heads import query_heads
from dtensor_ring_swa.sharding import Sharding, axis_name, shard_dim


@dataclass(frozen=True)
class SinkHeads:
    """Learned sinks beside DTensors q, k and v: this rank's part, and the way back.

    Attributes:
        mine: This rank's query heads.
        total: All query heads.
    """

    mine: range
    total: int

    @classmethod
    def of(cls, q: DTensor, how: Sharding) -> SinkHeads:
        """Read off q."""
        return cls(query_heads(q.device_mesh, how.head_axes, q.shape[2]), q.shape[2])

    def take(self, sinks_H: torch.Tensor) -> torch.Tensor:
        """A logit for each of this rank's query heads, from all of them or from just these."""
        local = sinks_H._local_tensor if isinstance(sinks_H, DTensor) else sinks_H
        return local if local.numel() == len(self.mine) else local[self.mine.start : self.mine.stop]

    def give(self, sinks_H: torch.Tensor, grad: torch.Tensor, q: DTensor) -> torch.Tensor:
        """The gradient of sinks as they were given.

        A plain tensor is this rank's own copy: its gradient is this rank's contribution. A DTensor's
        is summed over the axes of its mesh on which q is sharded and it is not.
        """
        local = sinks_H._local_tensor if isinstance(sinks_H, DTensor) else sinks_H
        if local.numel() != len(self.mine):
            whole = grad.new_zeros(self.total)
            whole[self.mine.start : self.mine.stop] = grad
            grad = whole
        if not isinstance(sinks_H, DTensor):
            return grad
        mesh = sinks_H.device_mesh
        placements = [
            Partial() if placement.is_replicate() and _is_sharded(q, axis_of(mesh, axis, q)) else placement
            for axis, placement in enumerate(sinks_H.placements)
        ]
        summed = DTensor.from_local(grad, mesh, placements, run_check=False, shape=sinks_H.shape, stride=(1,))
        return summed.redistribute(placements=sinks_H.placements)


def axis_of(mesh: DeviceMesh, axis: int, q: DTensor) -> int:
    """The axis of q's mesh that is ``axis`` of ``mesh``: the same mesh, or a part of it by name."""
    if mesh == q.device_mesh:
        return axis
    names = q.device_mesh.mesh_dim_names or ()
    return names.index(str(axis_name(mesh, axis)))


def check_sinks(sinks_H: torch.Tensor, q: torch.Tensor, how: Sharding | None) -> None:
    """Check learned sinks against q, from what every rank knows.

    Raises:
        ValueError: Unless they are a float logit a query head, and lie where q's heads do.
    """
    if not isinstance(sinks_H, torch.Tensor) or sinks_H.ndim != 1 or not sinks_H.is_floating_point():
        found = f"{sinks_H.dtype} {list(sinks_H.shape)}" if isinstance(sinks_H, torch.Tensor) else repr(sinks_H)
        raise ValueError(f"sinks must be a float tensor [{q.shape[2]}], a logit a query head, got {found}")
    if sinks_H.layout != torch.strided:
        raise ValueError(f"sinks must be a dense tensor, got {sinks_H.layout}; pass sinks.to_dense()")
    # First where they lie: a DTensor counts the heads of all ranks, and q may be this rank's alone.
    if isinstance(sinks_H, DTensor):
        _check_placements(sinks_H, q, how)
    heads = {q.shape[2]}
    if isinstance(q, DTensor) and how is not None and not isinstance(sinks_H, DTensor):
        heads.add(len(query_heads(q.device_mesh, how.head_axes, q.shape[2])))
    if sinks_H.shape[0] not in heads:
        raise ValueError(f"sinks must have a logit for each of the {sorted(heads)} query heads, got {sinks_H.shape[0]}")
    if sinks_H.device.type != q.device.type:
        raise ValueError(f"sinks and q must be on one device, got {sinks_H.device} and {q.device}")


def _check_placements(sinks_H: DTensor, q: torch.Tensor, how: Sharding | None) -> None:
    """Raise ValueError unless sinks lie on axes of q's mesh, sharded with its heads or replicated."""
    if not isinstance(q, DTensor) or how is None:
        raise ValueError("sinks is a DTensor but q, k and v are plain; pass sinks.to_local(), this rank's copy")
    for axis, placement in enumerate(sinks_H.placements):
        where = axis_name(sinks_H.device_mesh, axis)
        known = sinks_H.device_mesh == q.device_mesh or where in (q.device_mesh.mesh_dim_names or ())
        if not known:
            raise ValueError(
                f"sinks lie on mesh axis {where!r}, which q's mesh {q.device_mesh} does not have; where q holds "
                f"this rank's heads alone, pass theirs, [{q.shape[2]}]: sinks.to_local()"
            )
        on_heads = axis_of(sinks_H.device_mesh, axis, q) in how.head_axes or sinks_H.device_mesh.size(axis) == 1
        if not (placement.is_replicate() or (shard_dim(placement) == 0 and on_heads)):
            raise ValueError(
                f"sinks cannot be {placement!r} on mesh axis {where!r}; accepted are Replicate(), and Shard(0) where "
                "q's heads are sharded"
            )
    sharded = [axis_of(sinks_H.device_mesh, a, q) for a, p in enumerate(sinks_H.placements) if p.is_shard(0)]
    if sharded and set(how.head_axes) - set(sharded):
        raise ValueError(f"sinks must be sharded on all or none of the mesh axes that shard q's heads: {how.head_axes}")


def _is_sharded(q: DTensor, axis: int) -> bool:
    return shard_dim(q.placements[axis]) is not None
