"""The public call: read the arguments, refuse what cannot be honoured, run the op."""

from __future__ import annotations

from typing import Literal, overload

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dtensor_ring_swa.checks import (
    FACTS,
    check_even_shards,
    check_layout,
    check_length,
    check_options,
    check_tensors,
    facts_of,
    refuse_unfinished,
)
from dtensor_ring_swa.dtensor import check_dtensors
from dtensor_ring_swa.groups import agree, group_of
from dtensor_ring_swa.kernels import check_name
from dtensor_ring_swa.ops import attention
from dtensor_ring_swa.window import Window

WindowLike = Window | tuple[int | None, int | None]


@overload
def ring_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, window: WindowLike = ..., scale: float | None = ...,
    softcap: float = ..., sinks: None = ..., sink_tokens: int = ..., cu_seqlens: None = ..., layout: str = ...,
    load_balance: str = ..., kernel: str = ..., mesh: DeviceMesh | ProcessGroup | None = ...,
    deterministic: bool = ..., seq_len: int | None = ..., return_lse: Literal[False] = ...,
) -> torch.Tensor: ...  # fmt: skip
@overload
def ring_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, window: WindowLike = ..., scale: float | None = ...,
    softcap: float = ..., sinks: None = ..., sink_tokens: int = ..., cu_seqlens: None = ..., layout: str = ...,
    load_balance: str = ..., kernel: str = ..., mesh: DeviceMesh | ProcessGroup | None = ...,
    deterministic: bool = ..., seq_len: int | None = ..., return_lse: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    window: WindowLike = (-1, 0),
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: None = None,
    sink_tokens: int = 0,
    cu_seqlens: None = None,
    layout: str = "contiguous",
    load_balance: str = "auto",
    kernel: str = "auto",
    mesh: DeviceMesh | ProcessGroup | None = None,
    deterministic: bool = False,
    seq_len: int | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention in which each query sees a window of neighbours, over a sharded sequence.

    The three ways to call it give the same numbers:

    * DTensors: the mesh axis that shards dim 1 is the context-parallel one. Other axes may shard the
      batch (``Shard(0)``) or the heads (``Shard(2)``; k and v too, or replicated), or replicate.
    * Plain tensors with ``mesh``: each rank passes its shard and gets its shard.
    * Plain tensors alone: the whole sequence on one device.

    Each rank receives only the keys that its window reaches beyond its shard, from at most
    ``ceil(left / chunk) + ceil(right / chunk)`` ranks.

    Args:
        q: Queries ``[B, S, Hq, D]``; float64, float32, bfloat16 or float16.
        k: Keys ``[B, S, Hkv, D]`` with ``Hq % Hkv == 0``.
        v: Values ``[B, S, Hkv, Dv]``.
        window: ``(left, right)`` tokens visible on each side of the query, its own not counted; -1 or
            None is unlimited. ``Window`` converts the conventions of other libraries.
        scale: Factor on the scores; ``D ** -0.5`` by default.
        softcap: Scores become ``softcap * tanh(scores / softcap)``; 0.0 is off.
        sinks: Learned sink logits; not supported yet.
        sink_tokens: First tokens visible to every query; not supported yet.
        cu_seqlens: Boundaries of packed documents; not supported yet.
        layout: How positions lie on the ranks: ``"contiguous"`` (``torch.chunk``'s shards, of any
            length), ``"striped"`` (token i on rank ``i % ranks``) or ``"zigzag"`` (of ``2 * ranks``
            slices, rank r holds r and ``2 * ranks - 1 - r``). Shards in, shards out. The window
            always counts positions in the sequence.
        load_balance: For contiguous shards. ``"auto"`` deals q, k and v to the zigzag layout and out
            back where the window is unlimited on one side, since the last rank has twice the mean
            work otherwise; ``"striped"`` and ``"zigzag"`` do so for any window; ``"none"`` never.
        kernel: ``"auto"``, the fastest that can serve the call, or a name: ``"flash"``, ``"aten"``,
            ``"reference"``.
        mesh: For plain shards: a 1-D DeviceMesh or a ProcessGroup. DTensors carry their own.
        deterministic: Bitwise the same gradients on every run; raises where the kernel cannot.
        seq_len: For plain shards: tokens of the whole sequence, when the caller knows it. By default
            the ranks compare notes first (one small message between hosts a call), which also
            catches ranks that call with different arguments. Under torch.compile, equal shards are
            taken for granted instead.
        return_lse: Also return the log-sum-exp of the scores.

    Returns:
        out ``[B, S, Hq, Dv]`` in q's dtype, with q's placements. With ``return_lse`` also lse
        ``[B, Hq, S]``, natural log, float32 (float64 for float64 inputs), sharded like q on the dims
        it has, not differentiable. A row that sees no key has out 0 and lse ``-inf``.

    Raises:
        ValueError: If the arguments do not fit together, before anything is sent, on every rank.
        NotImplementedError: If the kernel cannot do it; the message says why and which can.
    """
    group = None if mesh is None or isinstance(q, DTensor) else group_of(mesh)
    error: Exception | None = None
    facts: tuple[int, ...] = ()
    try:
        window = Window.of(window)
        check_name(kernel)
        check_layout(layout, load_balance)
        refuse_unfinished(sinks, sink_tokens, cu_seqlens)
        check_tensors(q, k, v)
        check_options(softcap, scale)
        if isinstance(q, DTensor) and isinstance(k, DTensor) and isinstance(v, DTensor):
            # While torch.compile traces, the op's rule makes the same checks, out of Dynamo's sight.
            if mesh is not None or not torch.compiler.is_compiling():
                check_dtensors(q, k, v, mesh)
            else:
                check_even_shards(q)
        if group is None:
            seq_len = check_length(q, seq_len)
        elif not torch.compiler.is_compiling():
            facts = facts_of(q, k, v, window, kernel, scale, softcap, deterministic, layout, load_balance)
    except (ValueError, NotImplementedError) as problem:
        error = problem
    if group is not None and seq_len is None and dist.get_world_size(group) > 1:
        # A graph is traced for shapes that all ranks share, so equal shards are taken for granted there.
        compiling = torch.compiler.is_compiling()
        seq_len = q.shape[1] * dist.get_world_size(group) if compiling else agree(group, FACTS, facts, error)
    if error is not None:
        raise error

    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out, lse, _ = attention(
        q, k, v, *window, scale, softcap, kernel, deterministic, layout, load_balance,
        q.shape[1] if seq_len is None else seq_len, "" if group is None else group.group_name,
    )  # fmt: skip
    return (out, lse) if return_lse else out
