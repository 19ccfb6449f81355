"""Context parallelism beside tensor parallelism, and both beside FSDP2: one process is the measure."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

from dtensor_ring_swa import ContextParallel, RingAttention, apply_context_parallel, shard_sequence
from dtensor_ring_swa.testing import RankPool, dense_attention

import train
from cases import mesh_of

Pools = Callable[[int], RankPool]
WINDOW = (3, 0)
WIDTH, HEADS, KV_HEADS = 16, 4, 2


class Attention(nn.Module):
    """Grouped-query attention with a norm before it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        kv_width = WIDTH // HEADS * KV_HEADS
        self.norm = nn.RMSNorm(WIDTH, dtype=torch.float64)
        self.q, self.out = (nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(2))
        self.k, self.v = (nn.Linear(WIDTH, kv_width, dtype=torch.float64) for _ in range(2))
        self.core = RingAttention(WINDOW)
        self.inner = nn.Identity()  # where a plan can prepare the normed input

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(self.norm(x))
        q, k, v = (project(x).unflatten(-1, (-1, WIDTH // HEADS)) for project in (self.q, self.k, self.v))
        mixed = self.core(q, k, v)
        assert isinstance(mixed, DTensor) == isinstance(q, DTensor)
        return self.out(mixed.flatten(2))


PLANS: dict[str, Callable[[], dict[str, ParallelStyle]]] = {
    "local heads": lambda: {"[qkv]": ColwiseParallel(), "out": RowwiseParallel()},
    "DTensors of heads": lambda: {"[qkv]": ColwiseParallel(use_local_output=False), "out": RowwiseParallel()},
    "sequence parallel norm": lambda: {
        "norm": SequenceParallel(),
        "inner": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "[qkv]": ColwiseParallel(use_local_output=False),
        "out": RowwiseParallel(output_layouts=Shard(1)),
    },
}


def whole_gradient(parameter: nn.Parameter, cp: DeviceMesh) -> torch.Tensor:
    """A parameter's gradient, summed over the context-parallel ranks, which hold other tokens."""
    grad = cast(torch.Tensor, parameter.grad)
    grad = grad.full_tensor() if isinstance(grad, DTensor) else grad
    dist.all_reduce(grad := grad.clone(), group=cp.get_group())
    return grad


def distances(kind: str, axes: tuple[str, str], seq_len: int) -> dict[str, float]:
    """How far the outputs, the inputs' and the parameters' gradients are from one process."""
    mesh, model, alone = mesh_of((2, 2), axes), Attention(), Attention()
    x = torch.randn(
        2, seq_len, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True
    )
    (want := alone(x)).square().sum().backward()
    apply_context_parallel(model, mesh, {**PLANS[kind](), "core": ContextParallel()})
    mine = shard_sequence(mesh["cp"], x.detach())
    wanted = [shard_sequence(mesh["cp"], each) for each in (want.detach(), cast(torch.Tensor, x.grad))]
    if "sequence" in kind:  # the rest of the model works on a part of the rows on each tensor-parallel rank
        mine, *wanted = (each.chunk(2, 1)[mesh.get_local_rank("tp")] for each in (mine, *wanted))
    mine.requires_grad_()
    out = model(mine)
    out.square().sum().backward()
    pairs = {"out": (out, wanted[0]), "dx": (cast(torch.Tensor, mine.grad), wanted[1])}
    found = {name: float((x - y).abs().max()) for name, (x, y) in pairs.items()}
    for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
        found[name] = float((whole_gradient(p, mesh["cp"]) - cast(torch.Tensor, q.grad)).abs().max())
    return found


@pytest.mark.parametrize("axes", [("cp", "tp"), ("tp", "cp")])
@pytest.mark.parametrize(
    ("kind", "seq_len"),
    [("local heads", 8), ("local heads", 7), ("DTensors of heads", 8), ("DTensors of heads", 7),
     ("sequence parallel norm", 8)],
)  # fmt: skip
def test_beside_tensor_parallelism(pools: Pools, kind: str, seq_len: int, axes: tuple[str, str]) -> None:
    for found in pools(4).run(distances, kind, axes, seq_len):
        assert len(found) == 11 and max(found.values()) < 1e-12, found


def qkv(kv_heads: int, seq_len: int = 7) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, seq_len, n, 4, dtype=torch.float64, generator=generator) for n in (4, kv_heads, kv_heads)]


def on_heads(kv_heads: int, q_on: Placement, kv_on: Placement, plan_axes: tuple[str, ...]) -> dict[str, float]:
    """An attention core alone, passed DTensors on tp: distances of out, dq, dk and dv from the dense oracle."""
    mesh = mesh_of((2, 2), ("cp", "tp"))
    core = apply_context_parallel(nn.ModuleList([RingAttention(WINDOW)]), mesh[plan_axes], ["0"]).get_submodule("0")
    leaves = [x.requires_grad_() for x in qkv(kv_heads)]
    out, _ = dense_attention(leaves[0], leaves[1], leaves[2], WINDOW)
    want = [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]
    mine = [shard_sequence(mesh["cp"], x.detach()) for x in leaves]
    tp = [
        distribute_tensor(x, mesh["tp"], [on], src_data_rank=None).requires_grad_()
        for x, on in zip(mine, (q_on, kv_on, kv_on), strict=True)
    ]
    got = core(*tp)
    assert isinstance(got, DTensor) and got.device_mesh == mesh["tp"] and got.placements == (q_on,)
    grads = cast(list[DTensor], torch.autograd.grad(got.square().sum(), tp))
    assert [g.placements for g in grads] == [(on,) for on in (q_on, kv_on, kv_on)]
    wholes = [cast(DTensor, x.detach()).full_tensor() for x in (got, *grads)]
    rows = [shard_sequence(mesh["cp"], x) for x in want]
    return {n: float((x - y).abs().max()) for n, x, y in zip(("out", "dq", "dk", "dv"), wholes, rows, strict=True)}


@pytest.mark.parametrize(
    ("kv_heads", "q_on", "kv_on"),
    [(2, Shard(2), Shard(2)), (1, Shard(2), Replicate()), (2, Replicate(), Replicate()), (2, Shard(0), Shard(0))],
    ids=["heads", "fewer key heads than ranks", "replicated", "batch"],
)
def test_dtensors_on_another_axis(pools: Pools, kv_heads: int, q_on: Placement, kv_on: Placement) -> None:
    for found in pools(4).run(on_heads, kv_heads, q_on, kv_on, ("cp", "tp")):
        assert max(found.values()) < 1e-12, found


def refused(q_on: Placement, plan_axes: tuple[str, ...], mixed: bool) -> str:
    mesh = mesh_of((2, 2), ("cp", "tp"))
    core = apply_context_parallel(nn.ModuleList([RingAttention(WINDOW)]), mesh[plan_axes], ["0"]).get_submodule("0")
    x = torch.ones(1, 4, 2, 4)
    q = DTensor.from_local(x, mesh["tp"], [q_on])
    try:
        core(q, x if mixed else q, q)
    except ValueError as problem:
        return str(problem)
    return "accepted"


@pytest.mark.parametrize(
    ("q_on", "plan_axes", "mixed", "message"),
    [
        (Shard(2), ("cp",), False, "are DTensors on the axes ('tp',), the plan was applied on ('cp',); apply it on the "
         "mesh of all of them, mesh['cp', 'tp']"),
        (Shard(1), ("cp", "tp"), False, "may be sharded on another dim than 1, the sequence, or replicated"),
        (Partial(), ("cp", "tp"), False, "redistribute() it first"),
        (Shard(2), ("cp", "tp"), True, "the inputs lie differently: [\"('tp',)\", 'local', \"('tp',)\"]"),
    ],
    ids=["plan without the axis", "sequence on both", "partial", "mixed"],
)  # fmt: skip
def test_unsound_inputs_raise_on_every_rank(
    pools: Pools, q_on: Placement, plan_axes: tuple[str, ...], mixed: bool, message: str
) -> None:
    for said in pools(4).run(refused, q_on, plan_axes, mixed):
        assert said.startswith("0 (RingAttention) got 0: ") and message in said


# Training

SMALL = ("--seq-len=64", "--window=24", "--global-every=2", "--layers=2", "--dim=32", "--batch=2", "--dtype=float32")
TEXT = b"the quick brown fox jumps over the lazy dog. " * 40


def steps(*flags: str) -> list[tuple[float, float, float]]:
    """Step, loss and gradient norm of a run on all ranks of this pool."""
    args = train.arguments([*SMALL, *flags], dist.get_world_size())
    text = torch.frombuffer(bytearray(TEXT), dtype=torch.uint8)
    return [(m["step"], m["loss"], m["grad_norm"]) for m in train.train(args, text, torch.device("cpu"))]


def test_training_on_three_axes_and_going_on_alone(pools: Pools, tmp_path: Path) -> None:
    alone = pools(1).run(steps, "--steps=22")[0]
    pools(8).run(dist.get_rank, timeout=120)  # so that none waits while others still start
    together = pools(8).run(steps, "--dp=2", "--cp=2", "--tp=2", "--steps=20", f"--save={tmp_path}", timeout=120)
    assert together == [together[0]] * 8, "every rank reports the same"
    resumed = pools(1).run(steps, "--steps=2", f"--resume={tmp_path}")[0]
    assert alone[-1][1] < alone[0][1] - 1
    for (step, loss, norm), (step_alone, loss_alone, norm_alone) in zip([*together[0], *resumed], alone, strict=True):
        assert step == step_alone
        assert abs(loss - loss_alone) < 1e-5 and abs(norm - norm_alone) < 1e-5, step
