"""RankPool: what it returns, and that it tells the cause of a failure soon and then works again."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dtensor_ring_swa.testing import RankFailure, RankPool


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    made = RankPool(2)
    yield made
    made.close()


def rank_and(*values: Any) -> tuple[Any, ...]:
    return dist.get_rank(), *values


def sum_of_ranks() -> float:
    total = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(total)
    return total.item()


def slow_first_rank() -> int:
    time.sleep(0.3 * (1 - dist.get_rank()))
    return dist.get_rank()


def raise_on_last_rank() -> None:
    if dist.get_rank() == 1:
        raise KeyError("the cause")
    dist.barrier()


def hang_on_last_rank() -> None:
    if dist.get_rank() == 1:
        time.sleep(3600)


def die_on_last_rank() -> None:
    if dist.get_rank() == 1:
        os._exit(3)
    dist.barrier()


def a_closure() -> Any:
    return lambda: None


def process_id() -> int:
    return os.getpid()


class SentOnce(str):
    sent = False

    def __reduce__(self) -> Any:
        if self.sent:
            raise TypeError("sent before")
        self.sent = True
        return str, (str(self),)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def assert_works(pool: RankPool) -> None:
    assert pool.run(sum_of_ranks) == [3.0, 3.0]


def test_results_are_by_rank(pool: RankPool) -> None:
    assert pool.run(rank_and, "x", 5) == [(0, "x", 5), (1, "x", 5)]


def test_results_are_by_rank_even_if_a_later_one_answers_first(pool: RankPool) -> None:
    assert pool.run(slow_first_rank) == [0, 1]


def test_ranks_form_one_group(pool: RankPool) -> None:
    assert_works(pool)


def test_processes_live_on_between_cases(pool: RankPool) -> None:
    pids = pool.run(process_id)
    assert pool.run(process_id) == pids and len({*pids, os.getpid()}) == 3


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    pool = RankPool(2)
    assert_works(pool)
    assert any(tmp_path.iterdir())  # where the ranks meet
    pool.close()
    assert not any(tmp_path.iterdir())


def test_a_pool_of_which_one_rank_did_not_start_starts_anew(pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    pool.close()
    with monkeypatch.context() as patch:
        patch.setattr(pool, "backend", SentOnce("gloo"))
        with pytest.raises(TypeError, match="sent before"):
            pool.run(process_id)
    assert_works(pool)


def test_a_raising_rank_is_reported_while_its_peer_still_waits_for_it(pool: RankPool) -> None:
    assert_works(pool)
    start = time.monotonic()
    with pytest.raises(RankFailure, match=r"(?s)rank 1 of 2 raised.*in raise_on_last_rank.*KeyError: 'the cause'"):
        pool.run(raise_on_last_rank)
    assert time.monotonic() - start < 10  # The peer's barrier gives up after 20 s.
    assert_works(pool)


def test_a_hung_case_is_reported_and_killed(pool: RankPool) -> None:
    pids = pool.run(process_id)
    start = time.monotonic()
    with pytest.raises(RankFailure, match=r"ranks \[1\] hung; ranks \[0\] had finished"):
        pool.run(hang_on_last_rank, timeout=2.0)
    assert 2 <= time.monotonic() - start < 10
    assert not any(alive(pid) for pid in pids)
    assert_works(pool)


def test_a_dead_rank_is_named_even_if_its_peers_broken_connection_is_found_too(
    pool: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_works(pool)

    def late(*args: Any, **kwargs: Any) -> Any:
        time.sleep(1)
        return wait(*args, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(RankFailure, match="rank 1 of 2 died"):
        patch.setattr("dtensor_ring_swa.testing.pool.wait", late)
        pool.run(die_on_last_rank)
    assert_works(pool)


def test_a_rank_that_died_between_cases_is_reported(pool: RankPool) -> None:
    pid = pool.run(process_id)[1]
    os.kill(pid, signal.SIGKILL)
    time.sleep(0.2)
    try:
        with pytest.raises(RankFailure, match="rank 1 of 2 died"):
            pool.run(sum_of_ranks)
        assert_works(pool)
    finally:
        pool.close()


def test_a_result_that_does_not_travel_is_reported_with_its_cause(pool: RankPool) -> None:
    assert_works(pool)
    with pytest.raises(RankFailure, match=r"(?s)raised.*pickle"):
        pool.run(a_closure)
    assert_works(pool)


def test_close_kills_every_rank(pool: RankPool) -> None:
    pids = pool.run(process_id)
    pool.close()
    assert not any(alive(pid) for pid in pids)
