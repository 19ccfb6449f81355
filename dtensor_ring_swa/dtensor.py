"""The dispatch rules: what the ops do when q, k and v are DTensors.

A rule reads placements, unwraps the shards, runs the same op on them with the process group of the
mesh axis that shards the sequence, and wraps the results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from dtensor_ring_swa.heads import KeyHeads
from dtensor_ring_swa.layout import shard
from dtensor_ring_swa.learned_sinks import SinkHeads, check_sinks
from dtensor_ring_swa.ops import attention, attention_backward
from dtensor_ring_swa.sharding import Sharding, ThisMesh, check_dtensors


@dataclass(frozen=True)
class _Shards:
    """The unwrapped call: shards, and how to wrap the results.

    Attributes:
        how: How q, k and v lie on the mesh.
        mesh: Their mesh.
        heads: The part of replicated k and v that this rank uses; None where it uses all that it holds.
        locals: q, k and v of this rank, then its sinks and the documents of its batch rows, if any.
        group_name: The group that shares the sequence; empty if this rank holds all of it.
    """

    how: Sharding
    mesh: DeviceMesh
    heads: KeyHeads | None
    locals: tuple[torch.Tensor | None, ...]
    group_name: str

    def wrap(self, local: torch.Tensor, placements: tuple[Placement, ...], shape: Sequence[int]) -> DTensor:
        if type(local) is not torch.Tensor:
            # Traced: sizes may be symbols.
            return wrap(local, self.mesh, placements, shape)
        # As torch's own operators do; from_local takes the host ten times as long (seen on torch 2.11 and 2.13).
        return DTensor(local, _spec(ThisMesh(self.mesh), placements, tuple(shape), local.dtype), requires_grad=False)


def _unwrap(q: DTensor, k: DTensor, v: DTensor, sinks: torch.Tensor | None, cu_seqlens: torch.Tensor | None) -> _Shards:
    how, mesh = check_dtensors(q, k, v, None), q.device_mesh
    local_q, local_k, local_v = (x._local_tensor for x in (q, k, v))
    if sinks is not None:
        check_sinks(sinks, q, how)
    heads = KeyHeads.of(mesh, how.head_axes, q.shape[2], k.shape[2]) if how.shared_kv else None
    if heads is not None:
        local_k, local_v = heads.take(local_k), heads.take(local_v)
    axis = how.sequence_axis
    return _Shards(
        how, mesh, heads,
        (
            local_q, local_k, local_v,
            None if sinks is None else SinkHeads.of(q, how).take(sinks),
            None if cu_seqlens is None else _batch_rows(q, cu_seqlens),
        ),
        "" if axis is None else mesh.get_group(axis).group_name,
    )  # fmt: skip


def _batch_rows(q: DTensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """The boundaries of this rank's batch rows."""
    if cu_seqlens.ndim == 1:
        return cu_seqlens
    for axis, placement in enumerate(q.placements):
        if placement.is_shard(0):
            mine = shard(len(cu_seqlens), q.device_mesh.size(axis), q.device_mesh.get_local_rank(axis))
            cu_seqlens = cu_seqlens[mine.start : mine.stop]
    return cu_seqlens


def wrap(local: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], shape: Sequence[int]) -> DTensor:
    """A DTensor of a shard; the global shape is given, since uneven shards do not tell it."""
    # In inference mode from_local fails on torch 2.11; Dynamo does not trace the question.
    inference = not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()
    with torch.inference_mode(False) if inference else nullcontext():
        return DTensor.from_local(
            local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=_stride(shape)
        )


def viewed(x: torch.Tensor, view: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """``view(x)``, in inference mode too, where torch 2.13 makes no views of DTensors that come from outside of it."""
    outside = isinstance(x, DTensor) and not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()
    if not outside or x.is_inference():
        return view(x)
    with torch.inference_mode(False), torch.no_grad():
        return view(x)


def _stride(shape: Sequence[int]) -> tuple[int, ...]:
    stride = [1]
    for size in reversed(shape[1:]):
        stride.insert(0, stride[0] * max(size, 1))
    return tuple(stride)


@lru_cache(maxsize=1024)
def _spec(this: ThisMesh, placements: tuple[Placement, ...], shape: tuple[int, ...], dtype: torch.dtype) -> DTensorSpec:
    return DTensorSpec(this.mesh, placements, tensor_meta=TensorMeta(torch.Size(shape), _stride(shape), dtype))


def _attention_rule(
    cls: type, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
) -> tuple[DTensor, DTensor, torch.Tensor]:
    q, k, v, sinks, cu_seqlens, *attributes, _ = args
    shards = _unwrap(q, k, v, sinks, cu_seqlens)
    out, lse, kept = attention(*shards.locals, *attributes, shards.group_name)
    batch, rows, heads, _ = q.shape
    return (
        shards.wrap(out, shards.how.q, (batch, rows, heads, v.shape[3])),
        shards.wrap(lse, shards.how.lse, (batch, heads, rows)),
        kept,
    )


def _backward_rule(
    cls: type, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
) -> tuple[DTensor, DTensor, DTensor, torch.Tensor]:
    dout, q, k, v, sinks, cu_seqlens, out, lse, kept, *attributes, _ = args
    shards = _unwrap(q, k, v, sinks, cu_seqlens)
    if dout.placements != shards.how.q:
        dout = dout.redistribute(placements=shards.how.q)
    dq, dk, dv, dsinks = attention_backward(
        dout._local_tensor, *shards.locals, out._local_tensor, lse._local_tensor, kept, *attributes, shards.group_name
    )
    if shards.heads is not None:
        dk, dv = shards.heads.give(dk), shards.heads.give(dv)
    if sinks is not None:
        dsinks = SinkHeads.of(q, shards.how).give(sinks, dsinks, q)
    return (
        shards.wrap(dq, shards.how.q, q.shape),
        shards.wrap(dk, shards.how.kv_grad, k.shape),
        shards.wrap(dv, shards.how.kv_grad, v.shape),
        dsinks,
    )


torch.library.register_torch_dispatch(attention, DTensor, _attention_rule)
torch.library.register_torch_dispatch(attention_backward, DTensor, _backward_rule)
