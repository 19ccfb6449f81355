"""Starting flash-attn-4's forward again, with a stand-in for the package: what is kept, and what goes the whole way."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dtensor_ring_swa.kernels import flash_launch
from dtensor_ring_swa.kernels.flash_launch import start_forward

import flash_stand_in as package


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    flash_launch._noted.cache_clear()
    yield
    package.reset()


def tensors(rows: int = 6, offset: int = 0, grad: bool = False) -> list[torch.Tensor]:
    """q, k, v, out and lse of ``rows`` rows, q beginning ``offset`` elements into its memory."""
    shape = (1, rows, 2, 4)
    q = torch.randn(rows * 8 + offset)[offset:].view(shape).requires_grad_(grad)
    return [q, torch.randn(shape), torch.randn(shape), torch.empty(shape), torch.empty(1, 2, rows)]


def start(
    given: list[torch.Tensor],
    sinks: torch.Tensor | None = None,
    scale: float = 0.5,
    left: int | None = 3,
    right: int | None = 0,
    tile: tuple[int, int] | None = None,
    interface: Any = package,
) -> None:
    q, k, v, out, lse = given
    start_forward(interface, q, k, v, out, lse, sinks, scale, 0.0, (left, right), tile)
    assert torch.equal(out, q.detach() * scale + k.mean() + v.mean())
    assert torch.equal(lse, torch.full_like(lse, left or 0.0))


def test_the_second_call_of_a_kind_starts_the_program_alone() -> None:
    for grad in (False, True, False):
        start(tensors(grad=grad))
    assert len(package.ran) == 1 and len(package.started) == 3
    assert not any(x.requires_grad for arguments in package.started for x in arguments[:5])


def test_another_kind_goes_the_whole_way() -> None:
    strided = torch.randn(1, 6, 4, 4)[:, :, ::2]
    kinds: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {}), ({"rows": 7}, {}), ({"q": strided}, {}), ({}, {"left": 4}), ({}, {"left": None}),
        ({}, {"right": 1}), ({}, {"scale": 0.25}), ({}, {"tile": (192, 64)}),
    ]  # fmt: skip
    for shape, options in kinds:
        for _ in range(2):
            own, *others = tensors(shape.get("rows", 6))
            start([shape.get("q", own), *others], **options)
    assert len(package.ran) == 8 and len(package.started) == 16


def test_sinks_are_put_where_the_program_takes_them() -> None:
    for _ in range(2):
        sinks = torch.randn(2)
        start(tensors(), sinks)
        assert package.started[-1][8] is sinks
    start(tensors())
    assert package.started[-1][8] is None and len(package.ran) == 2


def test_a_tensor_that_is_copied_goes_the_whole_way_each_time() -> None:
    start(tensors())
    for _ in range(2):
        start(tensors(offset=1))
    assert len(package.ran) == 3


def test_a_program_with_room_of_its_own_is_not_started_again() -> None:
    package.options["room_of_its_own"] = True
    for _ in range(3):
        start(tensors())
    assert len(package.ran) == 3


@pytest.mark.parametrize("programs", [None, {"key": None}])
def test_a_package_that_keeps_its_programs_in_another_way_goes_the_whole_way(programs: dict[str, Any] | None) -> None:
    ran = []

    def _flash_attn_fwd(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, out: torch.Tensor, lse: torch.Tensor,
        softmax_scale: float, window_size_left: int, version: int = 5, **options: object,
    ) -> None:  # fmt: skip
        ran.append(version)
        if programs is not None:
            _flash_attn_fwd.compile_cache.get("key")  # type: ignore[attr-defined]
        out.copy_(q * softmax_scale + k.mean() + v.mean())
        lse.fill_(window_size_left)

    if programs is not None:
        _flash_attn_fwd.compile_cache = programs  # type: ignore[attr-defined]
    for _ in range(3):
        start(tensors(), interface=SimpleNamespace(_flash_attn_fwd=_flash_attn_fwd))
    assert ran == [5, 5, 5]


def test_the_package_is_left_as_it_was() -> None:
    function, cache = package._flash_attn_fwd, package.cache()
    start(tensors())
    assert package._flash_attn_fwd is function and package.cache() is cache
    assert list(cache) == [(torch.float32, False, False, None)]


def test_what_was_noted_holds_no_tensor() -> None:
    given = tensors()
    held = [weakref.ref(x) for x in given]
    start(given)
    package.started.clear()
    del given
    gc.collect()
    assert not any(ref() is not None for ref in held)
