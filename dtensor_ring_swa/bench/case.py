"""One case: a shape on this rank, with the device and the ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import get_node_local_rank

from dtensor_ring_swa.band import Band
from dtensor_ring_swa.bench.extras import NO_EXTRAS, Extras
from dtensor_ring_swa.bench.shapes import Shape
from dtensor_ring_swa.kernels import Kernel, Request
from dtensor_ring_swa.plan import Plan
from dtensor_ring_swa.planning import make_plan


@dataclass(frozen=True)
class Environment:
    """The ranks, and this one's device."""

    device: torch.device
    mesh: DeviceMesh
    group: ProcessGroup
    rank: int
    ranks: int

    def maximum(self, values: Sequence[float]) -> list[float]:
        """The largest of each value over the ranks. Collective."""
        numbers = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=self.group)
        return numbers.tolist()

    def mean(self, values: Sequence[float]) -> list[float]:
        """The mean of each value over the ranks. Collective."""
        numbers = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(numbers, group=self.group)
        return (numbers / self.ranks).tolist()


def local_device(wanted: str) -> torch.device:
    """This process's device; needs no process group.

    Raises:
        ValueError: If it is not there.
    """
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no CUDA device here")
    index = get_node_local_rank(fallback_rank=0)
    if index >= torch.cuda.device_count():
        raise ValueError(f"local rank {index} has no GPU: there are {torch.cuda.device_count()}, one a rank is needed")
    return torch.device("cuda", index)


@contextmanager
def distributed(device: torch.device) -> Iterator[Environment]:
    """The process group of torchrun's ranks, or of this process alone."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if dist.is_torchelastic_launched():
        dist.init_process_group(backend, device_id=device if device.type == "cuda" else None)
    else:
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("cp",))
        yield Environment(device, mesh, mesh.get_group(), dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()
        if backend == "gloo":
            # Its threads may still be letting go of the last collectives' tensors, which takes Python's lock, and a
            # thread that waits for the lock when Python ends aborts the process. Seen on torch 2.11 and 2.13.
            time.sleep(0.2)


def is_first_here() -> bool:
    """Whether no other process on this host speaks for the command; needs no process group."""
    return get_node_local_rank(fallback_rank=0) == 0


def against_one_device(shape: Shape, extras: Extras) -> bool:
    """Whether the ideal is a share of one device's time for the whole sequence.

    A rank's own part is no ideal where the parts are unequal, or depend on the layout.
    """
    return shape.unlimited or extras.given


@dataclass(frozen=True)
class Case:
    """A shape on the ranks: ``rows`` tokens on each."""

    shape: Shape
    rows: int
    batch: int
    request: Request
    kernel: Kernel
    environment: Environment
    extras: Extras = NO_EXTRAS

    @property
    def seq_len(self) -> int:
        """Tokens of the whole sequence."""
        return self.rows * self.environment.ranks

    @cached_property
    def plan(self) -> Plan:
        """This rank's plan."""
        return make_plan(self.seq_len, self.environment.ranks, self.environment.rank, self.shape.window)

    @property
    def against_one_device(self) -> bool:
        """Whether the ideal is a share of one device's time for the whole sequence."""
        return against_one_device(self.shape, self.extras)

    @property
    def reach(self) -> tuple[int, int]:
        """The window, cut to the sequence."""
        return self.shape.window.reach(self.seq_len)

    @property
    def reached(self) -> slice:
        """The global positions that this rank's rows reach: left halo, shard, right halo."""
        return slice(self.plan.start - self.plan.left, self.plan.stop + self.plan.right)

    @property
    def band(self) -> Band:
        """Between this rank's rows and the keys that they reach."""
        plan, (left, right) = self.plan, self.reach
        return Band(plan.left - left, plan.left + right).clip(plan.rows, plan.left + plan.rows + plan.right)

    @property
    def flops(self) -> int:
        """Useful operations of this rank's forward, or of the mean rank's; backward does 2.5 times as many.

        The mean where the ideal is a share of one device's time.
        """
        shape = self.shape
        if self.against_one_device:
            pairs = self.extras.pairs(self.seq_len, shape.window)
            width = shape.head_dim + shape.v_head_dim
            return 2 * pairs * self.batch * shape.q_heads * width // self.environment.ranks
        return self.plan.flops(
            q_heads=shape.q_heads, head_dim=shape.head_dim, v_head_dim=shape.v_head_dim, batch=self.batch
        )

    @property
    def row_numel(self) -> int:
        """Elements of one row of K and V, over the batch."""
        return self.batch * self.shape.kv_heads * (self.shape.head_dim + self.shape.v_head_dim)

    @property
    def grad_dtype(self) -> torch.dtype:
        """In which the kernel writes partial dk and dv."""
        return self.kernel.partial_dtype(self.request.dtype)

    @property
    def wide_dtype(self) -> torch.dtype:
        """In which partial results are merged."""
        return torch.promote_types(self.request.dtype, torch.float32)
