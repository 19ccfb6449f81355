"""Kernel ``flash`` without a GPU: all of it but the package, for which a stand-in computes by definition."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from unittest import mock

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from test_kernel_calls import CONFIGURATIONS, Problem, calls, label
from test_kernel_calls import errors as errors_of_call

from dtensor_ring_swa import prepare
from dtensor_ring_swa.block import Call
from dtensor_ring_swa.kernels import flash, flash_calls, flash_launch
from dtensor_ring_swa.testing import RankPool

import flash_stand_in
from cases import Case, errors, mesh_ranks
from test_documents import cases as documents_and_sinks

Pools = Callable[[int], RankPool]
# Learned sinks go to the package in float32.
TOLERANCE = 1e-6


@contextmanager
def stand_in() -> Iterator[None]:
    """Let kernel ``flash`` serve every request, with the stand-in for its package."""
    flash_launch._noted.cache_clear()
    flash_stand_in.reset()
    with ExitStack() as patches:
        for module, name, value in (
            (flash, "supports", lambda request: None), (flash_calls, "interface", lambda: flash_stand_in),
            (flash_calls, "capability", lambda device: (9, 0)),
        ):  # fmt: skip
            patches.enter_context(mock.patch.object(module, name, value))
        # That flash serves these requests must not be remembered.
        patches.callback(prepare._prepare.cache_clear)
        yield


@pytest.mark.parametrize("problem", CONFIGURATIONS, ids=label)
@settings(max_examples=100, phases=set(Phase) - {Phase.shrink})
@given(call=calls())
def test_calls(problem: Problem, call: Call) -> None:
    # Twice, since the second time forward starts what the first one noted.
    with stand_in():
        for _ in range(2):
            found = errors_of_call("flash", replace(problem, call=call, device="cpu", dtype="float64"))
            # A nan is no less than anything.
            assert all(error < TOLERANCE for error in found.values()), found


def run_with_stand_in(case: Case) -> tuple[dict[str, float], int]:
    """The errors of the second call, which starts what the first one noted, and how often a program was started."""
    with stand_in():
        errors(case)
        return errors(case), len(flash_stand_in.started)


@settings(max_examples=30, phases=set(Phase) - {Phase.shrink})
@given(case=documents_and_sinks(), softcap=st.sampled_from([0.0, 2.0]))
def test_ranks(pools: Pools, case: Case, softcap: float) -> None:
    case = replace(case, kernel="flash", softcap=softcap)
    results = pools(mesh_ranks(case)).run(run_with_stand_in, case)
    assert any(started for _, started in results)
    for rank, (found, _) in enumerate(results):
        assert max(found.values()) < TOLERANCE, f"rank {rank}: {found}"
