"""What is timed: the interface of a method, and one call of the case's kernel."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple

import torch

from dtensor_ring_swa.band import Band
from dtensor_ring_swa.bench.case import Case
from dtensor_ring_swa.bench.extras import Extras
from dtensor_ring_swa.bench.inputs import Inputs
from dtensor_ring_swa.bench.shapes import Shape
from dtensor_ring_swa.block import Call

# dq, dk and dv, and after them the gradient of learned sinks where there are any.
Gradients = tuple[torch.Tensor, ...]


class Given(NamedTuple):
    """The tensors of one set as a method wants them, made outside the timed part."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor


class Method(ABC):
    """One way to compute this rank's rows of the same attention.

    Only ``forward`` and ``backward`` are timed. What ``forward`` returns is kept for ``backward``.
    """

    name: ClassVar[str]
    # Whether every byte it receives passes through what wire.py counts.
    counted: ClassVar[bool] = True
    # Whether it takes packed documents and sinks.
    takes_extras: ClassVar[bool] = False
    # In which layout its rows lie.
    layout: str = "contiguous"
    # Why there is no backward here, if so.
    backward_gap: str | None = None
    # What to know about how it ran, if anything.
    note: str = ""

    def __init__(self, case: Case) -> None:
        self.case = case

    @classmethod
    def suits(cls, shape: Shape, extras: Extras) -> bool:
        """Whether it is of interest for such a window; if not, it is not mentioned."""
        return True

    @classmethod
    def gap(cls, case: Case) -> str | None:
        """Why it cannot run, or None; the same on every rank, and nothing is sent."""
        return None

    @property
    def share(self) -> float | None:
        """Of the time that is measured, the part that is reported, where it is one device's for the whole sequence."""
        return None

    @property
    def compute_layout(self) -> str:
        """In which layout the rows are computed, which settles how even the work is."""
        return self.layout

    def prepare(self, inputs: Inputs) -> Given:
        """Make the tensors of one set."""
        return Given(*(inputs.own(name, self.layout) for name in Given._fields))

    @abstractmethod
    def forward(self, given: Given) -> Any:
        """Compute the output."""

    @abstractmethod
    def backward(self, given: Given, state: Any) -> Gradients:
        """Compute dq, dk and dv from what ``forward`` returned."""

    @abstractmethod
    def output(self, state: Any) -> torch.Tensor:
        """This rank's output ``[B, rows, Hq, Dv]`` in ``layout``, for ``--check``."""

    def gradients(self, grads: Gradients) -> Gradients:
        """This rank's dq, dk and dv, for ``--check``. Collective."""
        return grads

    @abstractmethod
    def predicted_bytes(self) -> tuple[int, int] | None:
        """Bytes that this rank has to receive, forward and backward; None if they are not predicted."""


class Differentiated(Method):
    """A method whose backward is autograd's, on a graph that is kept."""

    # Leaves besides q, k and v.
    leaves_besides: tuple[torch.Tensor, ...] = ()

    @abstractmethod
    def call(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """The differentiable call."""

    def leaves(self, given: Given) -> Given:
        """The same tensors, as leaves that want gradients."""
        q, k, v = (x.detach().requires_grad_() for x in given[:3])
        return Given(q, k, v, given.dout)

    def prepare(self, inputs: Inputs) -> Given:
        """Make the tensors of one set."""
        return self.leaves(super().prepare(inputs))

    def forward(self, given: Given) -> torch.Tensor:
        """Compute the output with its graph."""
        return self.call(given.q, given.k, given.v)

    def backward(self, given: Given, state: torch.Tensor) -> Gradients:
        """Run the graph, and keep it for the next time."""
        return torch.autograd.grad(state, (*given[:3], *self.leaves_besides), given.dout, retain_graph=True)

    def output(self, state: torch.Tensor) -> torch.Tensor:
        """The output, without its graph."""
        return state.detach()


def attend(
    case: Case, q_BMHD: torch.Tensor, k_BNGD: torch.Tensor, v_BNGE: torch.Tensor, band: Band
) -> tuple[torch.Tensor, torch.Tensor]:
    """One forward call of the case's kernel: out and lse."""
    batch, rows, heads, _ = q_BMHD.shape
    out = q_BMHD.new_empty(batch, rows, heads, v_BNGE.shape[3])
    lse = q_BMHD.new_empty(batch, heads, rows, dtype=case.wide_dtype)
    case.kernel.forward(case.request, q_BMHD, k_BNGD, v_BNGE, Call.single(rows, k_BNGD.shape[1], band), out, lse)
    return out, lse


def attend_backward(
    case: Case,
    given: Given,
    state: tuple[torch.Tensor, torch.Tensor],
    band: Band,
    into: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> Gradients:
    """One backward call of the case's kernel for the keys in ``given``; dk and dv go ``into`` two tensors."""
    q, k, v, dout = given
    out, lse = state
    dq = torch.empty_like(q)
    dk, dv = into or (x.new_empty(x.shape, dtype=case.grad_dtype) for x in (k, v))
    call = Call.single(q.shape[1], k.shape[1], band)
    case.kernel.backward(case.request, dout, q, k, v, out, lse, call, dq, dk, dv)
    return dq, dk, dv
