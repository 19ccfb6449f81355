"""Process groups: the one that a mesh axis means, the private one to exchange on, and the one of the hosts."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh


def group_of(mesh: DeviceMesh | ProcessGroup) -> ProcessGroup:
    """The process group of a 1-D mesh, or the group itself.

    Raises:
        ValueError: If the mesh has more than one axis, this rank is not in it, or ``mesh`` is neither.
    """
    if isinstance(mesh, ProcessGroup):
        return mesh
    refuse_outsider(mesh)
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(f"mesh must be a 1-D DeviceMesh or a ProcessGroup, got {type(mesh).__name__}")
    if mesh.ndim != 1:
        raise ValueError(
            f"mesh must have one axis, the context-parallel one, got {mesh.ndim} axes "
            f"{mesh.mesh_dim_names}; pass a slice such as mesh['cp']"
        )
    return mesh.get_group()


def refuse_outsider(mesh: object) -> None:
    """Raise ValueError if ``mesh`` is a mesh, or what ``new_group`` returned, of other ranks than this one.

    Nothing is sent. The ranks that are in it do not wait: they compare notes and exchange among themselves.
    """
    # What new_group returns on the other ranks is no ProcessGroup; seen on torch 2.11 and 2.13: the integer -100.
    if mesh is dist.GroupMember.NON_GROUP_MEMBER:
        what = "a process group that this rank is not in (GroupMember.NON_GROUP_MEMBER, as new_group returns there)"
    elif isinstance(mesh, DeviceMesh) and mesh.get_coordinate() is None:
        what = f"{mesh}, which this rank is not in"
    else:
        return
    raise ValueError(
        f"rank {dist.get_rank()} got {what}; accepted is a DeviceMesh or ProcessGroup that the calling rank is a "
        "member of: call on the members alone, or pass each rank the mesh or group that holds it"
    )


def resolve_group(name: str) -> ProcessGroup | None:
    """The process group of this name, as a group travels through an op's schema; None for no name."""
    if not name:
        return None
    # Private, and the only way from name to group; seen on torch 2.11, 2.13 and 2.15.
    return torch.distributed.distributed_c10d._resolve_process_group(name)  # pyright: ignore


# By the kind of device; None where the group itself serves.
_exchange_groups: weakref.WeakKeyDictionary[ProcessGroup, dict[str, ProcessGroup | None]] = weakref.WeakKeyDictionary()
_host_groups: weakref.WeakKeyDictionary[ProcessGroup, ProcessGroup] = weakref.WeakKeyDictionary()


def exchange_group(group: ProcessGroup, device: torch.device) -> ProcessGroup:
    """The group on which tensors on ``device`` of ``group``'s ranks are exchanged, made at the first call.

    On NCCL it is a private group on a high-priority stream: on an ordinary one the halo waits behind
    the attention kernel that fills the GPU. It is collective at the first call.
    """
    kind = device.type
    made = _exchange_groups.get(group)
    if made is None:
        made = _exchange_groups[group] = {}
    if kind not in made:
        # Not the group itself: what holds its key would never be collected.
        made[kind] = _private_nccl(group) if _backend(group, kind) == "nccl" else None
    return made[kind] or group


def _backend(group: ProcessGroup, device_type: str) -> str | None:
    """What carries tensors of this kind of device: a group may have one backend for each."""
    pairs = (pair.partition(":") for pair in dist.get_backend_config(group).split(","))
    return {kind: backend for kind, _, backend in pairs}.get(device_type)


def _private_nccl(group: ProcessGroup) -> ProcessGroup:
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    private = _new_group(group, "nccl", options)
    # NCCL's first point-to-point batch of a group needs every rank, and ranks at the edge of the
    # sequence may have nothing to say: make the communicator with a collective.
    dist.all_reduce(torch.zeros(1, device="cuda"), group=private)
    return private


def _new_group(group: ProcessGroup, backend: str, options: Any = None) -> ProcessGroup:
    """Another group of the same ranks, made by them alone."""
    made = dist.new_group(
        dist.get_process_group_ranks(group), backend=backend, pg_options=options, use_local_synchronization=True
    )
    assert isinstance(made, ProcessGroup)
    return made


def host_group(group: ProcessGroup) -> ProcessGroup:
    """A group that takes CPU tensors, made at the first call; then it is collective."""
    if group not in _host_groups:
        _host_groups[group] = group if _backend(group, "cpu") == "gloo" else _new_group(group, "gloo")
    return _host_groups[group]
