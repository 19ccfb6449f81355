"""Packed documents, sink tokens and learned sinks on shards, against the dense oracle in float64."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from dtensor_ring_swa import (
    Documents,
    Window,
    documents_from_eos,
    documents_from_position_ids,
    make_plan,
    next_token_labels,
    ring_attention,
    shard_sequence,
)
from dtensor_ring_swa.choice import choose_exchange
from dtensor_ring_swa.ring import make_ring
from dtensor_ring_swa.testing import RankPool, dense_attention

from cases import Case, errors, mesh_of, mesh_ranks

TOLERANCE = 1e-10
Pools = Callable[[int], RankPool]

windows = st.tuples(*[st.one_of(st.integers(0, 20), st.just(-1))] * 2)
meshes = st.one_of(
    st.tuples(st.tuples(st.integers(1, 4)), st.just(("cp",))),
    st.sampled_from([((2, 2), ("dp", "cp")), ((2, 2), ("cp", "tp")), ((1, 3), ("rep", "cp")), ((2,), ("dp",))]),
)


@st.composite
def boundaries(draw: st.DrawFn, total: int) -> tuple[int, ...]:
    cuts = draw(st.lists(st.integers(0, total), max_size=6))
    return (0, *sorted(cuts), total)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    mesh, axes = draw(meshes)
    plain = axes == ("cp",) and draw(st.booleans())
    dp = mesh[axes.index("dp")] if "dp" in axes else 1
    tp = mesh[axes.index("tp")] if "tp" in axes else 1
    cp = mesh[axes.index("cp")] if "cp" in axes else 1
    batch = dp * draw(st.integers(1, 2))
    layout = draw(st.sampled_from(["contiguous"] * 3 + ["striped", "zigzag"]))
    seq_len = draw(st.integers(1, 36)) if layout == "contiguous" else 2 * cp * draw(st.integers(1, 5))
    packing = draw(st.sampled_from(["none", "one", "each"]))
    cu_seqlens = None
    if packing != "none":
        rows = [draw(boundaries(seq_len)) for _ in range(batch if packing == "each" else 1)]
        longest = max(map(len, rows))
        rows = [(*row, *[seq_len] * (longest - len(row))) for row in rows]
        cu_seqlens = tuple(rows) if packing == "each" else rows[0]
    return Case(
        batch=batch, seq_len=seq_len, q_heads=2 * tp, kv_heads=tp, head_dim=3, v_head_dim=2, window=draw(windows),
        axes=axes, mesh=mesh, plain=plain, layout=layout, cu_seqlens=cu_seqlens,
        exchange=draw(st.sampled_from(["auto", "auto", "ring"] + ["halo"] * (layout == "contiguous"))),
        sink_tokens=draw(st.sampled_from([0, 0, 1, 2, 5, 50])),
        sinks=draw(st.sampled_from([None, "plain"] + ["dtensor"] * (not plain))),
        softcap=draw(st.sampled_from([0.0, 0.0, 2.0])), seed=draw(st.integers(0, 3)),
    )  # fmt: skip


def check(pools: Pools, case: Case) -> None:
    for rank, found in enumerate(pools(mesh_ranks(case)).run(errors, case)):
        assert max(found.values()) < TOLERANCE, f"rank {rank}: {found}"


@settings(max_examples=300, phases=set(Phase) - {Phase.shrink})
@given(case=cases())
@example(case=Case(seq_len=16, mesh=(2,), window=(-1, 0), cu_seqlens=(0, 5, 9, 16)))
@example(case=Case(seq_len=16, mesh=(4,), window=(5, 0), cu_seqlens=(0, 3, 4, 11, 16), sink_tokens=1))
@example(case=Case(seq_len=8, mesh=(2,), window=(2, 0), cu_seqlens=(0, 3, 8), sink_tokens=1))
@example(case=Case(seq_len=8, mesh=(2,), window=(2, 0), cu_seqlens=(0, 4, 4, 8), sinks="dtensor"))
@example(case=Case(seq_len=8, mesh=(4,), window=(-1, -1), cu_seqlens=(0, 3, 8, 8, 8)))
@example(case=Case(seq_len=12, batch=2, mesh=(2,), window=(3, 0), cu_seqlens=((0, 5, 12), (0, 12, 12)), plain=True))
@example(case=Case(seq_len=12, batch=2, mesh=(2, 2), axes=("dp", "cp"), window=(3, 0), sinks="dtensor",
                   cu_seqlens=((0, 5, 12), (0, 12, 12))))  # fmt: skip
# One document of one key: its query sees a sink and itself.
@example(case=Case(seq_len=3, mesh=(2,), window=(0, 0), cu_seqlens=(0, 1, 3), sink_tokens=1, sinks="plain"))
@example(case=Case(seq_len=24, mesh=(4,), window=(2, 1), sink_tokens=9))
@example(case=Case(seq_len=2267, mesh=(4,), window=(64, 0), cu_seqlens=(0, 137, 2178, 2267), sink_tokens=4))
@example(case=Case(seq_len=16, mesh=(4,), window=(-1, 0), load_balance="zigzag", cu_seqlens=(0, 2, 16), sinks="plain"))
def test_equals_dense(pools: Pools, case: Case) -> None:
    check(pools, case)
