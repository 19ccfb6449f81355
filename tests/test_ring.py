"""The ring: windows without limit, layouts, and balance, against the dense oracle."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from dtensor_ring_swa import Window, gather_sequence, positions, ring_attention, shard_sequence
from dtensor_ring_swa.choice import choose_exchange
from dtensor_ring_swa.deal import make_deal
from dtensor_ring_swa.layout import LAYOUTS, runs
from dtensor_ring_swa.merge import merge_
from dtensor_ring_swa.plan import Transfer
from dtensor_ring_swa.planning import make_plan
from dtensor_ring_swa.ring import balanced_layout, imbalance, make_ring
from dtensor_ring_swa.testing import RankPool

from cases import Case, errors, mesh_of, mesh_ranks

Pools = Callable[[int], RankPool]
TOLERANCE = 1e-10


def uses_ring(layout: str, seq_len: int, ranks: int, window: Window) -> bool:
    return choose_exchange("auto", layout, seq_len, ranks, window).exchange == "ring"


@st.composite
def cases(draw: st.DrawFn) -> Case:
    mesh, axes = draw(
        st.sampled_from(
            [((ranks,), ("cp",)) for ranks in (1, 2, 3, 4)] + [((2, 2), ("dp", "cp")), ((2, 2), ("cp", "tp"))]
        )
    )
    ranks = mesh[axes.index("cp")]
    dealt = [("striped", "auto"), ("zigzag", "auto")]
    contiguous = [("contiguous", balance) for balance in ("auto", "none", "striped", "zigzag")]
    layout, balance = draw(st.sampled_from(dealt + contiguous))
    free = layout == "contiguous" and balance in ("auto", "none")
    seq_len = draw(st.integers(1, 40)) if free else draw(st.integers(1, 5)) * 2 * ranks
    sides = st.one_of(st.just(-1), st.integers(0, 20))
    return Case(
        batch=draw(st.integers(1, 2)), seq_len=seq_len, q_heads=4, kv_heads=2, head_dim=draw(st.integers(1, 4)),
        v_head_dim=draw(st.integers(1, 4)), window=draw(st.tuples(sides, sides)), axes=axes, mesh=mesh,
        softcap=draw(st.sampled_from([0.0, 2.0])), plain=axes == ("cp",) and draw(st.booleans()),
        strided=draw(st.booleans()), layout=layout, load_balance=balance, seed=draw(st.integers(0, 3)),
    )  # fmt: skip


@settings(max_examples=250, phases=set(Phase) - {Phase.shrink})
@given(case=cases())
@example(case=Case(seq_len=4, mesh=(4,), window=(-1, 0)))
@example(case=Case(seq_len=4, mesh=(4,), window=(-1, -1)))
@example(case=Case(seq_len=7, mesh=(4,), window=(-1, 0)))
@example(case=Case(seq_len=3, mesh=(4,), window=(-1, -1)))
@example(case=Case(seq_len=8, mesh=(2,), window=(1, 0), layout="striped"))
@example(case=Case(seq_len=8, mesh=(2,), window=(1, 0), layout="zigzag"))
@example(case=Case(seq_len=8, mesh=(2,), window=(1, 0), load_balance="striped"))
@example(case=Case(seq_len=16, mesh=(2,), window=(-1, -1), load_balance="zigzag"))
@example(case=Case(seq_len=16, mesh=(1,), window=(-1, 0), layout="zigzag", plain=True))
def test_equals_dense(pools: Pools, case: Case) -> None:
    for rank, found in enumerate(pools(mesh_ranks(case)).run(errors, case)):
        assert max(found.values()) < TOLERANCE, f"rank {rank}: {found}"


def test_blocks_show_each_visible_pair_once() -> None:
    for layout in LAYOUTS:
        for ranks in (1, 2, 3, 4):
            for seq_len in (2 * ranks, 6 * ranks):
                for window in [(-1, 0), (-1, -1), (0, -1), (3, 0), (0, 0), (1, 5), (2, -1)]:
                    seen: list[tuple[int, int]] = []
                    for rank in range(ranks):
                        ring = make_ring(layout, seq_len, ranks, rank, Window(*window))
                        held = [
                            [p for run in runs(layout, seq_len, ranks, r) for p in run.positions] for r in range(ranks)
                        ]
                        for step in ring.steps:
                            for b in step.call.blocks if step.call else ():
                                assert step.source is not None and step.call is not None
                                b = b.moved(step.call.q_start, step.call.k_start)
                                queries, keys = (
                                    held[rank][b.q_start : b.q_stop],
                                    held[step.source.peer][b.k_start : b.k_stop],
                                )
                                seen += [
                                    (q, k)
                                    for i, q in enumerate(queries)
                                    for j, k in enumerate(keys)
                                    if b.band.lower <= j - i <= b.band.upper
                                ]
                    left, right = (seq_len if side < 0 else side for side in window)
                    want = {(q, k) for q in range(seq_len) for k in range(seq_len) if q - left <= k <= q + right}
                    assert len(seen) == len(want) and set(seen) == want


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_causal_zigzag_step_is_one_kernel_call(ranks: int) -> None:
    for rank in range(ranks):
        ring = make_ring("zigzag", 64 * ranks, ranks, rank, Window.causal())
        assert [len(step.call.blocks) for step in ring.steps if step.call] == [1] * ranks


def test_rings_agree_on_who_sends_in_which_step() -> None:
    for ranks in (2, 3, 5):
        for window in (Window(-1, 0), Window(4, 0), Window(-1, -1)):
            rings = [make_ring("contiguous", 5 * ranks - 2, ranks, rank, window) for rank in range(ranks)]
            for ring in rings:
                for number, step in enumerate(ring.steps):
                    if step.target is not None:
                        theirs = rings[step.target.peer].steps[number].source
                        assert theirs == Transfer(ring.rank, step.target.start, step.target.stop)
                    if step.source is not None:
                        theirs = rings[step.source.peer].steps[number].target
                        assert theirs == Transfer(ring.rank, step.source.start, step.source.stop)


def test_causal_ranks_neither_compute_nor_wait_for_later_keys() -> None:
    ring = make_ring("contiguous", 32, 4, 1, Window.causal())
    assert [step.source and step.source.peer for step in ring.steps] == [1, 0, None, None]
    assert [step.target and step.target.peer for step in ring.steps] == [1, 2, 3, None]
    alone = make_ring("striped", 8, 1, 0, Window.causal())
    assert len(alone.steps) == 1 and alone.bytes(kv_heads=2, head_dim=4) == 0


@pytest.mark.parametrize("ranks", [2, 4, 8, 16, 64])
def test_imbalance(ranks: int) -> None:
    seq_len, causal = 4096 * ranks, Window.causal()
    assert imbalance("zigzag", seq_len, ranks, causal) <= 1.02
    assert imbalance("striped", seq_len, ranks, causal) <= 1.02
    assert imbalance("contiguous", seq_len, ranks, causal) == pytest.approx(2 - 1 / ranks, rel=1e-3)


def test_when_the_ring_and_when_balance() -> None:
    # 512 tokens a rank. A halo of up to two shards is held; without a limit the ring takes over.
    assert not uses_ring("contiguous", 1536, 3, Window.causal()) and uses_ring("contiguous", 2048, 4, Window.causal())
    assert not uses_ring("contiguous", 8192, 16, Window(4096, 0)) and uses_ring("contiguous", 8192, 16, Window(4097, 0))
    assert uses_ring("striped", 4096, 8, Window(1, 0)) and not uses_ring("contiguous", 4096, 1, Window.full())
    assert balanced_layout("auto", 4096, 8, Window.causal()) == "zigzag"
    assert balanced_layout("auto", 4096, 8, Window.full()) == "contiguous"
    assert balanced_layout("auto", 4095, 8, Window.causal()) == "contiguous"
    assert balanced_layout("none", 4096, 8, Window.causal()) == "contiguous"
    with pytest.raises(ValueError, match="needs a multiple of 16 tokens, got 4095; pad"):
        balanced_layout("zigzag", 4095, 8, Window.causal())


def test_deals_move_every_row_once_and_back() -> None:
    for ranks in (1, 2, 3, 4):
        for layout in ("striped", "zigzag"):
            seq_len = 6 * ranks
            for old, new in (("contiguous", layout), (layout, "contiguous")):
                held = {
                    name: [[p for run in runs(name, seq_len, ranks, r) for p in run.positions] for r in range(ranks)]
                    for name in (old, new)
                }
                deals = [make_deal(old, new, seq_len, ranks, rank) for rank in range(ranks)]
                for rank, moves in enumerate(deals):
                    got: list[int | None] = [None] * moves.rows
                    for peer in range(ranks):
                        for here, there in zip(deals[peer].gives[rank], moves.takes[peer], strict=True):
                            got[there] = held[old][peer][here]
                    assert got == held[new][rank]


def test_merging_is_safe_for_far_apart_and_empty_parts() -> None:
    infinity = float("inf")
    out, lse = torch.ones(1, 4, 1, 1), torch.tensor([[[0.0, -infinity, -infinity, 120.0]]])
    out[0, 1:3] = 0
    part = torch.tensor([3.0, 5.0, 0.0, 7.0]).view(1, 4, 1, 1)
    merge_(out, lse, part, torch.tensor([[[0.0, 2.0, -infinity, 0.0]]]))
    assert out.flatten().tolist() == pytest.approx([2.0, 5.0, 0.0, 1.0])
    assert lse.flatten().tolist() == pytest.approx([0.6931472, 2.0, -infinity, 120.0])


def bytes_received(case: Case) -> tuple[int, int]:
    """K and V bytes that this rank posts receives for in forward, and those of its plan."""
    mesh, posted = mesh_of(case.mesh, case.axes), []
    real = dist.batch_isend_irecv

    def count(ops: list[dist.P2POp]) -> list[dist.Work]:
        posted.extend(op.tensor.numel() * op.tensor.element_size() for op in ops if op.op is dist.irecv)
        return real(ops)

    q, k, v, _ = shard_sequence(mesh, *case.inputs())
    with mock.patch.object(dist, "batch_isend_irecv", count):
        ring_attention(q, k, v, window=case.window, load_balance="none", mesh=mesh)
    ranks, rank, window = mesh.size(), mesh.get_local_rank(), Window(*case.window)
    ring = uses_ring("contiguous", case.seq_len, ranks, window)
    made = (
        make_ring("contiguous", case.seq_len, ranks, rank, window)
        if ring
        else make_plan(case.seq_len, ranks, rank, window)
    )
    return sum(posted), made.bytes(kv_heads=case.kv_heads, head_dim=4, batch=case.batch, itemsize=8)


@pytest.mark.parametrize("window", [(3, 0), (-1, 0), (-1, -1), (9, 2), (0, 0), (0, -1)])
@pytest.mark.parametrize("seq_len", [16, 15])
def test_the_wire_carries_what_the_plan_says(pools: Pools, window: tuple[int, int], seq_len: int) -> None:
    for sent, planned in pools(4).run(bytes_received, Case(mesh=(4,), window=window, seq_len=seq_len, batch=2)):
        assert sent == planned


def largest_growth(chunk: int) -> int:
    """The largest tensor that a causal call allocates on this rank, in bytes."""
    mesh = mesh_of((dist.get_world_size(),), ("cp",))
    case = Case(seq_len=chunk * mesh.size(), mesh=(mesh.size(),))
    q, k, v = (x.requires_grad_() for x in shard_sequence(mesh, *case.inputs()[:3]))
    with torch.profiler.profile(profile_memory=True) as profile:
        ring_attention(q, k, v, window=(-1, 0), mesh=mesh, load_balance="none").sum().backward()
    return max(event.cpu_memory_usage for event in profile.events() or [])


def test_bytes_of_a_limited_window_do_not_change_with_ranks(pools: Pools) -> None:
    # Shards of 4 tokens, a window of two and a half of them.
    received = {}
    for ranks in (4, 8):
        case = Case(mesh=(ranks,), window=(10, 0), seq_len=4 * ranks, batch=2)
        found = pools(ranks).run(bytes_received, case)
        assert all(sent == planned for sent, planned in found)
        received[ranks] = found[-1][0]
        for rank, error in enumerate(pools(ranks).run(errors, case)):
            assert max(error.values()) < TOLERANCE, f"rank {rank}: {error}"
    assert received[4] == received[8] > 0


def test_memory_does_not_grow_with_ranks(pools: Pools) -> None:
    # With three ranks the halo is still the smaller; from four on the ring holds two shards at a time.
    four, six = (max(pools(ranks).run(largest_growth, 256)) for ranks in (4, 6))
    assert six <= four * 1.01


def balanced_and_not() -> float:
    mesh, case = mesh_of((4,), ("cp",)), Case(seq_len=32, q_heads=4, kv_heads=2)
    results = []
    for balance in ("none", "auto", "striped"):
        leaves = [x.detach().requires_grad_() for x in shard_sequence(mesh, *case.inputs()[:3])]
        out = ring_attention(*leaves, window=(-1, 0), mesh=mesh, load_balance=balance)
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    return max(
        float((a - b).detach().abs().max()) for other in results[1:] for a, b in zip(results[0], other, strict=True)
    )


@pytest.mark.parametrize("window", [(-1, 0), (-1, -1)])
@pytest.mark.parametrize("layout", ["contiguous", "striped"])
def test_bfloat16_error_of_the_ring_does_not_grow_with_ranks(
    pools: Pools, layout: str, window: tuple[int, int]
) -> None:
    shapes = Case(seq_len=256, q_heads=4, kv_heads=2, head_dim=16, v_head_dim=16, window=window, dtype=torch.bfloat16)
    (alone,) = pools(1).run(errors, replace(shapes, mesh=(1,)))
    eight = pools(8).run(errors, replace(shapes, mesh=(8,), layout=layout, exchange="ring"))[0]
    for name, error in alone.items():
        # lse is float32 on any number of ranks, and its last bits are not bfloat16's errors.
        assert eight[name] <= max(1.1 * error, 1e-6), f"{name}: {eight[name]} on 8 ranks, {error} on one"
    assert 1e-4 < max(alone.values()) < 1e-2


def test_balanced_runs_equal_unbalanced_ones(pools: Pools) -> None:
    assert max(pools(4).run(balanced_and_not)) < 1e-12


def round_trip(layout: str) -> bool:
    mesh = mesh_of((4,), ("cp",))
    whole = torch.randn(2, 24, 3, generator=torch.Generator().manual_seed(0))
    mine = shard_sequence(mesh, whole, layout=layout)
    return torch.equal(gather_sequence(mesh, mine, layout=layout), whole) and torch.equal(
        whole[:, positions(mesh, 24, layout=layout)], mine
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sequences_round_trip_in_every_layout(pools: Pools, layout: str) -> None:
    assert all(pools(4).run(round_trip, layout))


def warnings_of(window: tuple[int, int], layout: str) -> list[str]:
    mesh = mesh_of((4,), ("cp",))
    x = torch.randn(1, 8, 2, 4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            ring_attention(x, x, x, window=window, layout=layout, mesh=mesh)
    return [str(warning.message) for warning in caught]


def test_a_layout_that_fetches_nearly_everything_for_a_small_window_warns_once(pools: Pools) -> None:
    # 8 rows of K and V (2 heads of 4 floats each) from the rank with each earlier token, against one of a halo.
    said = pools(4).run(warnings_of, (1, 0), "striped")
    assert len(said[1]) == 1 and f"{8 * 64} bytes" in said[1][0] and "would be 64" in said[1][0]
    assert pools(4).run(warnings_of, (-1, 0), "striped") == pools(4).run(warnings_of, (1, 0), "contiguous") == [[]] * 4


def refusal(layout: str) -> str:
    mesh = mesh_of((2,), ("cp",))
    x = torch.randn(1, 3, 2, 4)
    try:
        ring_attention(x, x, x, layout=layout, mesh=mesh)
    except ValueError as problem:
        return str(problem)
    return ""


def test_a_layout_that_cannot_deal_the_length_raises_on_every_rank(pools: Pools) -> None:
    for message in pools(2).run(refusal, "zigzag"):
        assert "needs a multiple of 4 tokens, got 6" in message
