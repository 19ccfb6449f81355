"""Process groups: the one a mesh axis means, the private one to exchange on, and agreement of hosts."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from dtensor_ring_swa.layout import shard

T = TypeVar("T")


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


def resolve_group(name: str) -> ProcessGroup:
    """The process group of this name: how a group travels through a registered op's schema."""
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


def _host_group(group: ProcessGroup) -> ProcessGroup:
    """A group that takes CPU tensors, made at the first call; then it is collective."""
    if group not in _host_groups:
        _host_groups[group] = group if _backend(group, "cpu") == "gloo" else _new_group(group, "gloo")
    return _host_groups[group]


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
    dist.all_gather(table, mine, group=_host_group(group))
    sound, rows, *others = zip(*(row.tolist() for row in table), strict=True)
    if error is not None:
        raise error
    if not all(sound):
        raise ValueError(
            f"rank {sound.index(0)} of the context-parallel group refused its arguments; its own error says why"
        )
    for name, values in zip(names[1:], others, strict=True):
        if len(set(values)) > 1:
            raise ValueError(f"the ranks disagree on {name}: {list(values)}; pass the same on every rank")
    total = sum(rows)
    expected = [len(shard(total, ranks, rank)) for rank in range(ranks)]
    if list(rows) != expected:
        raise ValueError(
            f"shards of {list(rows)} tokens are not torch.chunk's of {total} tokens, {expected}; "
            "shard with shard_sequence(mesh, ...)"
        )
    return total


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
    dist.all_gather_object(table, mine, group=_host_group(group))
    return table
