"""Walk a ring: the next shard of keys travels while this one is attended to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch.distributed import ProcessGroup

from dtensor_ring_swa.beside import Beside
from dtensor_ring_swa.exchange import Exchange
from dtensor_ring_swa.kernels import Kernel, Request
from dtensor_ring_swa.merge import add_sinks_gradient_, join_sinks_, merge_
from dtensor_ring_swa.plan import Transfer
from dtensor_ring_swa.ring import Ring, Step
from dtensor_ring_swa.wire import RowShape, pack


def rotate_forward(
    ring: Ring,
    group: ProcessGroup | None,
    kernel: Kernel,
    request: Request,
    q_BSHD: torch.Tensor,
    k_BSGD: torch.Tensor,
    v_BSGE: torch.Tensor,
    out_BSHE: torch.Tensor,
    lse_BHS: torch.Tensor,
    sinks_H: torch.Tensor | None,
) -> None:
    """Write out and lse; partial results are merged in float32."""
    total = torch.empty_like(out_BSHE, dtype=lse_BHS.dtype)
    for step, k, v in _passing_keys(ring, group, k_BSGD, v_BSGE):
        if step.call is None:
            continue
        rows = step.call.rows
        part = torch.empty_like(out_BSHE[:, rows], dtype=kernel.partial_dtype(out_BSHE.dtype))
        part_lse = torch.empty_like(lse_BHS[:, :, rows])
        kernel.forward(request, q_BSHD[:, rows], k, v, step.call, part, part_lse)
        if step is ring.steps[0]:
            # Every row sees at least its own key, so that the first step writes them all.
            total.copy_(part)
            lse_BHS.copy_(part_lse)
        else:
            merge_(total[:, rows], lse_BHS[:, :, rows], part, part_lse)
    if sinks_H is not None:
        join_sinks_(total, lse_BHS, sinks_H)
    out_BSHE.copy_(total)


def rotate_backward(
    ring: Ring,
    group: ProcessGroup | None,
    kernel: Kernel,
    request: Request,
    dout_BSHE: torch.Tensor,
    q_BSHD: torch.Tensor,
    k_BSGD: torch.Tensor,
    v_BSGE: torch.Tensor,
    out_BSHE: torch.Tensor,
    lse_BHS: torch.Tensor,
    sinks_H: torch.Tensor | None,
    dsinks_H: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk and dv: sums over the steps in float32, rounded once.

    With the joint out and lse, each call's gradients are its exact share. The share of a shard's dk
    and dv goes home to its owner while the next step is computed.
    """
    wide, partial = lse_BHS.dtype, kernel.partial_dtype(k_BSGD.dtype)
    contiguous = torch.contiguous_format  # As the op says while torch.compile traces, whatever the inputs are.
    dq, dk, dv = (torch.zeros_like(x, dtype=wide, memory_format=contiguous) for x in (q_BSHD, k_BSGD, v_BSGE))
    shape = RowShape.of(k_BSGD, v_BSGE)
    way_home = _Homecoming(shape, dk, dv)
    for step, k, v in _passing_keys(ring, group, k_BSGD, v_BSGE):
        shares = [torch.empty_like(x, dtype=partial) for x in (k, v)]
        if step.call is not None:
            rows = step.call.rows
            part_q = torch.empty_like(q_BSHD[:, rows], dtype=partial)
            kernel.backward(
                request, dout_BSHE[:, rows], q_BSHD[:, rows], k, v, out_BSHE[:, rows], lse_BHS[:, :, rows], step.call,
                part_q, *shares,
            )  # fmt: skip
            dq[:, rows] += part_q
        way_home.arrive()
        if step.source is not None and step.source.peer == ring.rank:
            way_home.add(step.source, shares)
        else:
            way_home.leave(group, step, shares)
    way_home.arrive()
    add_sinks_gradient_(dsinks_H, sinks_H, dout_BSHE, out_BSHE, lse_BHS)
    return dq.to(q_BSHD.dtype), dk.to(k_BSGD.dtype), dv.to(v_BSGE.dtype)


class _Homecoming:
    """Sums this rank's dk and dv: its own share, and those that others computed, one step at a time.

    A share travels in the dtype in which the kernel wrote it, which loses nothing, and is added in
    float32 by the owner.
    """

    def __init__(self, shape: RowShape, dk: torch.Tensor, dv: torch.Tensor) -> None:
        self._shape, self._totals = shape, (dk, dv)
        self._under_way: tuple[Exchange, Beside, Transfer | None] | None = None

    def add(self, rows: Transfer, shares: Sequence[torch.Tensor]) -> None:
        for total, share in zip(self._totals, shares, strict=True):
            total[:, rows.start : rows.stop] += share

    def leave(self, group: ProcessGroup | None, step: Step, shares: Sequence[torch.Tensor]) -> None:
        """Send a step's shares to the source, and expect those of our rows from the target."""
        source, target = step.source, step.target
        sends = [] if source is None else [(source.peer, pack(*shares))]
        receives = [] if target is None else [(target.peer, shares[0].new_empty(self._shape.numel(len(target))))]
        exchange = Exchange(group, sends, receives)
        self._under_way = exchange, Beside(shares[0].device, needed=group is not None), target

    def arrive(self) -> None:
        """Take the shares that are under way."""
        if self._under_way is not None:
            exchange, beside, rows = self._under_way
            for message in beside.finish(exchange.wait):
                assert rows is not None
                self.add(rows, self._shape.unpack(message, len(rows)))
        self._under_way = None


def _passing_keys(
    ring: Ring, group: ProcessGroup | None, k_BSGD: torch.Tensor, v_BSGE: torch.Tensor
) -> Iterator[tuple[Step, torch.Tensor, torch.Tensor]]:
    """Each step with its keys and values; those of the next are under way meanwhile."""
    shape = RowShape.of(k_BSGD, v_BSGE)
    # Most steps send the same rows.
    packed: tuple[slice, torch.Tensor] | None = None
    own = ring.steps[0].source
    k, v = (x[:, own.rows] if own is not None else x[:, :0] for x in (k_BSGD, v_BSGE))
    for step, following in pairwise(ring.steps):
        source, target = following.source, following.target
        sends, receives = [], []
        if target is not None:
            if packed is None or packed[0] != target.rows:
                packed = target.rows, pack(k_BSGD[:, target.rows], v_BSGE[:, target.rows])
            sends = [(target.peer, packed[1])]
        if source is not None:
            receives = [(source.peer, k_BSGD.new_empty(shape.numel(len(source))))]
        exchange = Exchange(group, sends, receives)
        beside = Beside(k_BSGD.device, needed=group is not None)
        yield step, k, v
        received = beside.finish(exchange.wait)
        k, v = (k[:, :0], v[:, :0]) if source is None else shape.unpack(received[0], len(source))
    yield ring.steps[-1], k, v
