"""What the methods are measured against: the same kernel without ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from dtensor_ring_swa.attention import ring_attention
from dtensor_ring_swa.bench.case import Case, against_one_device
from dtensor_ring_swa.bench.extras import Extras
from dtensor_ring_swa.bench.inputs import Inputs
from dtensor_ring_swa.bench.methods import Differentiated, Given, Gradients, Method, attend, attend_backward
from dtensor_ring_swa.bench.shapes import Shape
from dtensor_ring_swa.layout import Run


class Ideal(Method):
    """The same kernel on the same (query, key) pairs with no communication: what cannot be beaten.

    For limited windows. The halo lies before and after the shard in one buffer from the start, so
    that one kernel call does this rank's whole work: all rows of q against [left halo | shard | right
    halo]. Backward writes dk and dv of the whole buffer and leaves the halo's part where it is.
    """

    name = "ideal"

    @classmethod
    def suits(cls, shape: Shape, extras: Extras) -> bool:
        """Where ranks do equal work in any case."""
        return not against_one_device(shape, extras)

    def prepare(self, inputs: Inputs) -> Given:
        """Put the halo around the shard."""
        reached = self.case.reached
        k, v = (inputs.run_of(name, Run(reached.start, reached.stop)) for name in ("k", "v"))
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


class OneDevice(Differentiated):
    """One device's time for the whole sequence, shared out evenly: T1 / P.

    For windows without limit, packed documents and sinks. Every rank computes the whole sequence on
    its own device at the same time, with the same kernel and no communication; the slowest counts, as
    for every method.
    """

    name = "ideal"
    takes_extras = True

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self._extras = case.extras.arguments(case.seq_len, case.shape.q_heads, case.request.device, case.request.dtype)
        self.leaves_besides = tuple(self._extras[name] for name in ("sinks",) if name in self._extras)

    @classmethod
    def suits(cls, shape: Shape, extras: Extras) -> bool:
        """Where a rank's own part is no ideal."""
        return against_one_device(shape, extras)

    @property
    def share(self) -> float:
        """One of P equal parts."""
        return 1 / self.case.environment.ranks

    def prepare(self, inputs: Inputs) -> Given:
        """The whole sequence."""
        return self.leaves(Given(*(self.case.extras.pack(inputs.whole(name)) for name in Given._fields)))

    def call(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """See ``Differentiated``; without a mesh this is one kernel call."""
        shape = self.case.shape
        return ring_attention(
            q, k, v, window=shape.window, softcap=shape.softcap, kernel=self.case.kernel.NAME, **self._extras
        )

    def output(self, state: torch.Tensor) -> torch.Tensor:
        """This rank's rows of the output."""
        return self._own(state.detach())

    def gradients(self, grads: Gradients) -> Gradients:
        """This rank's rows; the gradient of learned sinks is whole."""
        return (*map(self._own, grads[:3]), *grads[3:])

    def predicted_bytes(self) -> tuple[int, int]:
        """Nothing."""
        return 0, 0

    def _own(self, x: torch.Tensor) -> torch.Tensor:
        plan = self.case.plan
        return self.case.extras.unpack(x)[:, plan.start : plan.stop]
