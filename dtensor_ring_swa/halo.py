"""Walk a halo plan: rows that need no neighbour are computed while the others' keys travel."""

from __future__ import annotations

import torch
from torch.distributed import ProcessGroup

from dtensor_ring_swa.block import Call
from dtensor_ring_swa.device import Beside
from dtensor_ring_swa.exchange import Rows, fetch_halo, return_halo
from dtensor_ring_swa.kernels import Kernel, Request
from dtensor_ring_swa.keys import KeyGradients, KeyRows
from dtensor_ring_swa.plan import Plan


def halo_forward(
    plan: Plan,
    group: ProcessGroup | None,
    kernel: Kernel,
    request: Request,
    q_BSHD: torch.Tensor,
    k_BSGD: torch.Tensor,
    v_BSGE: torch.Tensor,
    halo: torch.Tensor,
    out_BSHE: torch.Tensor,
    lse_BHS: torch.Tensor,
    sinks_H: torch.Tensor | None,
) -> None:
    """Write out and lse, and into ``halo`` the neighbours' rows that backward will need again."""
    keys = KeyRows(plan, k_BSGD, v_BSGE, halo)

    def compute(calls: tuple[Call, ...]) -> None:
        for call in calls:
            rows = call.rows
            k, v = keys.of(call)
            kernel.forward(request, q_BSHD[:, rows], k, v, call, out_BSHE[:, rows], lse_BHS[:, :, rows], sinks_H)

    received = Rows.of(k_BSGD, v_BSGE).numel(plan.received_rows)
    if received < halo.numel():
        # Rows that nobody sends, at the edges of the sequence: an output of the op must not differ from run to run.
        halo[received:].zero_()
    exchange = fetch_halo(plan, group, k_BSGD, v_BSGE, halo)
    beside = Beside(q_BSHD.device, needed=group is not None)
    compute(plan.interior_calls)
    with beside:
        exchange.wait()
        compute(plan.boundary_calls)
    beside.join()


def halo_backward(
    plan: Plan,
    group: ProcessGroup | None,
    kernel: Kernel,
    request: Request,
    dout_BSHE: torch.Tensor,
    q_BSHD: torch.Tensor,
    k_BSGD: torch.Tensor,
    v_BSGE: torch.Tensor,
    out_BSHE: torch.Tensor,
    lse_BHS: torch.Tensor,
    halo: torch.Tensor,
    sinks_H: torch.Tensor | None,
    dsinks_H: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk and dv; the share of the learned sinks' gradient is added to ``dsinks_H``.

    Boundary rows come first, so that the halo's gradients travel home while the interior is computed.
    """
    dq = torch.empty_like(q_BSHD, memory_format=torch.contiguous_format)
    keys = KeyRows(plan, k_BSGD, v_BSGE, halo)
    grads = KeyGradients(keys, kernel.grad_dtype(k_BSGD.dtype))

    # What runs at the same time must not add to the same numbers.
    boundary_dsinks_H = torch.zeros_like(dsinks_H) if dsinks_H is not None and plan.boundary_calls else None

    def compute(calls: tuple[Call, ...], dsinks_H: torch.Tensor | None) -> None:
        for call in calls:
            rows = call.rows
            dk, dv = buffers = grads.buffers(call)
            kernel.backward(
                request, dout_BSHE[:, rows], q_BSHD[:, rows], *keys.of(call), out_BSHE[:, rows],
                lse_BHS[:, :, rows], call, dq[:, rows], dk, dv, sinks_H, dsinks_H,
            )  # fmt: skip
            grads.add(call, buffers)

    beside = Beside(q_BSHD.device, needed=group is not None)
    with beside:
        compute(plan.boundary_calls, boundary_dsinks_H)
        exchange = return_halo(plan, group, grads.messages(), grads.new_message)
    compute(plan.interior_calls, dsinks_H)
    returned = beside.finish(exchange.wait)
    if dsinks_H is not None and boundary_dsinks_H is not None:
        dsinks_H += boundary_dsinks_H
    dk, dv = grads.total(plan.sends, returned)
    return dq, dk, dv
