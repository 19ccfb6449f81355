"""Which tensors ring_attention refuses."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor

from dtensor_ring_swa.documents import Documents
from dtensor_ring_swa.once import once


class _Kind(NamedTuple):
    """What is checked of a tensor."""

    is_dtensor: bool
    dtype: torch.dtype
    layout: torch.layout
    device: torch.device
    shape: torch.Size


def check_tensors(q_BSHD: torch.Tensor, k_BSGD: torch.Tensor, v_BSGE: torch.Tensor) -> None:
    """Check kinds, ranks, dtypes and shapes: for DTensors the global ones, which all ranks share.

    Raises:
        ValueError: With what was given and what is accepted.
    """
    kinds = []
    for name, x in (("q", q_BSHD), ("k", k_BSGD), ("v", v_BSGE)):
        if not isinstance(x, torch.Tensor):
            raise ValueError(f"{name} must be a tensor or DTensor, got {type(x).__name__}")
        if x.is_nested:
            raise ValueError(f"{name} must be a dense tensor, got a nested one; pack its parts, with cu_seqlens")
        kinds.append(_Kind(isinstance(x, DTensor), x.dtype, x.layout, x.device, x.shape))
    _check_kinds(*kinds)


@once
def _check_kinds(q: _Kind, k: _Kind, v: _Kind) -> None:
    kinds = {"q": q, "k": k, "v": v}
    if not q.is_dtensor == k.is_dtensor == v.is_dtensor:
        given = {name: "DTensor" if x.is_dtensor else "a plain tensor" for name, x in kinds.items()}
        raise ValueError(f"q, k and v must be three DTensors or three plain tensors, got {given}")
    for name, x in kinds.items():
        if len(x.shape) != 4:
            raise ValueError(
                f"{name} must be [batch, sequence, heads, head_dim], or [tokens, heads, head_dim] with cu_seqlens, "
                f"got {len(x.shape)} dims of sizes {list(x.shape)}"
            )
        if x.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(f"{name} must be float64, float32, bfloat16 or float16, got {x.dtype}")
        if x.layout != torch.strided:
            raise ValueError(f"{name} must be a dense tensor, got {x.layout}; pass {name}.to_dense()")
    for what in ("dtype", "device"):
        values = {name: getattr(x, what) for name, x in kinds.items()}
        if len(set(values.values())) > 1:
            raise ValueError(f"q, k and v must have the same {what}, got {values}")
    for what, dim in (("batch size", 0), ("length", 1)):
        if not q.shape[dim] == k.shape[dim] == v.shape[dim]:
            raise ValueError(f"q, k and v must have the same {what} (dim {dim}), got {_shapes(kinds)}")
    if k.shape[2] != v.shape[2]:
        raise ValueError(f"k and v must have the same number of heads (dim 2), got {_shapes(kinds)}")
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"q and k must have the same head dim (dim 3), got {_shapes(kinds)}")
    if min(q.shape[2], k.shape[2], q.shape[3], v.shape[3]) < 1:
        raise ValueError(f"heads and head dims must be at least 1, got {_shapes(kinds)}")
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"the heads of q must be a multiple of those of k and v (dim 2), got {_shapes(kinds)}")


def _shapes(kinds: dict[str, _Kind]) -> str:
    return ", ".join([f"{name} {list(x.shape)}" for name, x in kinds.items()])


def refuse_forward_mode(*tensors: object) -> None:
    """Raise NotImplementedError for dual tensors: autograd drops the tangents of an op that has no rule for them."""
    for x in tensors:
        if isinstance(x, torch.Tensor) and forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError(
                "ring_attention has no forward-mode derivatives (torch.func.jvp, jacfwd, dual tensors); use backward"
            )


def check_even_shards(q_BSHD: torch.Tensor, ranks: int, seq_len: int | None) -> None:
    """Raise ValueError while torch.compile traces, if the ranks do not hold equally many tokens.

    Two faults of torch (seen on 2.11 to 2.15) make unequal shards unsafe there: a warm cache serves the
    graph of another rank, and nothing guards the global length.

    Args:
        q_BSHD: The queries, a DTensor or this rank's shard.
        ranks: How many share the sequence of a plain shard.
        seq_len: Tokens of the whole sequence of a plain shard, if they are known.
    """
    if isinstance(q_BSHD, DTensor):
        seq_len = q_BSHD.shape[1]
        axes = [axis for axis, placement in enumerate(q_BSHD.placements) if placement.is_shard(1)]
        ranks = math.prod([q_BSHD.device_mesh.size(axis) for axis in axes])
        even = seq_len % ranks == 0
    else:
        even = seq_len is None or seq_len == q_BSHD.shape[1] * ranks
    if not even:
        raise ValueError(
            f"under torch.compile a sequence must divide over its ranks, got {seq_len} tokens on {ranks} ranks; pad "
            "the sequence, or leave attention out of the graph, as fullgraph=False does by itself"
        )


def check_length(q_BSHD: torch.Tensor, seq_len: int | None) -> int:
    """The length of a sequence that is whole here, as a DTensor or on one device.

    Raises:
        ValueError: If ``seq_len`` says otherwise.
    """
    if seq_len not in (None, q_BSHD.shape[1]):
        advice = "leave it out" if isinstance(q_BSHD, DTensor) else "leave it out, or pass mesh= if these are shards"
        raise ValueError(f"seq_len={seq_len} contradicts the {q_BSHD.shape[1]} tokens given; {advice}")
    return q_BSHD.shape[1]


def check_boundary_lists(cu_seqlens: torch.Tensor, batch: int) -> None:
    """Raise ValueError unless there is a boundary list for all or for each of ``batch`` rows."""
    if cu_seqlens.ndim == 2 and cu_seqlens.shape[0] != batch:
        raise ValueError(
            f"cu_seqlens must be [N + 1], or [B, N + 1] with a boundary list a batch row, got "
            f"{list(cu_seqlens.shape)} for {batch} rows"
        )


def check_documents(documents: Documents, batch: int, seq_len: int | None, advice: str = "") -> None:
    """Raise ValueError unless there is a boundary list for all or for each of ``batch`` rows, of this length."""
    check_boundary_lists(documents.cu_seqlens, batch)
    if seq_len is not None and documents.seq_len != seq_len:
        raise ValueError(
            f"cu_seqlens must end at the {seq_len} tokens of the whole sequence, got cu_seqlens[-1] = "
            f"{documents.seq_len}; make padding a document of its own{advice}"
        )
