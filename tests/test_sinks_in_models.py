"""Learned sinks as parameters of a model under a plan and FSDP2: gradients and their norm against one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from dtensor_ring_swa import ContextParallel, Documents, RingAttention, Window, apply_context_parallel, shard_sequence
from dtensor_ring_swa.testing import RankPool, dense_attention

from cases import apart, mesh_of

Pools = Callable[[int], RankPool]
BATCH, WIDTH, HEAD_DIM, KV_HEADS = 2, 16, 4, 2
WINDOWS = (Window(3, 0), Window.causal())
# Row 0 has a boundary on a cut of 2 and of 4 ranks and a document of one token; row 1 has one document across all cuts.
BOUNDARIES = ([0, 4, 5, 16], [0, 1, 15, 16])
SEQ_LEN = 16


class Layer(nn.Module):
    """Attention with a sink logit a query head, on one device or as its parameters lie."""

    def __init__(self, window: Window, heads: int) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, heads * HEAD_DIM, dtype=torch.float64)
        self.k, self.v = (nn.Linear(WIDTH, KV_HEADS * HEAD_DIM, dtype=torch.float64) for _ in range(2))
        self.sinks = nn.Parameter(torch.randn(heads, dtype=torch.float64))
        self.core = RingAttention(window)
        self.out = nn.Linear(heads * HEAD_DIM, WIDTH, dtype=torch.float64)

    def forward(self, x: torch.Tensor, documents: Documents) -> torch.Tensor:
        q, k, v = (project(x).unflatten(-1, (-1, HEAD_DIM)) for project in (self.q, self.k, self.v))
        sinks = self.sinks
        if isinstance(sinks, DTensor) and not isinstance(q, DTensor):
            sinks = sinks.to_local()
        return x + self.out(self.core(q, k, v, sinks=sinks, cu_seqlens=documents).flatten(2))


class Model(nn.Module):
    """Layers with a limited window and one without limit; its output is the loss of this rank's rows."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(window, heads) for window in WINDOWS)

    def forward(self, x: torch.Tensor, documents: Documents) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, documents)
        return x.square().sum()


def gradients(model: Model) -> dict[str, torch.Tensor]:
    """All parameters' gradients, whole, and their norm as it is clipped."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
    grads = {name: cast(torch.Tensor, p.grad) for name, p in model.named_parameters()} | {"norm": norm}
    return {name: (g.full_tensor() if isinstance(g, DTensor) else g).detach() for name, g in grads.items()}


def inputs() -> torch.Tensor:
    return torch.randn(BATCH, SEQ_LEN, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def alone(heads: int) -> dict[str, torch.Tensor]:
    model = Model(heads)
    model(inputs(), Documents([*BOUNDARIES])).backward()
    return gradients(model)


def distances(model: Model, mesh: DeviceMesh, ranks: str, heads: int) -> dict[str, float]:
    """Shard over the axis ``ranks`` with FSDP2 and run; how far all gradients are from one process."""
    rows = slice(None)
    if "dp" in (mesh.mesh_dim_names or ()):
        rows = slice(mesh.get_local_rank("dp"), mesh.get_local_rank("dp") + 1)
    everyone = mesh["dp", "cp"]._flatten(ranks) if ranks == "dp_cp" else mesh[ranks]
    for layer in model.layers:
        fully_shard(layer, mesh=everyone)
    fully_shard(model, mesh=everyone)
    x = shard_sequence(mesh["cp"], inputs()[rows].to(next(model.parameters())))
    # FSDP2 takes the mean of the ranks' gradients.
    loss = model(x, Documents([*BOUNDARIES][rows], mesh["cp"])) * everyone.size()
    loss.backward()
    want, got = alone(heads), gradients(model)
    assert got.keys() == want.keys() and all(want[f"layers.{layer}.sinks"].abs().min() > 1e-3 for layer in (0, 1))
    return {name: apart(got[name].cpu(), each, relative=True) for name, each in want.items()}


def with_fsdp(
    shape: tuple[int, ...],
    axes: tuple[str, ...],
    heads: int,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
) -> dict[str, float]:
    mesh, model = mesh_of(shape, axes, device), Model(heads).to(device, dtype)
    apply_context_parallel(model, mesh["cp"], {"layers.*.core": ContextParallel()})
    return distances(model, mesh, "dp_cp" if "dp" in axes else "cp", heads)


@pytest.mark.parametrize(
    ("shape", "axes", "heads"),
    [
        ((2,), ("cp",), 4),
        ((4,), ("cp",), 6),  # 2, 2, 2 and 0 sinks on the ranks
        ((2, 2), ("dp", "cp"), 2),  # 1, 1, 0 and 0
    ],
)
def test_sinks_beside_fsdp(pools: Pools, shape: tuple[int, ...], axes: tuple[str, ...], heads: int) -> None:
    for found in pools(4 if shape != (2,) else 2).run(with_fsdp, shape, axes, heads):
        assert len(found) == 19 and max(found.values()) < 1e-11, found


def beside_tp(mesh: DeviceMesh, local: bool, sharded: bool) -> Model:
    """A model with a plan for both axes of the mesh, and its sinks as DTensors on ``tp``."""
    model = Model(4)
    plan: dict[str, ParallelStyle] = {
        "layers.*.[qkv]": ColwiseParallel(use_local_output=local),
        "layers.*.out": RowwiseParallel(),
        "layers.*.core": ContextParallel(),
    }
    apply_context_parallel(model, mesh, plan)
    for layer in model.layers:
        on = Shard(0) if sharded else Replicate()
        sinks = cast(Layer, layer).sinks.detach()
        layer.register_parameter("sinks", nn.Parameter(distribute_tensor(sinks, mesh["tp"], [on])))
    return model


def with_tp(local: bool, sharded: bool) -> dict[str, float]:
    mesh = mesh_of((2, 2), ("cp", "tp"))
    return distances(beside_tp(mesh, local, sharded), mesh, "cp", 4)


@pytest.mark.parametrize(
    ("local", "sharded"),
    [(True, True), (False, True), (False, False)],
    ids=["this rank's of local heads", "a DTensor as the heads", "a replicated DTensor"],
)
def test_sinks_beside_fsdp_and_tensor_parallelism(pools: Pools, local: bool, sharded: bool) -> None:
    for found in pools(4).run(with_tp, local, sharded):
        assert len(found) == 19 and max(found.values()) < 1e-11, found


def test_one_process_agrees_with_the_oracle() -> None:
    """What the ranks are measured by, measured itself."""
    model, oracle = Model(4), Model(4)
    x = inputs()
    model(x, Documents([*BOUNDARIES])).backward()
    for each, window in zip(oracle.layers, WINDOWS, strict=True):
        layer = cast(Layer, each)
        q, k, v = (project(x).unflatten(-1, (-1, HEAD_DIM)) for project in (layer.q, layer.k, layer.v))
        mixed, _ = dense_attention(q, k, v, (window.left, window.right), sinks_H=layer.sinks, cu_seqlens=BOUNDARIES)
        x = x + layer.out(mixed.flatten(2))
    x.square().sum().backward()
    want, got = gradients(oracle), gradients(model)
    assert max(float((got[name] - each).abs().max()) for name, each in want.items()) < 1e-11


def refused(sharded: bool, unwrapped: bool) -> str:
    mesh = mesh_of((2, 2), ("cp", "tp"))
    layer = cast(Layer, beside_tp(mesh, True, sharded).layers[0])
    q, k, v = torch.ones(3, BATCH, SEQ_LEN // 2, 2, HEAD_DIM, dtype=torch.float64)
    sinks = cast(DTensor, layer.sinks)
    try:
        layer.core(q, k, v, sinks=sinks.to_local() if unwrapped else sinks)
    except ValueError as problem:
        return str(problem)
    return "accepted"


@pytest.mark.parametrize(
    ("sharded", "unwrapped", "message"),
    [
        (True, False, "does not have; where q holds this rank's heads alone, pass theirs, [2]: sinks.to_local()"),
        (False, True, "sinks must have a logit for each of the [2] query heads, got 4"),
    ],
    ids=["a DTensor beside local heads", "all heads beside local ones"],
)  # fmt: skip
def test_sinks_that_lie_otherwise_than_the_heads(pools: Pools, sharded: bool, unwrapped: bool, message: str) -> None:
    for said in pools(4).run(refused, sharded, unwrapped):
        assert message in said
