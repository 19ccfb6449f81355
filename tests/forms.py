"""The ways to call attention on a mesh, each as a function of the same arguments, and its distance from the oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

from dtensor_ring_swa import ContextParallel, RingAttention, ring_attention, shard_sequence

from cases import HALF, PLACEMENTS, Case, apart, expected, mesh_of

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

FORMS = ("dtensor", "plan", "plain")


class Around(nn.Module):
    """Attention as a submodule, for a plan to name."""

    def __init__(self, window: tuple[int, int]) -> None:
        super().__init__()
        self.core = RingAttention(window)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self.core(q, k, v)


def case_of(
    seq_len: int, window: tuple[int, int] = (3, 0), dtype: torch.dtype = torch.float64, device: str = "cpu"
) -> Case:
    """Two batches, 4 query heads on 2 key/value heads, the sequence on all ranks."""
    ranks = dist.get_world_size()
    return Case(
        batch=2, seq_len=seq_len, q_heads=4, kv_heads=2, window=window, mesh=(ranks,), dtype=dtype, device=device
    )  # fmt: skip


def cp_mesh(case: Case) -> DeviceMesh:
    return mesh_of(case.mesh, case.axes, case.device)["cp"]


def attend(form: str, case: Case, seq_len: int | None = None) -> Attend:
    """Attention in this form; ``seq_len`` is what the caller says of plain shards."""
    if form == "plan":
        style = ContextParallel(seq_len=seq_len)
        return parallelize_module(Around(case.window), cp_mesh(case), {"core": style})
    mesh = cp_mesh(case) if form == "plain" else None
    return lambda q, k, v: ring_attention(q, k, v, window=case.window, mesh=mesh, seq_len=seq_len)


def inputs(form: str, case: Case) -> list[torch.Tensor]:
    """q, k, v and dout as this form takes them: DTensors, or this rank's shards."""
    if form != "dtensor":
        return [x.clone() for x in shard_sequence(cp_mesh(case), *case.inputs())]
    mesh = mesh_of(case.mesh, case.axes, case.device)
    axes = [PLACEMENTS[axis] for axis in case.axes]
    kv_axes = [Replicate() if axis == "tp" and case.shared_kv else PLACEMENTS[axis] for axis in case.axes]
    return [
        distribute_tensor(x, mesh, placements, src_data_rank=None)
        for x, placements in zip(case.inputs(), (axes, kv_axes, kv_axes, axes), strict=True)
    ]


def distance(form: str, case: Case, function: Attend, mark: bool = False, grad: bool = True) -> float:
    """How far out and, with ``grad``, dq, dk and dv are from the oracle; ``mark`` makes the length dynamic."""
    *given, dout = inputs(form, case)
    q, k, v = given = [x.requires_grad_(grad) for x in given]
    for x in given if mark else []:
        torch._dynamo.mark_dynamic(x, 1)
    out = function(q, k, v)
    return from_oracle(case, [out.detach(), *(torch.autograd.grad(out, given, dout) if grad else ())])


def from_oracle(case: Case, got: list[torch.Tensor]) -> float:
    """The largest distance of out and, where given, dq, dk and dv, DTensors or shards, from the oracle."""
    out, _, *grads = expected(case)
    return from_whole(case, got, [out, *grads][: len(got)], relative=case.dtype in HALF)


def from_whole(case: Case, got: list[torch.Tensor], want: list[torch.Tensor], relative: bool) -> float:
    """The largest distance of DTensors or shards from what one process has; see ``apart``."""
    worst = 0.0
    for x, y in zip(got, want, strict=True):
        whole = isinstance(x, DTensor)
        mine = y if whole else shard_sequence(cp_mesh(case), y)
        x = cast(DTensor, x).full_tensor() if whole else x
        assert x.shape == mine.shape
        worst = max(worst, apart(x, mine, relative))
    return worst
