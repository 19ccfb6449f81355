"""Attention on shards against the dense oracle, in float64."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from dtensor_ring_swa.testing import RankPool

from cases import Case, errors, mesh_ranks

TOLERANCE = 1e-10
Pools = Callable[[int], RankPool]

windows = st.tuples(*[st.one_of(st.integers(0, 40), st.just(-1))] * 2)
meshes = st.one_of(
    st.tuples(st.tuples(st.integers(1, 4)), st.just(("cp",))),
    st.tuples(
        st.sampled_from([(1, 2), (2, 1), (2, 2), (1, 3), (3, 1), (1, 4), (4, 1)]),
        st.sampled_from([(a, b) for a in ("dp", "tp", "rep") for b in ("cp",)]).flatmap(st.permutations).map(tuple),
    ),
    st.just(((1, 2, 2), ("dp", "cp", "tp"))),
    st.just(((2,), ("rep",))),
)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    mesh, axes = draw(meshes)
    tp = mesh[axes.index("tp")] if "tp" in axes else 1
    shared_kv = "tp" in axes and draw(st.booleans())
    kv_heads = draw(st.integers(1, 2)) * (1 if shared_kv else tp)
    group = draw(st.integers(1, 3)) * (tp if shared_kv else 1)
    return Case(
        batch=draw(st.integers(1, 3)), seq_len=draw(st.integers(1, 40)), q_heads=kv_heads * group, kv_heads=kv_heads,
        head_dim=draw(st.integers(1, 5)), v_head_dim=draw(st.integers(1, 5)), window=draw(windows), axes=axes,
        mesh=mesh, scale=draw(st.sampled_from([None, 0.3])), softcap=draw(st.sampled_from([0.0, 0.0, 2.0])),
        shared_kv=shared_kv, plain=axes == ("cp",) and draw(st.booleans()), strided=draw(st.booleans()),
        joint=draw(st.booleans()), seed=draw(st.integers(0, 3)),
    )  # fmt: skip


def check(pools: Pools, case: Case) -> None:
    for rank, found in enumerate(pools(mesh_ranks(case)).run(errors, case)):
        assert max(found.values()) < TOLERANCE, f"rank {rank}: {found}"


@settings(max_examples=400, phases=set(Phase) - {Phase.shrink})
@given(case=cases())
@example(case=Case(seq_len=7, mesh=(4,)))
@example(case=Case(seq_len=3, mesh=(4,)))
@example(case=Case(seq_len=3, mesh=(4,), plain=True))
@example(case=Case(seq_len=5, mesh=(4,), window=(4, 4)))
@example(case=Case(seq_len=12, mesh=(3,), window=(9, 0)))
@example(case=Case(seq_len=16, mesh=(4,), window=(2, 0)))
@example(case=Case(seq_len=16, mesh=(2,), window=(-1, -1)))
@example(case=Case(seq_len=8, mesh=(2,), window=(4, 4)))
@example(case=Case(seq_len=4, q_heads=4, kv_heads=2, mesh=(2, 2), axes=("tp", "cp")))
@example(case=Case(seq_len=8, batch=2, mesh=(2, 2), axes=("dp", "cp")))
@example(case=Case(seq_len=8, q_heads=4, kv_heads=1, mesh=(2, 2), axes=("cp", "tp"), shared_kv=True))
# Three query heads a rank over two key/value heads: the middle rank's heads share unevenly.
@example(case=Case(seq_len=8, q_heads=15, kv_heads=3, mesh=(1, 3), axes=("cp", "tp"), shared_kv=True))
@example(case=Case(seq_len=1, mesh=(4,), window=(0, 0)))
# A shard between two halos, as one kernel call.
@example(case=Case(seq_len=12, mesh=(3,), window=(2, 1), joint=True))
@example(case=Case(seq_len=12, mesh=(3,), window=(6, 6), joint=True, plain=True))
def test_equals_dense(pools: Pools, case: Case) -> None:
    check(pools, case)


def rows_innermost(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, with rows next to one another in memory, as torch.channels_last has dim 1."""
    return x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)


def errors_with_rows_innermost(case: Case) -> dict[str, float]:
    with mock.patch("cases.strided", rows_innermost):
        return errors(case)


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("exchange", ["halo", "ring"])
def test_rows_innermost_in_memory(pools: Pools, plain: bool, exchange: str) -> None:
    case = Case(batch=2, kv_heads=2, window=(2, 1), plain=plain, strided=True, exchange=exchange)
    for found in pools(2).run(errors_with_rows_innermost, case):
        assert max(found.values()) < TOLERANCE


@pytest.mark.parametrize("plain", [False, True])
def test_edge_ranks_first_on_a_fresh_group(plain: bool) -> None:
    # Rank 0 only sends and rank 3 only receives, and nothing ran before them.
    pool = RankPool(4)
    try:
        check(lambda _: pool, Case(seq_len=16, mesh=(4,), window=(1, 0), plain=plain))
    finally:
        pool.close()
