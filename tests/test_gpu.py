"""Attention on shards over NCCL: every kernel, DTensors and plain shards, against the dense oracle."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from dtensor_ring_swa import ring_attention, shard_sequence
from dtensor_ring_swa.testing import RankPool

from cases import Case, errors, gpu_ranks, mesh_of, supported

# Enough for a rank between two others, and for rings and halos of several steps.
RANKS = gpu_ranks(least=4)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(RANKS < 1, reason="needs CUDA")]

TOLERANCE = {torch.bfloat16: 1.2e-2, torch.float16: 2e-3, torch.float32: 1e-4, torch.float64: 1e-10}
WINDOWS = [(127, 0), (1023, 0), (0, 0), (64, 64), (-1, 0), (-1, -1), (0, 200), (1500, 30)]


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    made = RankPool(RANKS, backend="nccl", timeout=300)
    yield made
    made.close()


def check(pool: RankPool, case: Case) -> None:
    for rank, found in enumerate(pool.run(errors, supported(case))):
        assert max(found.values()) < TOLERANCE[case.dtype], f"rank {rank}: {found}"


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("kernel", ["flash", "aten", "triton", "reference"])
def test_windows(pool: RankPool, kernel: str, window: tuple[int, int], plain: bool, joint: bool) -> None:
    check(
        pool,
        Case(
            seq_len=2048, q_heads=8, kv_heads=2, head_dim=64, v_head_dim=64, window=window, mesh=(RANKS,),
            dtype=torch.bfloat16, kernel=kernel, device="cuda", plain=plain, joint=joint,
        ),
    )  # fmt: skip


@pytest.mark.parametrize("kernel", ["flash", "aten", "triton", "reference"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("strided", [False, True])
def test_uneven_batches_of_any_dtype(pool: RankPool, kernel: str, dtype: torch.dtype, strided: bool) -> None:
    check(
        pool,
        Case(
            batch=2, seq_len=777, q_heads=4, kv_heads=4, head_dim=72, v_head_dim=72, window=(200, 100),
            mesh=(RANKS,), dtype=dtype, kernel=kernel, device="cuda", strided=strided,
        ),
    )  # fmt: skip


@pytest.mark.parametrize("kernel", ["flash", "triton", "reference"])
def test_softcap(pool: RankPool, kernel: str) -> None:
    check(
        pool,
        Case(
            seq_len=1024, q_heads=4, kv_heads=2, head_dim=128, v_head_dim=128, window=(255, 0), mesh=(RANKS,),
            dtype=torch.bfloat16, kernel=kernel, device="cuda", softcap=50.0,
        ),
    )  # fmt: skip


@pytest.mark.parametrize("layout", ["striped", "zigzag"])
@pytest.mark.parametrize("window", [(-1, 0), (-1, -1), (100, 30)])
def test_layouts(pool: RankPool, layout: str, window: tuple[int, int]) -> None:
    check(
        pool,
        Case(
            seq_len=1024, q_heads=8, kv_heads=2, head_dim=64, v_head_dim=64, window=window, mesh=(RANKS,),
            dtype=torch.bfloat16, kernel="flash", device="cuda", layout=layout,
        ),
    )  # fmt: skip


def gradients_again(window: tuple[int, int]) -> bool:
    mesh = mesh_of((RANKS,), ("cp",), "cuda")
    case = Case(seq_len=2048, q_heads=8, kv_heads=2, head_dim=64, v_head_dim=64, device="cuda", dtype=torch.bfloat16)
    q, k, v, dout = (x.detach().requires_grad_() for x in shard_sequence(mesh, *case.inputs()))
    runs = []
    for _ in range(4):
        out = ring_attention(q, k, v, window=window, mesh=mesh, deterministic=True)
        runs.append(torch.autograd.grad(out, (q, k, v), dout))
    return all(torch.equal(x, y) for run in runs[1:] for x, y in zip(runs[0], run, strict=True))


@pytest.mark.parametrize("window", [(255, 0), (-1, 0), (100, 30)])
def test_deterministic_gradients_are_bitwise_the_same(pool: RankPool, window: tuple[int, int]) -> None:
    assert all(pool.run(gradients_again, window))


DOCUMENTS = (0, 137, 137, 500, 501, 1300, 1389, 2048)


@pytest.mark.parametrize("kernel", ["flash", "triton", "aten", "reference"])
@pytest.mark.parametrize("window", [(255, 0), (-1, 0), (30, 40), (-1, -1)])
@pytest.mark.parametrize(("sink_tokens", "sinks"), [(0, None), (0, "dtensor"), (4, "dtensor")])
def test_documents_and_sinks(
    pool: RankPool, kernel: str, window: tuple[int, int], sink_tokens: int, sinks: str | None
) -> None:
    check(
        pool,
        Case(
            batch=2, seq_len=2048, q_heads=8, kv_heads=2, head_dim=64, v_head_dim=64, window=window, mesh=(RANKS,),
            dtype=torch.bfloat16, kernel=kernel, device="cuda", cu_seqlens=(DOCUMENTS, (0, *DOCUMENTS[:6], 2048)),
            sink_tokens=sink_tokens, sinks=sinks,
        ),
    )  # fmt: skip


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("seq_len", [512, 1])
def test_edge_ranks_first_on_a_fresh_group(seq_len: int, plain: bool, backend: str) -> None:
    # With one token all ranks but the first are empty, and still take part in making the group.
    pool = RankPool(RANKS, backend, timeout=120)
    try:
        check(pool, Case(seq_len=seq_len, window=(1, 0), mesh=(RANKS,), dtype=torch.float32, kernel="reference",
                         device="cuda", plain=plain))  # fmt: skip
    finally:
        pool.close()
