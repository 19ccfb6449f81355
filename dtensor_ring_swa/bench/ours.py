"""``ring_attention`` itself, and the ideal without ranks that it is measured against."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from dtensor_ring_swa.attention import ring_attention
from dtensor_ring_swa.bench.case import Inputs
from dtensor_ring_swa.bench.methods import Differentiated, Given, Gradients, Method, attend, attend_backward


class Ring(Differentiated):
    """``ring_attention`` on plain shards. ``seq_len`` is given, as a training loop knows it."""

    name = "ring"

    def call(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """See ``Differentiated``."""
        case = self.case
        return ring_attention(
            q, k, v, window=case.shape.window, softcap=case.shape.softcap, kernel=case.kernel.NAME,
            mesh=case.environment.mesh, seq_len=case.seq_len,
        )  # fmt: skip

    def predicted_bytes(self) -> tuple[int, int]:
        """The halo's rows; backward receives the neighbours' gradients of the rows sent to them."""
        plan, row = self.case.plan, self.case.row_numel
        received = (plan.left + plan.right) * row * self.case.request.dtype.itemsize
        return received, sum(len(t) for t in plan.sends) * row * self.case.grad_dtype.itemsize


class RingDTensor(Ring):
    """``ring_attention`` on DTensors sharded on the sequence."""

    name = "ring-dtensor"

    def prepare(self, inputs: Inputs) -> Given:
        """Wrap the shards."""
        mesh = self.case.environment.mesh
        plain = Given(*(inputs.own(name) for name in Given._fields))
        return self.leaves(Given(*(DTensor.from_local(x, mesh, [Shard(1)], run_check=False) for x in plain)))

    def call(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """See ``Differentiated``."""
        shape = self.case.shape
        return ring_attention(q, k, v, window=shape.window, softcap=shape.softcap, kernel=self.case.kernel.NAME)

    def output(self, state: torch.Tensor) -> torch.Tensor:
        """The local shard."""
        return _local(state.detach())

    def gradients(self, grads: Gradients) -> Gradients:
        """The local shards."""
        dq, dk, dv = map(_local, grads)
        return dq, dk, dv


class Ideal(Method):
    """The same kernel on the same (query, key) pairs with no communication: what cannot be beaten.

    The halo lies before and after the shard in one buffer from the start, so that one kernel call
    does this rank's whole work: all rows of q against [left halo | shard | right halo]. Backward
    writes dk and dv of the whole buffer and leaves the halo's part where it is.
    """

    name = "ideal"

    def prepare(self, inputs: Inputs) -> Given:
        """Put the halo around the shard."""
        reached = self.case.reached
        k, v = (inputs.run_of(name, reached.start, reached.stop) for name in ("k", "v"))
        return Given(inputs.own("q"), k, v, inputs.own("dout"))

    def forward(self, given: Given) -> tuple[torch.Tensor, torch.Tensor]:
        """One kernel call."""
        return attend(self.case, given.q, given.k, given.v, self.case.band)

    def backward(self, given: Given, state: tuple[torch.Tensor, torch.Tensor]) -> Gradients:
        """One kernel call."""
        return attend_backward(self.case, given, state, self.case.band)

    def output(self, state: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """The output."""
        return state[0]

    def gradients(self, grads: Gradients) -> Gradients:
        """Add the halos' parts to their owners' the plain way: one sum of whole-sequence buffers."""
        plan, case = self.case.plan, self.case
        sums = []
        for grad in grads[1:]:
            whole = grad.new_zeros(case.batch, case.seq_len, *grad.shape[2:], dtype=case.wide_dtype)
            whole[:, case.reached] = grad
            dist.all_reduce(whole, group=case.environment.group)
            sums.append(whole[:, plan.start : plan.stop])
        return grads[0], sums[0], sums[1]

    def predicted_bytes(self) -> tuple[int, int]:
        """Nothing."""
        return 0, 0


def _local(x: torch.Tensor) -> torch.Tensor:
    return x.to_local() if isinstance(x, DTensor) else x
