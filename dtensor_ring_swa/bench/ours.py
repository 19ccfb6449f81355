"""``ring_attention`` itself: every way to call it that is worth a comparison."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from dtensor_ring_swa.attention import ring_attention
from dtensor_ring_swa.bench.case import Case
from dtensor_ring_swa.bench.extras import Extras
from dtensor_ring_swa.bench.inputs import Inputs
from dtensor_ring_swa.bench.methods import Differentiated, Given, Gradients
from dtensor_ring_swa.bench.shapes import Shape
from dtensor_ring_swa.bench.traffic import Sizes, Traffic
from dtensor_ring_swa.layout import runs


class Ring(Differentiated):
    """``ring_attention`` on plain shards. ``seq_len`` is given, as a training loop knows it."""

    name = "ring"
    takes_extras = True
    load_balance: ClassVar[str] = "auto"

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self._extras = self._arguments()
        self.leaves_besides = tuple(self._extras[name] for name in ("sinks",) if name in self._extras)

    def _arguments(self) -> dict[str, Any]:
        case = self.case
        return case.extras.arguments(case.seq_len, case.shape.q_heads, case.request.device, case.request.dtype)

    @property
    def _options(self) -> dict[str, Any]:
        shape = self.case.shape
        return {
            "window": shape.window, "softcap": shape.softcap, "kernel": self.case.kernel.NAME, "layout": self.layout,
            "load_balance": self.load_balance, **self._extras,
        }  # fmt: skip

    def prepare(self, inputs: Inputs) -> Given:
        """This rank's rows in the layout."""
        given = (inputs.own(name, self.layout) for name in Given._fields)
        return self.leaves(Given(*map(self.case.extras.pack, given)))

    def call(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """See ``Differentiated``."""
        case = self.case
        return ring_attention(q, k, v, mesh=case.environment.mesh, seq_len=case.seq_len, **self._options)

    def output(self, state: torch.Tensor) -> torch.Tensor:
        """The output."""
        return self.case.extras.unpack(state.detach())

    def gradients(self, grads: Gradients) -> Gradients:
        """The shards' gradients; those of learned sinks are summed over the ranks."""
        for total in grads[3:]:
            dist.all_reduce(total, group=self.case.environment.group)
        return (*map(self.case.extras.unpack, grads[:3]), *grads[3:])

    @property
    def _traffic(self) -> Traffic:
        case = self.case
        environment = case.environment
        return Traffic(
            case.shape, case.batch, self.layout, self.load_balance, case.seq_len, environment.ranks, environment.rank,
            case.extras.boundaries(case.seq_len), case.extras.sink_tokens,
        )  # fmt: skip

    @property
    def compute_layout(self) -> str:
        """Where contiguous shards are dealt to another layout, that one."""
        return self._traffic.compute_layout

    def predicted_bytes(self) -> tuple[int, int]:
        """The halo's rows or the ring's shards, their gradients, and what is dealt to another layout and back."""
        case = self.case
        dtypes = (case.request.dtype, case.grad_dtype, case.wide_dtype)
        return self._traffic.received(Sizes(*(dtype.itemsize for dtype in dtypes)))


class RingDTensor(Ring):
    """``ring_attention`` on DTensors sharded on the sequence."""

    name = "ring-dtensor"

    def _arguments(self) -> dict[str, Any]:
        found = super()._arguments()
        if "sinks" in found:
            whole = DTensor.from_local(found["sinks"].detach(), self.case.environment.mesh, [Replicate()])
            found["sinks"] = whole.requires_grad_()
        return found

    def prepare(self, inputs: Inputs) -> Given:
        """Wrap the shards."""
        mesh, extras = self.case.environment.mesh, self.case.extras
        dim = 0 if extras.lengths else 1
        plain = (extras.pack(inputs.own(name)) for name in Given._fields)
        return self.leaves(Given(*(DTensor.from_local(x, mesh, [Shard(dim)], run_check=False) for x in plain)))

    def call(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """See ``Differentiated``."""
        return ring_attention(q, k, v, **self._options)

    def output(self, state: torch.Tensor) -> torch.Tensor:
        """The local shard."""
        return self.case.extras.unpack(_local(state.detach()))

    def gradients(self, grads: Gradients) -> Gradients:
        """The local shards; those of learned sinks are whole."""
        whole = (x.full_tensor() if isinstance(x, DTensor) else x for x in grads[3:])
        return (*(self.case.extras.unpack(_local(x)) for x in grads[:3]), *whole)


class RingUnbalanced(Ring):
    """Contiguous shards as they are: with a window unlimited on one side, an end rank has most of the work."""

    name = "ring-unbalanced"
    load_balance = "none"

    @classmethod
    def suits(cls, shape: Shape, extras: Extras) -> bool:
        """Where there is something to balance."""
        return shape.lopsided


class RingZigzag(Ring):
    """The sequence already lies in the zigzag layout, so that nothing is dealt in the call."""

    name = "ring-zigzag"
    layout = "zigzag"

    @classmethod
    def suits(cls, shape: Shape, extras: Extras) -> bool:
        """For windows without limit: limited ones have no use for scattered neighbours."""
        return shape.unlimited

    @classmethod
    def gap(cls, case: Case) -> str | None:
        """Whether the length divides."""
        try:
            runs(cls.layout, case.seq_len, case.environment.ranks, 0)
        except ValueError as problem:
            return str(problem)
        return None


class RingStriped(RingZigzag):
    """The sequence already lies in stripes."""

    name = "ring-striped"
    layout = "striped"


def _local(x: torch.Tensor) -> torch.Tensor:
    return x.to_local() if isinstance(x, DTensor) else x
