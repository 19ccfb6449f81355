"""apply_context_parallel: which modules a plan reaches, and what it says of those that it does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel

from dtensor_ring_swa import (
    ContextParallel,
    RingAttention,
    Window,
    apply_context_parallel,
    ring_attention,
    shard_sequence,
)
from dtensor_ring_swa.testing import RankPool

from cases import mesh_of

Pools = Callable[[int], RankPool]


class Block(nn.Module):
    """A part of a model that knows nothing of sharding: two cores, one of them not ours."""

    def __init__(self, window: Window) -> None:
        super().__init__()
        self.core = RingAttention(window)
        self.other = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.other(self.core(x, x, v=x))


class Model(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(Window(layer, 0)) for layer in range(layers))
        self.last = self.layers[-1]  # one module of two names

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def hooked(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if module._forward_pre_hooks]


def reached(plan: Any) -> list[str]:
    return hooked(apply_context_parallel(Model(), mesh_of((1,), ("cp",)), plan))


@pytest.mark.parametrize(
    ("plan", "want"),
    [
        (["layers.*.core"], ["layers.0.core", "layers.1.core", "layers.2.core"]),
        ("layers.*.core", ["layers.0.core", "layers.1.core", "layers.2.core"]),
        ({"layers.[02].core": ContextParallel()}, ["layers.0.core", "layers.2.core"]),
        ({"layers.?.c*": ContextParallel(), "layers.1.other": ContextParallel()},
         ["layers.0.core", "layers.1.core", "layers.1.other", "layers.2.core"]),
        ({"": ContextParallel()}, [""]),
        (["last.*"], ["layers.2.core", "layers.2.other"]),
        (["last.core", "layers.[01].core"], ["layers.0.core", "layers.1.core", "layers.2.core"]),
        # As in parallelize_module a star matches one part of a name.
        ({"*": ContextParallel()}, ["layers", "layers.2"]),
    ],
)  # fmt: skip
def test_patterns_reach_modules_by_name(pools: Pools, plan: Any, want: list[str]) -> None:
    assert pools(1).run(reached, plan) == [want]


def what_is_refused(plan: Any, axes: tuple[str, ...] = ("cp",)) -> tuple[str, list[str]]:
    model = Model()
    with pytest.raises(ValueError) as caught:
        apply_context_parallel(model, mesh_of((1,) * len(axes), axes), plan)
    return str(caught.value), hooked(model)


@pytest.mark.parametrize("mesh", [None, "cp"])
def test_a_plan_needs_a_mesh(mesh: Any) -> None:
    with pytest.raises(ValueError, match="mesh must be a DeviceMesh with the context-parallel axis, got "):
        apply_context_parallel(Model(), mesh, ["layers.*.core"])


@pytest.mark.parametrize(
    ("plan", "axes", "message"),
    [
        (["layers.*.attention", "layers.*.core", "norm"], ("cp",), "no module matches 'layers.*.attention', 'norm'; "),
        (["layers.*.attention"], ("cp",), "some are: layers.0.core, "),
        (["core"], ("cp",), "some are: "),
        (["*.attention"], ("cp",), "; a * stands for one part of a name, between dots"),
        (ContextParallel(), ("cp",), "a plan maps names of modules to styles, got ContextParallel(seq_dim=1, "),
        ([], ("cp",), "the plan is empty; of 13 names of modules, some are: layers"),
        (["layers.*.core", "layers.1.*"], ("cp",), "layers.1.core is matched by 'layers.*.core' and by 'layers.1.*'"),
        (["last.core", "layers.2.core"], ("cp",), "layers.2.core is matched by 'last.core' and by"),
        ({"layers.*.core": None}, ("cp",), "got 'layers.*.core': None"),
        ({"layers.*.other": ColwiseParallel()}, ("cp",), "ColwiseParallel needs one axis beside"),
        ({"layers.*.other": ColwiseParallel()}, ("dp", "cp", "tp"), "('dp', 'cp', 'tp'); pass a slice"),
        (["layers.*.core"], ("dp", "tp"), "ContextParallel on layers.0.core (RingAttention): the mesh has the axes"),
    ],
)
def test_what_a_plan_cannot_do_raises_and_changes_nothing(
    pools: Pools, plan: Any, axes: tuple[str, ...], message: str
) -> None:
    ((said, changed),) = pools(1).run(what_is_refused, plan, axes)
    assert message in said and changed == []


def distance_from_one_process(length: int, dtype: torch.dtype = torch.float64, device: str = "cpu") -> float:
    x = torch.randn(2, length, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(device)
    mesh, model = mesh_of((dist.get_world_size(),), ("cp",), device), Model()
    want = shard_sequence(mesh, model(x))
    got = apply_context_parallel(model, mesh, ["layers.*.core"])(shard_sequence(mesh, x.to(dtype)))
    assert not isinstance(got, DTensor)
    return float((got - want).abs().max())


@pytest.mark.parametrize("length", [8, 7])
def test_a_model_that_knows_nothing_of_it(pools: Pools, length: int) -> None:
    assert max(pools(2).run(distance_from_one_process, length)) < 1e-12


class Packed(nn.Module):
    """Attention that one cannot edit: other shapes, positions counted in the module that calls it."""

    def forward(self, states: torch.Tensor, position_ids: torch.Tensor | None = None) -> torch.Tensor:
        assert position_ids is not None
        q = states * position_ids.unsqueeze(-1)
        heads = [x.unflatten(2, (2, 2)) for x in (q, states, states)]
        return ring_attention(*heads, window=(1, 0)).flatten(2)


class Caller(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Packed()

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.attention(states, position_ids=torch.arange(states.shape[1])[None])


def distance_with_positions() -> float:
    x = torch.randn(2, 8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mesh, model = mesh_of((2,), ("cp",)), Caller()
    want = shard_sequence(mesh, model(x))
    style = ContextParallel(inputs={"states": 1}, positions="position_ids")
    got = apply_context_parallel(model, mesh, {"attention": style})(shard_sequence(mesh, x))
    return float((got - want).abs().max())


def test_a_model_that_counts_positions_itself(pools: Pools) -> None:
    assert max(pools(2).run(distance_with_positions)) < 1e-12


def said_by_name(lengths: tuple[int, int]) -> str:
    model = apply_context_parallel(Model(), mesh_of((2,), ("cp",)), ["layers.1.core"])
    try:
        model(torch.ones(1, lengths[dist.get_rank()], 2, 4))
    except ValueError as problem:
        return str(problem)
    return "accepted"


def test_errors_of_a_call_say_the_modules_name_and_shapes_on_every_rank(pools: Pools) -> None:
    for length, said in zip((3, 5), pools(2).run(said_by_name, (3, 5)), strict=True):
        shape = f"[1, {length}, 2, 4]"
        assert said.startswith(
            f"layers.1.core (RingAttention) got 0: {shape}, 1: {shape}, v: {shape}: shards of [3, 5]"
        )
