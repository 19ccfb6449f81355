"""Starting Triton's programs again, with a stand-in for a program: which build is started, and with what."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from dtensor_ring_swa.kernels import triton_launch
from dtensor_ring_swa.kernels.triton_launch import start
from dtensor_ring_swa.kernels.triton_tiles import Sizes, StartOptions

CPU = torch.device("cpu")
SIZES = Sizes(64, 64, 1, 64, 32, 64, 64, CAPPED=False)
OPTIONS = StartOptions(SIZES, 4, 3)


class Started(NamedTuple):
    """A start: of which build, on which grid, with which arguments."""

    build: int
    grid: tuple[int, int, int]
    arguments: tuple[Any, ...]


class Program:
    """A program as Triton has them: it makes a build, starts it and returns it. A build is started by itself, too."""

    def __init__(self) -> None:
        self.builds: list[dict[str, Any]] = []
        self.started: list[Started] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., Any]:
        def make(*arguments: Any, S: Sizes, **options: int) -> Any:
            self.builds.append({"S": S, **options})
            build = Build(self, len(self.builds) - 1)
            build[grid](*arguments, S)
            return build

        return make


class Build:
    def __init__(self, program: Program, index: int) -> None:
        self.program, self.index = program, index

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        return lambda *arguments: self.program.started.append(Started(self.index, grid, arguments))


@pytest.fixture(autouse=True)
def fresh() -> None:
    triton_launch._builds.cache_clear()


def strided(offset: int = 0, columns: int = 4) -> tuple[torch.Tensor | int, ...]:
    """A tensor that begins ``offset`` elements of 4 bytes into its memory, and its strides."""
    x = torch.empty(64)[offset : offset + 16].view(-1, columns)
    return x, *x.stride()


def test_a_build_is_started_again_with_the_arguments_of_the_call() -> None:
    program = Program()
    calls = [(strided(), torch.empty(4, dtype=torch.int32), 7, (3, 2), None, 0.5) for _ in range(3)]
    for size, call in enumerate(calls):
        # The grid is no part of a build.
        start(program, CPU, (size, 2, 1), OPTIONS, *call)
    assert program.builds == [{"S": SIZES, "num_warps": 4, "num_stages": 3}]
    for size, (call, started) in enumerate(zip(calls, program.started, strict=True)):
        assert started.build == 0 and started.grid == (size, 2, 1)
        assert started.arguments[0] is call[0] and started.arguments[1] is call[1]
        assert started.arguments[2:] == (7, (3, 2), None, 0.5, SIZES)


def test_what_a_build_may_depend_on_makes_another() -> None:
    bounds = torch.empty(4, dtype=torch.int32)
    kinds: list[tuple[torch.device, StartOptions, tuple[Any, ...]]] = [
        (CPU, OPTIONS, (strided(), bounds, 7, None)),
        (CPU, OPTIONS, (strided(offset=1), bounds, 7, None)),  # not aligned to 16 bytes
        (CPU, OPTIONS, (strided(columns=8), bounds, 7, None)),
        (CPU, OPTIONS, (strided(), bounds.long(), 7, None)),
        (CPU, OPTIONS, (strided(), torch.empty(5, dtype=torch.int32)[1:], 7, None)),
        (CPU, OPTIONS, (strided(), bounds, 16, None)),
        (CPU, OPTIONS, (strided(), bounds, 7, (4, 4))),
        (CPU, OPTIONS, (strided(), bounds, 7, strided())),
        (CPU, OPTIONS._replace(warps=8), (strided(), bounds, 7, None)),
        (CPU, OPTIONS._replace(sizes=SIZES._replace(CAPPED=True)), (strided(), bounds, 7, None)),
        (torch.device("cuda", 0), OPTIONS, (strided(), bounds, 7, None)),
        (torch.device("cuda", 1), OPTIONS, (strided(), bounds, 7, None)),
    ]
    program, other = Program(), Program()
    for _ in range(2):
        for device, options, arguments in kinds:
            start(program, device, (1, 1, 1), options, *arguments)
    start(other, CPU, (1, 1, 1), OPTIONS, *kinds[0][2])
    assert [started.build for started in program.started] == [*range(len(kinds)), *range(len(kinds))]
    assert len(other.builds) == 1


def test_the_interpreter_that_builds_nothing_is_started_each_time() -> None:
    started = []

    class Interpreted:
        def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
            return lambda *arguments, **options: started.append((grid, arguments, options))

    program = Interpreted()
    for _ in range(2):
        start(program, CPU, (1, 1, 1), OPTIONS, 7)
    assert started == [((1, 1, 1), (7,), {"S": SIZES, "num_warps": 4, "num_stages": 3})] * 2


def test_what_is_compiled_in_the_background_is_not_started_by_itself() -> None:
    class Future:
        """As Triton's: it has the attributes of a build, and cannot be indexed."""

        def __getattr__(self, name: str) -> Any:
            return getattr(Build(Program(), 0), name)

    started = []

    class Background:
        def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., Any]:
            return lambda *arguments, **options: started.append(arguments) or Future()

    program = Background()
    for _ in range(2):
        start(program, CPU, (1, 1, 1), OPTIONS, 7)
    assert started == [(7,), (7,)]


def test_no_build_is_kept_on_an_amd_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    # There one depends on whether a tensor's memory has 2 GB: the same strides do not tell.
    monkeypatch.setattr(torch.version, "hip", "7.0")
    program = Program()
    for _ in range(2):
        start(program, CPU, (1, 1, 1), OPTIONS, strided())
    assert [started.build for started in program.started] == [0, 1]


def test_what_is_kept_holds_no_tensor() -> None:
    class OneBuild:
        """As the real ones: it keeps nothing of a start."""

        def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., Any]:
            return lambda *arguments, **options: self

    x, *numbers = strided()
    bounds = torch.empty(4)
    held = [weakref.ref(x), weakref.ref(bounds)]
    for _ in range(2):
        start(OneBuild(), CPU, (1, 1, 1), OPTIONS, (x, *numbers), bounds)
    del x, bounds
    gc.collect()
    assert [ref() for ref in held] == [None, None]
