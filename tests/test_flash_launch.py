"""Starting flash-attn-4's forward again, with a stand-in for the package: what is kept, and what goes the whole way."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dtensor_ring_swa.kernels import flash_launch
from dtensor_ring_swa.kernels.flash_launch import start_forward

import flash_stand_in as package


@pytest.fixture(autouse=True)
def fresh() -> None:
    flash_launch._noted.cache_clear()
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
    softcap: float = 0.0,
    left: int | None = 3,
    right: int | None = 0,
    tile: tuple[int, int] | None = None,
) -> None:
    """Start forward, and compare with starting the whole function alone."""
    q, k, v, out, lse = given
    start_forward(package, q, k, v, out, lse, sinks, scale, softcap, (left, right), tile)
    found = out.clone(), lse.clone()
    before = len(package.ran), len(package.started)
    package._flash_attn_fwd(
        q, k, v, out=out, lse=lse, softmax_scale=scale, softcap=softcap, window_size_left=left,
        window_size_right=right, learnable_sink=sinks,
    )  # fmt: skip
    del package.ran[before[0] :], package.started[before[1] :]
    assert torch.equal(out, found[0]) and torch.equal(lse, found[1])


def test_the_second_call_of_a_kind_starts_the_program_alone() -> None:
    for grad in (False, True, False):
        start(tensors(grad=grad))
    assert len(package.ran) == 1 and len(package.started) == 3
    assert not any(x.requires_grad for arguments in package.started for x in arguments[:5])


def test_another_kind_goes_the_whole_way() -> None:
    strided = torch.randn(1, 6, 4, 4)[:, :, ::2]
    kinds: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {}), ({"rows": 7}, {}), ({"q": strided}, {}), ({}, {"left": 4}), ({}, {"left": None}),
        ({}, {"right": 1}), ({}, {"scale": 0.25}), ({}, {"tile": (192, 64)}), ({}, {"softcap": 2.0}),
    ]  # fmt: skip
    for shape, options in kinds:
        for _ in range(2):
            own, *others = tensors(shape.get("rows", 6))
            start([shape.get("q", own), *others], **options)
    assert len(package.ran) == 9 and len(package.started) == 18


def test_sinks_are_put_where_the_program_takes_them() -> None:
    for _ in range(2):
        sinks = torch.randn(2)
        start(tensors(), sinks)
        assert package.started[-1][10] is sinks
    start(tensors())
    assert package.started[-1][10] is None and len(package.ran) == 2


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


def test_what_is_no_plain_function_goes_the_whole_way(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrapped:
        whole, compile_cache = staticmethod(package._flash_attn_fwd), package.cache()

        def __call__(self, *args: Any, **kwargs: Any) -> None:
            self.whole(*args, **kwargs)

    monkeypatch.setattr(package, "_flash_attn_fwd", Wrapped())
    for _ in range(3):
        start(tensors())
    assert len(package.ran) == 3


@pytest.mark.parametrize("programs", [None, {"key": None}])
def test_a_package_that_keeps_its_programs_in_another_way_goes_the_whole_way(programs: dict[str, Any] | None) -> None:
    ran = []

    def _flash_attn_fwd(*tensors: torch.Tensor, out: torch.Tensor, version: int = 5, **options: object) -> None:
        ran.append(version)
        if programs is not None:
            _flash_attn_fwd.compile_cache.get("key")  # type: ignore[attr-defined]
        out.fill_(len(ran))

    if programs is not None:
        _flash_attn_fwd.compile_cache = programs  # type: ignore[attr-defined]
    for _ in range(3):
        q, k, v, out, lse = tensors()
        interface: Any = SimpleNamespace(_flash_attn_fwd=_flash_attn_fwd)
        start_forward(interface, q, k, v, out, lse, None, 0.5, 0.0, (3, 0), None)
        assert (out == len(ran)).all()
    assert ran == [5, 5, 5]


def test_the_package_is_left_as_it_was() -> None:
    function, cache = package._flash_attn_fwd, package.cache()
    start(tensors())
    assert package._flash_attn_fwd is function and package.cache() is cache
    assert len(cache) == 1


def test_what_was_noted_holds_no_tensor() -> None:
    given = tensors()
    held = [weakref.ref(x) for x in given]
    start(given)
    package.started.clear()
    del given
    gc.collect()
    assert not any(ref() is not None for ref in held)
