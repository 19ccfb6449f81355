"""One attention case, as data, and how every rank runs and checks it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from dtensor_ring_swa import Window, ring_attention, shard_sequence
from dtensor_ring_swa.halo import WORTH_HIDING_BEHIND
from dtensor_ring_swa.kernels import KERNELS, Request
from dtensor_ring_swa.layout import runs
from dtensor_ring_swa.testing import dense_attention

HALF = {torch.bfloat16, torch.float16}
PLACEMENTS = {"dp": Shard(0), "cp": Shard(1), "tp": Shard(2), "rep": Replicate()}


@dataclass(frozen=True)
class Case:
    """Shapes, window and mesh; ``axes`` names what each mesh axis shards."""

    batch: int = 1
    seq_len: int = 8
    q_heads: int = 2
    kv_heads: int = 1
    head_dim: int = 4
    v_head_dim: int = 4
    window: tuple[int, int] = (3, 0)
    axes: tuple[str, ...] = ("cp",)
    mesh: tuple[int, ...] = (2,)
    scale: float | None = None
    softcap: float = 0.0
    shared_kv: bool = False
    plain: bool = False
    strided: bool = False
    dtype: torch.dtype = torch.float64
    kernel: str = "auto"
    device: str = "cpu"
    layout: str = "contiguous"
    load_balance: str = "auto"
    exchange: str = "auto"
    cu_seqlens: tuple[int, ...] | tuple[tuple[int, ...], ...] | None = None
    sink_tokens: int = 0
    sinks: str | None = None  # how learned sinks are given: "plain" or "dtensor"
    joint: bool = False  # whether all rows wait for the halo, as where they are too few to hide it
    seed: int = 0

    def inputs(self) -> tuple[torch.Tensor, ...]:
        """The whole q, k, v and dout, the same on every rank."""
        generator = torch.Generator().manual_seed(self.seed)
        widths = [(self.q_heads, self.head_dim), (self.kv_heads, self.head_dim), (self.kv_heads, self.v_head_dim),
                  (self.q_heads, self.v_head_dim)]  # fmt: skip
        return tuple(
            torch.randn(self.batch, self.seq_len, heads, dim, generator=generator, dtype=torch.float64).to(
                self.device, self.dtype
            )
            for heads, dim in widths
        )

    def learned_sinks(self) -> torch.Tensor | None:
        """The whole sinks, the same on every rank."""
        if self.sinks is None:
            return None
        generator = torch.Generator().manual_seed(self.seed + 1)
        return torch.randn(self.q_heads, generator=generator, dtype=torch.float64).to(self.device, self.dtype)

    def boundaries(self) -> torch.Tensor | None:
        """``cu_seqlens`` as a caller gives them."""
        return None if self.cu_seqlens is None else torch.tensor(self.cu_seqlens, dtype=torch.int32, device=self.device)

    def options(self) -> dict[str, Any]:
        """What ``ring_attention`` is called with, apart from tensors that are sharded."""
        return {
            "window": self.window, "scale": self.scale, "softcap": self.softcap, "kernel": self.kernel,
            "layout": self.layout, "load_balance": self.load_balance, "exchange": self.exchange,
            "sink_tokens": self.sink_tokens, "cu_seqlens": self.boundaries(), "return_lse": True,
        }  # fmt: skip


@lru_cache
def mesh_of(shape: tuple[int, ...], names: tuple[str, ...], device: str = "cpu") -> DeviceMesh:
    return init_device_mesh(device, shape, mesh_dim_names=names)


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, with heads and rows transposed in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def order(case: Case) -> list[int]:
    """Positions in the order in which the ranks hold them."""
    ranks = case.mesh[case.axes.index("cp")] if "cp" in case.axes else 1
    return [p for rank in range(ranks) for run in runs(case.layout, case.seq_len, ranks, rank) for p in run.positions]


def dealt(case: Case) -> list[torch.Tensor]:
    """The inputs in the order of the layout: a DTensor's global order."""
    return [x[:, order(case)] for x in case.inputs()]


def on_mesh(case: Case, mesh: DeviceMesh) -> list[torch.Tensor]:
    """(out, lse, dq, dk, dv) of a DTensor call, each whole, and their placements' leaves."""
    axes = [PLACEMENTS[axis] for axis in case.axes]
    kv_axes = [Replicate() if axis == "tp" and case.shared_kv else PLACEMENTS[axis] for axis in case.axes]
    q, k, v, dout = (
        distribute_tensor(x, mesh, placements, src_data_rank=None)
        for x, placements in zip(dealt(case), (axes, kv_axes, kv_axes, axes), strict=True)
    )
    if case.strided:
        q, k, v, dout = (
            DTensor.from_local(strided(x.to_local()), mesh, x.placements, shape=x.shape, stride=x.stride())
            for x in (q, k, v, dout)
        )
    leaves = [x.requires_grad_() for x in (q, k, v)]
    sinks = case.learned_sinks()
    if case.sinks == "dtensor" and sinks is not None:
        axes = [Shard(0) if axis == "tp" else Replicate() for axis in case.axes]
        sinks = distribute_tensor(sinks, mesh, axes, src_data_rank=None)
    leaves += [] if sinks is None else [sinks.requires_grad_()]
    out, lse = ring_attention(q, k, v, sinks=sinks, **case.options())
    assert isinstance(out, DTensor) and isinstance(lse, DTensor)
    assert out.placements == q.placements and out.shape == (*q.shape[:3], v.shape[3])
    assert out.to_local().shape[:3] == q.to_local().shape[:3]
    grads = torch.autograd.grad(out, leaves, dout)
    assert [g.shape for g in grads] == [x.shape for x in leaves]
    if sinks is not None and not isinstance(sinks, DTensor):
        grads = [*grads[:3], summed_over_shards(grads[3], case, mesh)]
    elif sinks is not None:
        assert isinstance(grads[3], DTensor) and grads[3].placements == sinks.placements
    return [x.full_tensor() if isinstance(x, DTensor) else x for x in (out.detach(), lse, *grads)]


def summed_over_shards(grad: torch.Tensor, case: Case, mesh: DeviceMesh) -> torch.Tensor:
    """The sum of the contributions of all ranks, as data parallelism makes it."""
    for axis, name in enumerate(case.axes):
        if name != "rep":
            dist.all_reduce(grad, group=mesh.get_group(axis))
    return grad


def on_shards(case: Case, mesh: DeviceMesh) -> list[torch.Tensor]:
    """(out, lse, dq, dk, dv) of this rank's shard from a plain call."""
    shards = shard_sequence(mesh, *case.inputs(), layout=case.layout)
    q, k, v, dout = (strided(x) if case.strided else x for x in shards)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    sinks = case.learned_sinks()
    leaves += [] if sinks is None else [sinks.requires_grad_()]
    q, k, v, *_ = leaves
    out, lse = ring_attention(q, k, v, sinks=sinks, mesh=mesh, **case.options())
    grads = list(torch.autograd.grad(out, leaves, dout))
    if sinks is not None:
        grads[3] = summed_over_shards(grads[3], case, mesh)
    return [out.detach(), lse, *grads]


def expected(case: Case) -> list[torch.Tensor]:
    """The same tensors from the dense oracle."""
    q, k, v, dout = (x.double() for x in case.inputs())
    leaves = [x.requires_grad_() for x in (q, k, v)]
    sinks = case.learned_sinks()
    if sinks is not None:
        leaves.append(sinks := sinks.double().requires_grad_())
    window = Window.of(case.window)
    out, lse = dense_attention(
        q, k, v, (window.left, window.right), case.scale, case.softcap, sinks, case.sink_tokens, case.cu_seqlens
    )
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout)]


def errors(case: Case) -> dict[str, float]:
    """Run the case on this rank; each tensor's distance from the oracle, absolute or, in half precision, relative."""
    mesh = mesh_of(case.mesh, case.axes, case.device)
    with mock.patch.dict(WORTH_HIDING_BEHIND, {case.device: math.inf if case.joint else 0}):
        got = (on_shards if case.plain else on_mesh)(case, mesh)
    want, dims = expected(case), (1, 2, 1, 1, 1)
    whole, want = want[5:], want[:5]
    if case.plain:
        want = [shard_sequence(mesh, x, dim=dim, layout=case.layout) for x, dim in zip(want, dims, strict=True)]
    elif case.layout != "contiguous":
        at = torch.tensor(order(case), dtype=torch.long, device=case.device)
        want = [x.index_select(dim, at) for x, dim in zip(want, dims, strict=True)]
    result = {}
    names = ("out", "lse", "dq", "dk", "dv", "dsinks")[: len(got)]
    for name, x, y in zip(names, got, [*want, *whole], strict=True):
        assert x.shape == y.shape, f"{name}: shape {tuple(x.shape)}, expected {tuple(y.shape)}"
        assert torch.isfinite(x).all(), f"{name} is not finite"
        result[name] = apart(x, y, relative=case.dtype in HALF)
    return result


def apart(x: torch.Tensor, y: torch.Tensor, relative: bool) -> float:
    """How far ``x`` is from ``y``, which is more exact: at most, or as a part of y's norm."""
    difference, norm = x.double() - y, float(y.double().norm())
    if not relative:
        return float(difference.abs().max()) if x.numel() else 0.0
    return float(difference.norm()) / (norm or 1.0)


def supported(case: Case) -> Case:
    """The case, or a test that is skipped."""
    if case.kernel != "auto":
        request = Request(torch.device(case.device), case.dtype, case.head_dim, case.v_head_dim, 1.0, case.softcap)
        if reason := KERNELS[case.kernel].supports(request):
            pytest.skip(f"{case.kernel}: {reason}")
    return case


def mesh_ranks(case: Case) -> int:
    return math.prod(case.mesh)


def gpu_ranks(least: int) -> int:
    """How many ranks to run on this machine's GPUs, which they share where there are fewer; 0 without a GPU."""
    gpus = min(torch.cuda.device_count(), 8)
    return max(gpus, least) if gpus else 0
