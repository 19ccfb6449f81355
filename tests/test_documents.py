"""Packed documents, sink tokens and learned sinks on shards, against the dense oracle in float64."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Shard, distribute_tensor

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
        softcap=draw(st.sampled_from([0.0, 0.0, 2.0])), joint=draw(st.booleans()), seed=draw(st.integers(0, 3)),
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
# A rank of dp that gets no batch row.
@example(case=Case(seq_len=4, batch=1, mesh=(2,), axes=("dp",), cu_seqlens=((0, 1, 4),), sinks="plain"))
@example(case=Case(seq_len=8, batch=1, mesh=(2, 2), axes=("dp", "cp"), cu_seqlens=((0, 5, 8),), sinks="dtensor"))
# One document of one key: its query sees a sink and itself.
@example(case=Case(seq_len=3, mesh=(2,), window=(0, 0), cu_seqlens=(0, 1, 3), sink_tokens=1, sinks="plain"))
@example(case=Case(seq_len=24, mesh=(4,), window=(2, 1), sink_tokens=9))
@example(case=Case(seq_len=2267, mesh=(4,), window=(64, 0), cu_seqlens=(0, 137, 2178, 2267), sink_tokens=4))
@example(case=Case(seq_len=16, mesh=(4,), window=(-1, 0), load_balance="zigzag", cu_seqlens=(0, 2, 16), sinks="plain"))
def test_equals_dense(pools: Pools, case: Case) -> None:
    check(pools, case)


def needed(seq_len: int, ranks: int, rank: int, window: tuple[int, int], cu: tuple[int, ...], sinks: int) -> set[int]:
    """Positions on other ranks that this rank's queries see, by enumeration."""
    chunk = -(-seq_len // ranks)
    mine = range(min(rank * chunk, seq_len), min((rank + 1) * chunk, seq_len))
    left, right = (seq_len if side < 0 else side for side in window)
    seen: set[int] = set()
    for start, stop in pairwise(cu):
        for p in range(max(start, mine.start), min(stop, mine.stop)):
            seen |= {j for j in range(start, stop) if (p - left <= j or j < start + sinks) and j <= p + right}
    return seen - set(mine)


@settings(max_examples=300)
@given(data=st.data(), window=windows, sinks=st.integers(0, 6), ranks=st.integers(1, 5), seq_len=st.integers(1, 30))
def test_what_a_plan_receives_is_what_its_queries_see(
    data: st.DataObject, window: tuple[int, int], sinks: int, ranks: int, seq_len: int
) -> None:
    cu = data.draw(boundaries(seq_len))
    plans = [make_plan(seq_len, ranks, rank, window, cu, sinks) for rank in range(ranks)]
    for plan in plans:
        received = sum(map(len, plan.receives))
        assert received == plan.received_rows == len(needed(seq_len, ranks, plan.rank, window, cu, sinks))
        sent_to_me = [(p.rank, len(t)) for p in plans for t in p.sends if t.peer == plan.rank]
        assert sorted(sent_to_me) == sorted((t.peer, len(t)) for t in plan.receives)
        for call in plan.interior_calls:
            assert plan.sinks + plan.left <= call.k_start and call.k_stop <= plan.sinks + plan.left + plan.rows


def test_nothing_travels_where_a_boundary_falls_on_the_cut() -> None:
    for rank in range(4):
        assert make_plan(32, 4, rank, (-1, 0), (0, 8, 16, 20, 24, 32), 3).received_rows == 0
    plan = make_plan(32, 4, 2, (5, 0), (0, 13, 32), sink_tokens=1)
    # Tokens 13 to 15, of which the first is the sink too.
    assert (plan.sinks, plan.left) == (0, 3)
    plan = make_plan(64, 4, 2, (5, 0), (0, 13, 64), sink_tokens=2)
    assert (plan.sinks, plan.left) == (2, 5) and [t.peer for t in plan.receives] == [0, 1]


def test_documents_of_a_rank_are_one_interior_call() -> None:
    plan = make_plan(400, 2, 1, (7, 0), (0, 137, 250, 251, 390, 400))
    (interior,), (boundary,) = plan.interior_calls, plan.boundary_calls
    assert interior.q_len == 193 and boundary.q_len == 7 and len(boundary.blocks) == 1


def bytes_received(case: Case) -> tuple[int, int]:
    """Bytes that this rank receives in a forward call, posted and planned."""
    mesh, posted = mesh_of(case.mesh, case.axes), []
    real = dist.batch_isend_irecv

    def count(ops: list[dist.P2POp]) -> list[dist.Work]:
        posted.extend(op.tensor.numel() * op.tensor.element_size() for op in ops if op.op is dist.irecv)
        return real(ops)

    q, k, v, _ = shard_sequence(mesh, *case.inputs())
    with mock.patch.object(dist, "batch_isend_irecv", count):
        ring_attention(
            q, k, v, mesh=mesh, window=case.window, cu_seqlens=case.boundaries(), sink_tokens=case.sink_tokens,
            exchange=case.exchange, load_balance="none",
        )  # fmt: skip
    ranks, rank, window = mesh.size(), mesh.get_local_rank(), Window(*case.window)
    given = case.boundaries()
    assert given is not None
    cu_seqlens = given.tolist()
    ring = choose_exchange(case.exchange, "contiguous", case.seq_len, ranks, window, packed=True).exchange == "ring"
    made = (
        make_ring("contiguous", case.seq_len, ranks, rank, window, tuple(cu_seqlens), case.sink_tokens)
        if ring
        else make_plan(case.seq_len, ranks, rank, window, cu_seqlens, case.sink_tokens)
    )
    return sum(posted), made.bytes(kv_heads=case.kv_heads, head_dim=4, batch=case.batch, itemsize=8)


@pytest.mark.parametrize("window", [(3, 0), (-1, 0), (-1, -1), (2, 2), (0, 0)])
@pytest.mark.parametrize("exchange", ["auto", "ring"])
def test_the_wire_carries_what_the_plan_says(pools: Pools, window: tuple[int, int], exchange: str) -> None:
    case = Case(mesh=(4,), window=window, seq_len=33, batch=2, cu_seqlens=(0, 7, 7, 15, 33), sink_tokens=2,
                exchange=exchange)  # fmt: skip
    for sent, planned in pools(4).run(bytes_received, case):
        assert sent == planned


def packed(case: Case) -> float:
    """The error of ``[T, H, D]`` tensors: plain shards of Documents that are built once."""
    mesh = mesh_of(case.mesh, case.axes)
    assert case.cu_seqlens is not None
    documents = Documents(torch.tensor(case.cu_seqlens), mesh)
    q, k, v, dout = (x.squeeze(0) for x in case.inputs())
    shards = [x.detach().requires_grad_() for x in shard_sequence(mesh, q, k, v, dim=0)]
    q, k, v = shards
    out, lse = ring_attention(q, k, v, window=case.window, cu_seqlens=documents, mesh=mesh, return_lse=True)
    again = ring_attention(q, k, v, window=case.window, cu_seqlens=case.cu_seqlens, mesh=mesh)
    assert torch.equal(out, again) and lse.shape == (case.q_heads, len(out))
    whole = [x.detach().double().requires_grad_() for x in case.inputs()[:3]]
    want, want_lse = dense_attention(whole[0], whole[1], whole[2], case.window, cu_seqlens=case.cu_seqlens)
    grads = torch.autograd.grad(out, shards, shard_sequence(mesh, dout, dim=0))
    want_grads = torch.autograd.grad(want, whole, dout.unsqueeze(0))
    pairs = [(out, want), (lse.T.unsqueeze(-1), want_lse.transpose(1, 2).unsqueeze(-1))]
    pairs += list(zip(grads, want_grads, strict=True))
    return max(float((x - shard_sequence(mesh, y[0], dim=0)).abs().max()) for x, y in pairs if x.numel())


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("window", [(4, 0), (-1, 0), (3, 3)])
def test_packed_tensors(pools: Pools, ranks: int, window: tuple[int, int]) -> None:
    case = Case(mesh=(ranks,), seq_len=26, window=window, cu_seqlens=(0, 5, 6, 20, 20, 26))
    assert max(pools(ranks).run(packed, case)) < TOLERANCE


def local_documents(_: None) -> list[tuple[list[int], list[int], int, int]]:
    mesh = mesh_of((2,), ("cp",))
    documents = Documents(torch.tensor([0, 5, 9, 9, 16]), mesh)
    found = [documents.local(window) for window in [(-1, 0), (1, 0), (1, 2)]]
    assert documents.cu_seqlens_q.tolist() == found[0].cu_seqlens_q.tolist()
    assert documents.max_seqlen_k == found[0].max_seqlen_k
    return [(x.cu_seqlens_q.tolist(), x.cu_seqlens_k.tolist(), x.max_seqlen_q, x.max_seqlen_k) for x in found]


def test_local_boundaries(pools: Pools) -> None:
    first, second = pools(2).run(local_documents, None)
    assert first == [([0, 5, 8], [0, 5, 8], 5, 5), ([0, 5, 8], [0, 5, 8], 5, 5), ([0, 5, 8], [0, 5, 9], 5, 5)]
    assert second == [([0, 1, 8], [0, 4, 11], 7, 7), ([0, 1, 8], [0, 2, 9], 7, 7), ([0, 1, 8], [0, 2, 9], 7, 7)]


def test_documents_from_tokens_and_positions() -> None:
    tokens = torch.tensor([7, 7, 2, 9, 2, 2, 8, 8])
    assert documents_from_eos(tokens, 2).cu_seqlens.tolist() == [0, 3, 5, 6, 8]
    assert documents_from_eos(tokens[:6], 2).cu_seqlens.tolist() == [0, 3, 5, 6]
    rows = documents_from_eos(torch.stack((tokens, torch.zeros_like(tokens))), 2)
    assert rows.cu_seqlens.tolist() == [[0, 3, 5, 6, 8], [0, 8, 8, 8, 8]]
    positions = torch.tensor([0, 1, 2, 0, 0, 1, 5, 6])
    assert documents_from_position_ids(positions).cu_seqlens.tolist() == [0, 3, 4, 6, 8]
    labels = next_token_labels(tokens, documents_from_eos(tokens, 2).cu_seqlens)
    assert labels.tolist() == [7, 2, -100, 2, -100, -100, 8, -100]


@pytest.mark.parametrize(
    ("cu_seqlens", "message"),
    [
        ([1, 4, 8], r"start at 0.*cu_seqlens\[0\] = 1"),
        ([0, 6, 5, 8], r"not decrease.*cu_seqlens\[2\] = 5 after 6"),
        ([0, 4], r"end at the 8 tokens.*cu_seqlens\[-1\] = 4"),
        ([0, 9], r"end at the 8 tokens.*cu_seqlens\[-1\] = 9"),
        ([[0, 8], [0, 8]], r"a boundary list a batch row, got \[2, 2\] for 1 rows"),
        ([0.0, 8.0], "int32 or int64"),
        ([], "int32 or int64"),
        ([[0, 5, 3, 8]], r"not decrease, got cu_seqlens\[0\]\[2\] = 3 after 5"),
    ],
)
def test_boundaries_that_are_none_raise_and_name_the_entry(cu_seqlens: list[int], message: str) -> None:
    q = torch.randn(1, 8, 2, 4)
    with pytest.raises(ValueError, match=message):
        ring_attention(q, q, q, cu_seqlens=torch.tensor(cu_seqlens))


def test_a_row_that_sees_no_key_has_the_sink() -> None:
    # No window hides a query's own key, so only an empty document could; a sink of -inf changes nothing.
    q, k, v = (torch.randn(1, 6, 2, 4, dtype=torch.float64) for _ in range(3))
    none = torch.full((2,), float("-inf"), dtype=torch.float64, requires_grad=True)
    out, lse = ring_attention(q, k, v, window=(2, 0), sinks=none, return_lse=True)
    want, want_lse = ring_attention(q, k, v, window=(2, 0), return_lse=True)
    assert torch.allclose(out, want) and torch.allclose(lse, want_lse)
    (grad,) = torch.autograd.grad(out.sum(), none)
    assert torch.equal(grad, torch.zeros_like(grad))


@pytest.mark.parametrize("entry", [int, np.int64, torch.tensor])
def test_boundaries_of_any_kind_of_integers(entry: Callable[[int], object]) -> None:
    q = torch.randn(2, 8, 2, 4, dtype=torch.float64)
    want = ring_attention(q, q, q, cu_seqlens=torch.tensor([0, 3, 8]))
    for edges in ([entry(x) for x in (0, 3, 8)], [[entry(0), entry(3), entry(8)]] * 2):
        assert torch.equal(want, ring_attention(q, q, q, cu_seqlens=edges))  # type: ignore[arg-type]


def test_rows_that_are_no_boundaries_are_named() -> None:
    q = torch.randn(2, 8, 2, 4)
    for rows, message in (
        ([[0, 3, 8], [1, 8]], r"cu_seqlens\[1\] must start at 0 .*cu_seqlens\[1\]\[0\] = 1"),
        # Of two ends, neither can be told to be the sequence's before it is known.
        ([[0, 4, 7], [0, 8]], r"rows of cu_seqlens must all end at the tokens .* the ends \[7, 8\]"),
    ):
        with pytest.raises(ValueError, match=message):
            ring_attention(q, q, q, cu_seqlens=rows)


def test_documents_of_what_is_no_mesh_raise_at_once() -> None:
    with pytest.raises(ValueError, match="mesh must be a 1-D DeviceMesh or a ProcessGroup, got str"):
        Documents([0, 8], "cp")  # type: ignore[arg-type]


@pytest.mark.parametrize("eos_id", [None, [2, 3], (2,), "2", 2.0, torch.tensor([2, 3])])
def test_an_eos_that_is_no_token_would_join_all_documents(eos_id: Any) -> None:
    with pytest.raises(ValueError, match="eos_id must be one token, an integer, got "):
        documents_from_eos(torch.tensor([5, 2, 6, 3, 7]), eos_id)


def test_eos_at_the_ends_in_a_row_and_of_other_kinds_of_integers() -> None:
    for eos_id in (2, np.int64(2), torch.tensor(2)):
        found = documents_from_eos(torch.tensor([2, 5, 2, 2, 6, 2]), eos_id)  # type: ignore[arg-type]
        assert found.cu_seqlens.tolist() == [0, 1, 3, 4, 6]


def test_positions_are_integers_that_do_not_wrap_around() -> None:
    # bfloat16 cannot count beyond 256, and uint8 would count from 255 on to 0.
    with pytest.raises(ValueError, match=r"must be a tensor of integers, got torch\.bfloat16"):
        documents_from_position_ids(torch.arange(300).bfloat16())
    twice = torch.arange(512).to(torch.uint8)
    assert documents_from_position_ids(twice).cu_seqlens.tolist() == [0, 256, 512]


def refusals_of_dtensors() -> list[str]:
    mesh = mesh_of((2,), ("cp",))
    sharded = distribute_tensor(torch.tensor([0, 3, 5, 8]), mesh, [Shard(0)], src_data_rank=None)
    q = torch.randn(1, 4, 2, 4)
    said = []
    for call in (
        lambda: ring_attention(q, q, q, cu_seqlens=sharded, mesh=mesh),
        lambda: documents_from_eos(sharded, 3),
        lambda: documents_from_position_ids(sharded),
        lambda: next_token_labels(sharded),
    ):
        with pytest.raises(ValueError) as caught:
            call()
        said.append(str(caught.value))
    return said


def test_dtensors_of_tokens_or_boundaries_are_refused_with_advice(pools: Pools) -> None:
    for said in pools(2).run(refusals_of_dtensors):
        assert all(message.endswith("got a DTensor; pass its full_tensor()") for message in said)


@pytest.mark.parametrize("find", [documents_from_position_ids, lambda x: documents_from_eos(x, 2)])
def test_documents_of_an_empty_sequence_and_of_other_shapes(find: Callable[[torch.Tensor], Documents]) -> None:
    assert find(torch.zeros(0, dtype=torch.long)).cu_seqlens.tolist() == [0, 0]
    assert find(torch.zeros(2, 0, dtype=torch.long)).cu_seqlens.tolist() == [[0, 0], [0, 0]]
    for shape in [(), (2, 3, 4)]:
        with pytest.raises(ValueError, match=r"in \[S\] or \[B, S\], got \["):
            find(torch.zeros(shape, dtype=torch.long))
