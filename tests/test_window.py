"""Window: what it shows, what it converts, what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dtensor_ring_swa import Window, ring_attention

S = 8


def keys_seen(window: Any, row: int) -> set[int]:
    """The keys of weight in one row: with equal scores and one-hot values, out holds the weights."""
    q = torch.zeros(1, S, 1, 1, dtype=torch.float64)
    weights = ring_attention(q, q, torch.eye(S, dtype=torch.float64)[None, :, None], window=window)[0, row, 0]
    seen = weights.nonzero().flatten().tolist()
    assert torch.allclose(weights[seen], torch.full((len(seen),), 1 / len(seen), dtype=torch.float64))
    return set(seen)


@pytest.mark.parametrize(
    ("window", "row", "seen"),
    [
        (Window.tokens(3), 5, {3, 4, 5}),
        ((3, 0), 5, {2, 3, 4, 5}),
        ([3, 0], 5, {2, 3, 4, 5}),
        ((0, 2), 5, {5, 6, 7}),
        ((1, 1), 5, {4, 5, 6}),
        ((3, 0), 1, {0, 1}),
        ((0, 3), 6, {6, 7}),
        ((100, 0), 5, {0, 1, 2, 3, 4, 5}),
        ((-1, 0), 5, {0, 1, 2, 3, 4, 5}),
        ((None, 0), 5, {0, 1, 2, 3, 4, 5}),
        ((2, -1), 5, {3, 4, 5, 6, 7}),
        ((2, None), 5, {3, 4, 5, 6, 7}),
        ((None, None), 5, set(range(S))),
        (Window.causal(), 5, {0, 1, 2, 3, 4, 5}),
        (Window.full(), 5, set(range(S))),
        (Window.flash((2, 0)), 5, {3, 4, 5}),
        (Window.flash((2, 1)), 5, {3, 4, 5, 6}),
        (Window.flash((2, 1), causal=True), 5, {3, 4, 5}),
        (Window.flash((-1, -1)), 5, set(range(S))),
        (Window.flash((-1, -1), causal=True), 5, {0, 1, 2, 3, 4, 5}),
    ],
    ids=repr,
)
def test_row_sees(window: Any, row: int, seen: set[int]) -> None:
    assert keys_seen(window, row) == seen


@pytest.mark.parametrize("row", range(S))
def test_zero_window_shows_each_row_itself_only(row: int) -> None:
    assert keys_seen((0, 0), row) == {row} == keys_seen(Window.tokens(1), row)


def test_default_is_causal() -> None:
    q, k, v = torch.randn(3, 1, S, 2, 4, dtype=torch.float64).unbind()
    assert torch.equal(ring_attention(q, k, v), ring_attention(q, k, v, window=Window.causal()))


def test_none_is_minus_one() -> None:
    assert Window.of((None, None)) == Window.of([-1, -1]) == Window(-1, -1) == Window.full()


def test_of_leaves_a_window_alone() -> None:
    assert Window.of(Window(3, 1)) == Window(3, 1)


def test_unpacks_as_a_pair() -> None:
    left, right = Window(3, 1)
    assert (left, right) == (3, 1)


def test_reach_is_cut_to_the_sequence() -> None:
    assert Window(3, 20).reach(8) == (3, 8) and Window.full().reach(8) == (8, 8)


@pytest.mark.parametrize(
    ("window", "says"),
    [
        ((-2, 0), r"left .*>= 0.* -1 .*got -2"),
        ((0, -5), r"right .*>= 0.* -1 .*got -5"),
        ((True, 0), r"left must be an integer.*got True.*None"),
        ((0, False), r"right must be an integer.*got False"),
        ((2.0, 0), r"left must be an integer.*got 2\.0"),
        ((0, "4"), r"right must be an integer.*got '4'"),
        (4, r"pair .*got 4;.*Window\.tokens\(n\)"),
        (None, r"pair .*got None"),
        ((4,), r"pair .*got \(4,\)"),
        ((1, 2, 3), r"pair .*got \(1, 2, 3\)"),
    ],
    ids=repr,
)
def test_bad_windows_raise_and_say_what_was_given(window: Any, says: str) -> None:
    q = torch.zeros(1, S, 1, 4)
    with pytest.raises(ValueError, match=says):
        Window.of(window)
    with pytest.raises(ValueError, match=says):
        ring_attention(q, q, q, window=window)


@pytest.mark.parametrize("n", [0, -1, True, 2.0, None])
def test_tokens_needs_at_least_the_query_itself(n: Any) -> None:
    with pytest.raises(ValueError, match=rf"n >= 1.*got {n!r}; no limit is Window.causal"):
        Window.tokens(n)


def test_flash_refuses_a_bare_integer() -> None:
    window: Any = 4
    with pytest.raises(ValueError, match="got 4"):
        Window.flash(window)
