"""Walk a halo plan: rows that need no neighbour are computed while the others' keys travel."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.distributed import ProcessGroup

from dtensor_ring_swa.beside import Beside
from dtensor_ring_swa.block import Call
from dtensor_ring_swa.cut import cut
from dtensor_ring_swa.exchange import fetch_halo, return_halo
from dtensor_ring_swa.kernels import Kernel, Request
from dtensor_ring_swa.keys import KeyGradients, KeyRows
from dtensor_ring_swa.plan import Plan

# Microseconds that an interior must take, by kind of device, to be a kernel call of its own: as long as a message is
# under way. A shorter one hides nothing, and the host needs longer than that to start it.
WORTH_HIDING_BEHIND = {"cuda": 20.0}
# What a GPU does in a microsecond at best: operations in half precision, and bytes moved (H200, rounded).
_OPERATIONS, _BYTES = 5e8, 3e6


class _Calls(NamedTuple):
    """The kernel calls of a plan: those that need not wait for what comes, and those that do.

    ``overlap`` says whether what waits should be queued ``Beside`` the others, or simply come first or last.
    """

    interior: tuple[Call, ...]
    boundary: tuple[Call, ...]
    overlap: bool

    @classmethod
    def of(cls, plan: Plan, q_BSHD: torch.Tensor, v_BSGE: torch.Tensor) -> _Calls:
        """All rows are one call that waits, if the interior is too small to hide what comes."""
        batch, _, heads, head_dim = q_BSHD.shape
        width = batch * heads * (head_dim + v_BSGE.shape[3])
        operations, moved = 2 * plan.interior_pairs * width, plan.interior_rows * width * q_BSHD.element_size()
        if max(operations / _OPERATIONS, moved / _BYTES) >= WORTH_HIDING_BEHIND.get(q_BSHD.device.type, 0):
            return cls(plan.interior_calls, plan.boundary_calls, True)
        # Documents would have to be joined one by one.
        if plan.boundary and not plan.packed:
            return cls((), plan.joint_calls, False)
        return cls(plan.interior_calls, plan.boundary_calls, False)


def halo_forward(
    plan: Plan,
    group: ProcessGroup | None,
    kernel: Kernel,
    request: Request,
    halo: torch.Tensor,
    q_BSHD: torch.Tensor,
    k_BSGD: torch.Tensor,
    v_BSGE: torch.Tensor,
    out_BSHE: torch.Tensor,
    lse_BHS: torch.Tensor,
    sinks_H: torch.Tensor | None,
) -> None:
    """Write out and lse, and into ``halo`` the neighbours' rows that backward will need again."""
    keys, calls = KeyRows(plan, k_BSGD, v_BSGE, halo), _Calls.of(plan, q_BSHD, v_BSGE)

    def compute(calls: tuple[Call, ...]) -> None:
        for call in calls:
            rows = call.rows
            k, v = keys.of(call)
            out, lse = cut(out_BSHE, rows), cut(lse_BHS, rows, 2)
            kernel.forward(request, cut(q_BSHD, rows), k, v, call, out, lse, sinks_H)

    received = keys.shape.numel(plan.received_rows)
    if received < halo.numel():
        # Rows that nobody sends, in a graph at the edges of the sequence, and where documents end: an output of the op
        # must not differ from run to run.
        cut(halo, slice(received, halo.numel()), 0).zero_()
    exchange = fetch_halo(plan, group, k_BSGD, v_BSGE, keys.messages)
    beside = Beside(q_BSHD.device, needed=exchange.is_pending and calls.overlap)
    if not calls.overlap:
        exchange.post()
    compute(calls.interior)
    with beside:
        exchange.wait()
        compute(calls.boundary)
    beside.join()


def halo_backward(
    plan: Plan,
    group: ProcessGroup | None,
    kernel: Kernel,
    request: Request,
    halo: torch.Tensor,
    dout_BSHE: torch.Tensor,
    q_BSHD: torch.Tensor,
    k_BSGD: torch.Tensor,
    v_BSGE: torch.Tensor,
    out_BSHE: torch.Tensor,
    lse_BHS: torch.Tensor,
    sinks_H: torch.Tensor | None,
    dsinks_H: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk and dv; the share of the learned sinks' gradient is added to ``dsinks_H``.

    Boundary rows come first, so that the halo's gradients travel home while the interior is computed.
    """
    dq = torch.empty_like(q_BSHD, memory_format=torch.contiguous_format)
    keys, calls = KeyRows(plan, k_BSGD, v_BSGE, halo), _Calls.of(plan, q_BSHD, v_BSGE)
    grads = KeyGradients(keys, kernel.partial_dtype(k_BSGD.dtype))

    # What runs at the same time must not add to the same numbers.
    boundary_dsinks_H = torch.zeros_like(dsinks_H) if dsinks_H is not None and calls.boundary else None

    def compute(calls: tuple[Call, ...], dsinks_H: torch.Tensor | None) -> None:
        for call in calls:
            rows, (k, v) = call.rows, keys.of(call)
            dout, q, out = (cut(x, rows) for x in (dout_BSHE, q_BSHD, out_BSHE))
            dk, dv = buffers = grads.buffers(call)
            kernel.backward(
                request, dout, q, k, v, out, cut(lse_BHS, rows, 2), call, cut(dq, rows), dk, dv, sinks_H, dsinks_H
            )
            grads.add(call, buffers)

    beside = Beside(q_BSHD.device, needed=group is not None and calls.overlap)
    with beside:
        compute(calls.boundary, boundary_dsinks_H)
        exchange = return_halo(plan, group, grads.messages(), grads.new_message)
    if not calls.overlap:
        exchange.post()
    compute(calls.interior, dsinks_H)
    returned = beside.finish(exchange.wait)
    if dsinks_H is not None and boundary_dsinks_H is not None:
        dsinks_H += boundary_dsinks_H
    dk, dv = grads.total(returned)
    return dq, dk, dv
