"""How a module's inputs came, and what lies on the context-parallel axis besides.

Inputs come in one of three ways, and outputs go back in the same:

* local shards, which become DTensors on the context-parallel axis;
* DTensors on other axes, for example heads on the tensor-parallel one, with local rows of the sequence.
  They become DTensors on those axes and the context-parallel one;
* DTensors on the context-parallel axis already.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from dtensor_ring_swa.dtensor import wrap
from dtensor_ring_swa.sharding import ThisMesh


@dataclass(frozen=True)
class Form:
    """How one call's inputs came, and the mesh that the module gets them on.

    Attributes:
        came: Mesh of the inputs; None for local tensors.
        mesh: Mesh with the context-parallel axis.
        axis: Which axis of ``mesh`` that is.
    """

    came: DeviceMesh | None
    mesh: DeviceMesh
    axis: int

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor], mesh: DeviceMesh, axis: str) -> Form:
        """Read it from a call's tensors, for a plan on ``mesh`` whose context-parallel axis has this name.

        Raises:
            ValueError: If they came in different ways, or on axes of which the plan knows nothing.
        """
        kinds = [x.device_mesh if isinstance(x, DTensor) else None for x in tensors]
        first = kinds[0]
        if any(kind != first for kind in kinds[1:]):
            raise ValueError(f"the inputs lie differently: {[_where(kind) for kind in kinds]}; pass all alike")
        if first is None:
            return cls(None, context_axis(mesh, axis), 0)
        return _form(ThisMesh(first), ThisMesh(mesh), axis)

    @property
    def is_ready(self) -> bool:
        """Whether the inputs came as the module gets them."""
        return self.came == self.mesh

    def check(self, x: torch.Tensor, dim: int) -> None:
        """Raise ValueError for a DTensor that does not hold local rows of the sequence on ``dim``."""
        if not isinstance(x, DTensor):
            return
        for axis, placement in enumerate(x.placements):
            if self.is_ready and axis == self.axis:
                if type(placement) is not Shard or placement.dim != dim:
                    raise ValueError(
                        f"a DTensor on the context-parallel axis must be Shard({dim}) there, got {x.placements}"
                    )
            elif not (placement.is_replicate() or (type(placement) is Shard and placement.dim != dim)):
                raise ValueError(
                    f"on the axes {_where(x.device_mesh)} a DTensor may be sharded on another dim than {dim}, the "
                    f"sequence, or replicated, got {x.placements}; redistribute() it first"
                )

    def rows(self, x: torch.Tensor, dim: int) -> int:
        """Rows of the sequence on this rank."""
        return x.to_local().shape[dim] if self.is_ready and isinstance(x, DTensor) else x.shape[dim]

    def enter(self, x: torch.Tensor, dim: int, seq_len: int) -> DTensor:
        """Local rows as a DTensor of the whole sequence."""
        if isinstance(x, DTensor):
            if self.is_ready:
                return x
            local, given = x.to_local(), list(x.placements)
        else:
            local, given = x, []
        shape = list(x.shape)
        shape[dim] = seq_len
        return wrap(local, self.mesh, (*given[: self.axis], Shard(dim), *given[self.axis :]), shape)

    def enter_replicated(self, x: torch.Tensor, dim: int, seq_len: int) -> DTensor:
        """Local rows as a DTensor, the same on all other axes."""
        placements: list[Placement] = [Replicate()] * self.mesh.ndim
        placements[self.axis] = Shard(dim)
        shape = list(x.shape)
        shape[dim] = seq_len
        return wrap(x, self.mesh, tuple(placements), shape)

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """An output in the form in which the inputs came.

        Raises:
            ValueError: If it is a sum over the context-parallel axis that is still to be made.
        """
        if not isinstance(x, DTensor) or self.is_ready or x.device_mesh != self.mesh:
            return x
        placement = x.placements[self.axis]
        if placement.is_partial():
            raise ValueError(
                f"an output is {placement!r} on the context-parallel axis; redistribute() it in the module"
            )
        local = x.to_local()
        if self.came is None:
            return local
        others = (*x.placements[: self.axis], *x.placements[self.axis + 1 :])
        shape = list(x.shape)
        if isinstance(placement, Shard):
            if any(other.is_shard(placement.dim) for other in others):
                raise ValueError(f"an output is sharded twice on dim {placement.dim}: {x.placements}")
            shape[placement.dim] = local.shape[placement.dim]
        return wrap(local, self.came, others, shape)


def context_axis(mesh: DeviceMesh, axis: str) -> DeviceMesh:
    """The context-parallel axis of a mesh, as a mesh of its own: a mesh of one axis is that.

    Raises:
        ValueError: If a mesh of several axes has none of this name.
    """
    if mesh.ndim == 1:
        return mesh
    if axis not in (mesh.mesh_dim_names or ()):
        raise ValueError(
            f"the mesh has the axes {_where(mesh)} and none is named {axis!r}; pass the context-parallel axis alone, "
            "as mesh['cp'], or name it: ContextParallel(axis=...)"
        )
    return mesh[axis]


@lru_cache(maxsize=256)
def _form(this_came: ThisMesh, this_mesh: ThisMesh, axis: str) -> Form:
    """The form of DTensors on ``came``; slices of a mesh are made once."""
    came, mesh = this_came.mesh, this_mesh.mesh
    own = context_axis(mesh, axis)
    axis = own.mesh_dim_names[0] if own.mesh_dim_names else axis
    if came == own:
        return Form(came, came, 0)
    theirs, known = came.mesh_dim_names or (), mesh.mesh_dim_names or ()
    if axis in theirs:
        if came[axis] != own:
            raise ValueError(f"the inputs lie on another axis {axis!r} than the plan's: {came} and {own}")
        return Form(came, came, theirs.index(axis))
    names = tuple(name for name in known if name == axis or name in theirs)
    if len(names) != len(theirs) + 1 or mesh[tuple(name for name in names if name != axis)] != came:
        both = ", ".join(repr(name) for name in (axis, *theirs))
        raise ValueError(
            f"the inputs are DTensors on the axes {_where(came)}, the plan was applied on {_where(mesh)}; apply it on "
            f"the mesh of all of them, mesh[{both}], or in the order in which that mesh has them"
        )
    return Form(came, mesh[names], names.index(axis))


def _where(mesh: DeviceMesh | None) -> str:
    return "local" if mesh is None else str(mesh.mesh_dim_names or f"of a mesh of shape {tuple(mesh.shape)}")
