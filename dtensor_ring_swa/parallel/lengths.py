"""The inputs of a call that carry the sequence, and its length, on which all ranks must agree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from zlib import crc32

import torch
from torch.distributed.device_mesh import DeviceMesh

from dtensor_ring_swa.agreement import agree
from dtensor_ring_swa.autocast import autocast_dtype
from dtensor_ring_swa.documents import Documents
from dtensor_ring_swa.layout import runs
from dtensor_ring_swa.parallel.inputs import Call, Key
from dtensor_ring_swa.parallel.joint import Form

# The first is checked against the layout's shards; all others must be equal on every rank.
FACTS = (
    "the length of a shard", "how many inputs carry the sequence", "the length of the whole DTensors",
    "dtypes, kinds of device, need of gradients, sizes of other dims, or placements of the inputs, "
    "autocast, or Documents",
)  # fmt: skip

_ADVICE = "ContextParallel(inputs=...) says which inputs carry the sequence, and on which dim"


def sequence_dims(call: Call, inputs: Mapping[Key, int] | None, seq_dim: int) -> dict[Key, int]:
    """Which inputs of this call carry the sequence, and on which dim, counted from the first.

    Args:
        call: The inputs.
        inputs: Those that the plan names, or None: every floating-point tensor, on ``seq_dim``.
        seq_dim: The sequence dim of those.

    Raises:
        ValueError: If there are none, or one is no tensor with such a dim.
    """
    if inputs is None:
        given = {place: call.get(place) for place in call.places()}
        wanted = {place: seq_dim for place, x in given.items() if isinstance(x, torch.Tensor) and x.is_floating_point()}
    else:
        wanted = {key: dim for key, dim in inputs.items() if _is_given(call, key)}
    if not wanted:
        raise ValueError(f"no tensor to shard on the sequence; {_ADVICE}")
    for key, dim in wanted.items():
        x = call.get(key)
        if not isinstance(x, torch.Tensor):
            raise ValueError(f"input {key!r} must be a tensor, got {type(x).__name__}; {_ADVICE}")
        if not -x.ndim <= dim < x.ndim:
            raise ValueError(f"input {key!r} of shape {list(x.shape)} has no dim {dim}; {_ADVICE}")
    return {key: dim % call.get(key).ndim for key, dim in wanted.items()}


def _is_given(call: Call, key: Key) -> bool:
    if call.find(key) is None and not call.parameters.has_named(key):
        raise ValueError(f"input {key!r} was not passed, and the plan says that it carries the sequence")
    return call.get(key) is not None


def facts_of(call: Call, dims: dict[Key, int], form: Form) -> tuple[int, ...]:
    """This rank's values for ``FACTS``.

    Raises:
        ValueError: If the inputs lie otherwise than on their axes, or have different lengths.
    """
    tensors: list[tuple[Any, int]] = [(call.get(key), dim) for key, dim in dims.items()]
    for x, dim in tensors:
        form.check(x, dim)
    # Compared one by one: a set would make torch.compile fix a dynamic length.
    rows = [form.rows(x, dim) for x, dim in tensors]
    whole = [x.shape[dim] if form.is_ready else 0 for x, dim in tensors]
    if any(n != rows[0] for n in rows) or any(n != whole[0] for n in whole):
        raise ValueError(f"inputs differ in length on dim {' or '.join(sorted({str(dim) for dim in dims.values()}))}")
    others = 0
    if not torch.compiler.is_compiling():
        looks = [
            (str(x.dtype), x.device.type, str(x.layout), x.requires_grad, x.shape[:dim], x.shape[dim + 1 :],
             getattr(x, "placements", None))
            for x, dim in tensors
        ]  # fmt: skip
        given = [call.get(place) for place in call.places()]
        packed = [x.fingerprint for x in given if isinstance(x, Documents)]
        modes = torch.is_grad_enabled(), autocast_dtype(tensors[0][0].device)
        others = crc32(repr((looks, modes, packed)).encode())
    return rows[0], len(tensors), whole[0], others


def agree_on_length(
    context: DeviceMesh, layout: str, seq_len: int | None, facts: tuple[int, ...], problem: Exception | None
) -> int:
    """Tokens of the whole sequence, if the inputs of all ranks fit together.

    Collective, unless the length is given or torch.compile traces: equal shards are taken for granted then.

    Args:
        context: The context-parallel axis.
        layout: How positions lie on the ranks.
        seq_len: The length, where the ranks need not compare.
        facts: This rank's values for ``FACTS``; not read if there is a problem.
        problem: What this rank found wrong by itself.

    Raises:
        ValueError: If they do not fit; on every rank, unless ``seq_len`` is given.
    """
    ranks, compiling = context.size(), torch.compiler.is_compiling()
    if seq_len is None and ranks > 1 and not compiling:
        seq_len = agree(context.get_group(), FACTS, facts, problem)
    if problem is not None:
        raise problem
    rows, _, whole, _ = facts
    seq_len = rows * ranks if seq_len is None else seq_len
    if not compiling:
        expected = sum(map(len, runs(layout, seq_len, ranks, context.get_local_rank())))
        if rows != expected:
            raise ValueError(f"of seq_len={seq_len} tokens this rank has {expected}, not {rows}")
        if whole not in (0, seq_len):
            raise ValueError(f"DTensors of {whole} tokens hold {seq_len} in their shards; tell from_local their shape")
    return seq_len
