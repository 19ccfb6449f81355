"""The random cases of the tests on CPU, over NCCL on 1 to 4 ranks: any mesh, layout, documents and sinks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from dtensor_ring_swa.testing import RankPool

import test_attention
import test_documents
import test_ring
from cases import Case, errors, gpu_ranks, mesh_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not gpu_ranks(least=1), reason="needs CUDA")]

# Kernel "triton" takes no float64.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}
KINDS = st.sampled_from([(torch.float64, "reference"), (torch.float32, "triton")])


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, RankPool]]:
    made = {ranks: RankPool(ranks, "nccl", timeout=120) for ranks in range(1, 5)}
    yield made
    for each in made.values():
        each.close()


@settings(max_examples=100, phases=set(Phase) - {Phase.shrink})
@given(case=st.one_of(test_attention.cases(), test_documents.cases(), test_ring.cases()), kind=KINDS)
def test_equals_dense(pools: dict[int, RankPool], case: Case, kind: tuple[torch.dtype, str]) -> None:
    dtype, kernel = kind
    case = replace(case, device="cuda", dtype=dtype, kernel=kernel)
    for rank, found in enumerate(pools[mesh_ranks(case)].run(errors, case)):
        assert max(found.values()) < TOLERANCE[dtype], f"rank {rank}: {found}"
