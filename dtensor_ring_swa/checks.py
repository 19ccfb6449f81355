"""What ring_attention refuses, and the facts on which plain-tensor callers must agree."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import NamedTuple, ParamSpec
from zlib import crc32

import torch
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor

from dtensor_ring_swa.choice import EXCHANGES
from dtensor_ring_swa.documents import Documents
from dtensor_ring_swa.layout import LAYOUTS
from dtensor_ring_swa.window import MOST_TOKENS, Window

_P = ParamSpec("_P")

# The first is checked against torch.chunk's sizes; all others must be equal on every rank.
FACTS = (
    "the length of q", "the batch size", "the number of query heads", "the number of key/value heads",
    "the head dim of q and k", "the head dim of v", "the dtype", "the kind of device", "the window's left",
    "the window's right", "whether a gradient is needed", "sink_tokens", "whether there are sinks", "cu_seqlens",
    "kernel, scale, softcap, deterministic, layout, load_balance or exchange",
)  # fmt: skip

# Integers above it cannot become floats.
_LARGEST = torch.finfo(torch.float64).max


def facts_of(
    q_BSHD: torch.Tensor,
    k_BSGD: torch.Tensor,
    v_BSGE: torch.Tensor,
    sinks_H: torch.Tensor | None,
    documents: Documents | None,
    window: Window,
    sink_tokens: int,
    *options: object,
) -> tuple[int, ...]:
    """This rank's values for ``FACTS``."""
    tensors = (q_BSHD, k_BSGD, v_BSGE, *(() if sinks_H is None else (sinks_H,)))
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    batch, rows, heads, head_dim = q_BSHD.shape
    return (
        rows, batch, heads, k_BSGD.shape[2], head_dim, v_BSGE.shape[3], crc32(str(q_BSHD.dtype).encode()),
        crc32(q_BSHD.device.type.encode()), *window, int(needs_grad), sink_tokens, int(sinks_H is not None),
        0 if documents is None else documents.fingerprint, crc32(repr(options).encode()),
    )  # fmt: skip


def _once(check: Callable[_P, None]) -> Callable[_P, None]:
    """Let what has passed a check pass again without it. What cannot be looked up is checked anew."""
    passed: Callable[..., None] = lru_cache(maxsize=1024, typed=True)(check)

    @wraps(check)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> None:
        if torch.compiler.is_compiling():
            check(*args, **kwargs)
            return
        try:
            passed(*args, **kwargs)
        except TypeError:
            check(*args, **kwargs)

    return run


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


@_once
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


@_once
def check_options(
    layout: str, load_balance: str, exchange: str, sink_tokens: int, softcap: float, scale: float | None
) -> None:
    """Raise ValueError unless the options of a call are among those that there are and fit together."""
    check_layout(layout, load_balance, exchange)
    check_sink_tokens(sink_tokens)
    check_factors(softcap, scale)


def check_factors(softcap: float, scale: float | None) -> None:
    """Raise ValueError unless both are finite numbers that a float can hold, and ``softcap`` is not negative."""
    if not isinstance(softcap, (int, float)) or not 0.0 <= softcap <= _LARGEST:
        raise ValueError(f"softcap must be a positive finite number, or 0.0 for none, got {_number(softcap)}")
    if scale is not None and not (isinstance(scale, (int, float)) and abs(scale) <= _LARGEST):
        raise ValueError(f"scale must be a finite number, or None for head_dim ** -0.5, got {_number(scale)}")


def _number(x: object) -> str:
    """A number as it was given, but for integers of hundreds of digits."""
    if isinstance(x, int) and abs(x) > _LARGEST:
        return f"an integer of {x.bit_length()} bits, more than a float's largest number {_LARGEST:.3g}"
    return repr(x)


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


def check_seq_len(seq_len: int | None) -> None:
    """Raise ValueError unless it is a number of tokens, or None."""
    if seq_len is not None and (
        isinstance(seq_len, bool) or not isinstance(seq_len, (int, torch.SymInt)) or seq_len < 0
    ):
        raise ValueError(f"seq_len must be a number of tokens >= 0, got {seq_len!r}")


def check_length(q_BSHD: torch.Tensor, seq_len: int | None) -> int:
    """The length of a sequence that is whole here, as a DTensor or on one device.

    Raises:
        ValueError: If ``seq_len`` says otherwise.
    """
    if seq_len not in (None, q_BSHD.shape[1]):
        raise ValueError(f"seq_len={seq_len} contradicts the {q_BSHD.shape[1]} tokens given; leave it out")
    return q_BSHD.shape[1]


def check_layout(layout: str, load_balance: str = "auto", exchange: str = "auto") -> None:
    """Raise ValueError unless all are among the names that there are and fit together."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {LAYOUTS}, got {layout!r}")
    if load_balance not in ("auto", "none", "striped", "zigzag"):
        raise ValueError(f"load_balance must be 'auto', 'none', 'striped' or 'zigzag', got {load_balance!r}")
    if layout != "contiguous" and load_balance in ("striped", "zigzag"):
        raise ValueError(
            f"load_balance={load_balance!r} re-deals contiguous shards, got layout={layout!r}; leave it at 'auto'"
        )
    if exchange not in EXCHANGES:
        raise ValueError(f"exchange must be one of {EXCHANGES}, got {exchange!r}")
    if exchange == "halo" and (layout != "contiguous" or load_balance in ("striped", "zigzag")):
        raise ValueError(
            f"exchange='halo' needs contiguous shards, got layout={layout!r} and load_balance={load_balance!r}; "
            "leave exchange at 'auto'"
        )


def check_sink_tokens(sink_tokens: int) -> None:
    """Raise ValueError unless it is a number of tokens."""
    if isinstance(sink_tokens, bool) or not isinstance(sink_tokens, int) or sink_tokens < 0:
        raise ValueError(f"sink_tokens must be a number of tokens >= 0, got {sink_tokens!r}")
    if sink_tokens > MOST_TOKENS:
        raise ValueError(f"sink_tokens must be at most {MOST_TOKENS}, got {sink_tokens}")


def check_boundary_lists(cu_seqlens: torch.Tensor, batch: int) -> None:
    """Raise ValueError unless there is a boundary list for all or for each of ``batch`` rows."""
    if cu_seqlens.ndim == 2 and cu_seqlens.shape[0] != batch:
        raise ValueError(
            f"cu_seqlens must be [N + 1], or [B, N + 1] with a boundary list a batch row, got "
            f"{list(cu_seqlens.shape)} for {batch} rows"
        )


def check_documents(documents: Documents, batch: int, seq_len: int | None) -> None:
    """Raise ValueError unless there is a boundary list for all or for each of ``batch`` rows, of this length."""
    check_boundary_lists(documents.cu_seqlens, batch)
    if seq_len is not None and documents.seq_len != seq_len:
        raise ValueError(
            f"cu_seqlens must end at the {seq_len} tokens of the whole sequence, got cu_seqlens[-1] = "
            f"{documents.seq_len}; make padding a document of its own"
        )
