"""Walk a ring: the next shard of keys travels while this one is attended to."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.distributed import ProcessGroup

from dtensor_ring_swa.exchange import Exchange, Rows, pack
from dtensor_ring_swa.kernels import Kernel, Request
from dtensor_ring_swa.merge import merge_
from dtensor_ring_swa.plan import Transfer
from dtensor_ring_swa.ring import Ring, Step


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
) -> None:
    """Write out and lse; partial results are merged in float32."""
    partial = kernel.grad_dtype(out_BSHE.dtype)
    total = torch.zeros_like(out_BSHE, dtype=lse_BHS.dtype)
    lse_BHS.fill_(float("-inf"))
    for step, k, v in _passing_keys(ring, group, k_BSGD, v_BSGE):
        for block in step.blocks:
            rows, keys = slice(block.q_start, block.q_stop), slice(block.k_start, block.k_stop)
            part, part_lse = torch.empty_like(out_BSHE[:, rows], dtype=partial), torch.empty_like(lse_BHS[:, :, rows])
            kernel.forward(request, q_BSHD[:, rows], k[:, keys], v[:, keys], block.band, part, part_lse)
            if step is ring.steps[0] and block.q_stop - block.q_start == ring.rows:
                total.copy_(part)
                lse_BHS.copy_(part_lse)
            else:
                merge_(total[:, rows], lse_BHS[:, :, rows], part, part_lse)
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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk and dv: sums over the steps in float32, rounded once.

    With the joint out and lse, each block's gradients are its exact share. The share of a shard's dk
    and dv goes home to its owner while the next step is computed.
    """
    wide, partial = lse_BHS.dtype, kernel.grad_dtype(k_BSGD.dtype)
    dq, dk, dv = (torch.zeros_like(x, dtype=wide) for x in (q_BSHD, k_BSGD, v_BSGE))
    shape = Rows.of(k_BSGD, v_BSGE)
    homecoming: Exchange | None = None

    def take_home() -> None:
        for message in homecoming.wait() if homecoming is not None else ():
            for total, share in zip((dk, dv), shape.unpack(message, ring.rows), strict=True):
                total += share

    for step, k, v in _passing_keys(ring, group, k_BSGD, v_BSGE):
        own = step.source == ring.rank
        shares = (dk, dv) if own else tuple(torch.zeros_like(x, dtype=wide) for x in (k, v))
        for block in step.blocks:
            rows, keys = slice(block.q_start, block.q_stop), slice(block.k_start, block.k_stop)
            part_q = torch.empty_like(q_BSHD[:, rows])
            parts = [torch.empty_like(x[:, keys], dtype=partial) for x in (k, v)]
            kernel.backward(
                request, dout_BSHE[:, rows], q_BSHD[:, rows], k[:, keys], v[:, keys], out_BSHE[:, rows],
                lse_BHS[:, :, rows], block.band, part_q, *parts,
            )  # fmt: skip
            dq[:, rows] += part_q
            for share, part in zip(shares, parts, strict=True):
                share[:, keys] += part
        take_home()
        homecoming = None
        if step is not ring.steps[0]:
            homecoming = Exchange(
                group,
                [] if step.source is None else [Transfer(step.source, 0, step.source_rows)],
                [] if step.source is None else [pack(*shares)],
                [] if step.target is None else [Transfer(step.target, 0, ring.rows)],
                [] if step.target is None else [dk.new_empty(shape.numel(ring.rows))],
            )
    take_home()
    return dq.to(q_BSHD.dtype), dk.to(k_BSGD.dtype), dv.to(v_BSGE.dtype)


def _passing_keys(
    ring: Ring, group: ProcessGroup | None, k_BSGD: torch.Tensor, v_BSGE: torch.Tensor
) -> Iterator[tuple[Step, torch.Tensor, torch.Tensor]]:
    """Each step with its keys and values; the shard of the next is under way meanwhile."""
    shape = Rows.of(k_BSGD, v_BSGE)
    mine = pack(k_BSGD, v_BSGE) if any(step.target is not None for step in ring.steps[1:]) else None
    k, v = k_BSGD, v_BSGE
    for step, following in zip(ring.steps, (*ring.steps[1:], None), strict=True):
        coming = None
        if following is not None:
            coming = Exchange(
                group,
                [] if following.target is None else [Transfer(following.target, 0, ring.rows)],
                [] if following.target is None or mine is None else [mine],
                [] if following.source is None else [Transfer(following.source, 0, following.source_rows)],
                [] if following.source is None else [k_BSGD.new_empty(shape.numel(following.source_rows))],
            )
        yield step, k, v
        if coming is not None and following is not None:
            received = coming.wait()
            k, v = shape.unpack(received[0], following.source_rows) if received else (k[:, :0], v[:, :0])
