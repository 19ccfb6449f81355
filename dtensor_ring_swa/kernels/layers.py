"""A kernel of one layer at a time, made to serve any call: the layers' partial results are joined by log-sum-exp."""

from __future__ import annotations

from collections.abc import Callable

import torch

from dtensor_ring_swa.block import Call
from dtensor_ring_swa.kernels.request import Request
from dtensor_ring_swa.merge import add_sinks_gradient_, join_sinks_, merge_

PartialDtype = Callable[[torch.dtype], torch.dtype]


def forward_by_layer(forward: Callable[..., None], partial_dtype: PartialDtype) -> Callable[..., None]:
    """Make ``Kernel.forward`` of the forward of a layer.

    ``partial_dtype`` says in which dtype it can write results that are going to be joined. Two layers
    are joined in place where nothing is gained from more bits, three or more in lse's dtype.
    """

    def whole(
        request: Request,
        q_BMHD: torch.Tensor,
        k_BNGD: torch.Tensor,
        v_BNGE: torch.Tensor,
        call: Call,
        out_BMHE: torch.Tensor,
        lse_BHM: torch.Tensor,
        sinks_H: torch.Tensor | None = None,
    ) -> None:
        """Write out and lse; see ``Kernel.forward``."""
        if len(call.layers) == 1:
            forward(request, q_BMHD, k_BNGD, v_BNGE, call, out_BMHE, lse_BHM, sinks_H)
            return
        dtype, layers, total = partial_dtype(out_BMHE.dtype), list(call.layers), out_BMHE
        if _in_place(call) and dtype == out_BMHE.dtype:
            first = layers.pop(0)
            forward(request, q_BMHD, k_BNGD[:, first.keys], v_BNGE[:, first.keys], first, out_BMHE, lse_BHM)
        else:
            total = torch.zeros_like(out_BMHE, dtype=lse_BHM.dtype)
            lse_BHM.fill_(float("-inf"))
        for layer in layers:
            rows, keys = layer.rows, layer.keys
            part = torch.empty_like(out_BMHE[:, rows], dtype=dtype)
            part_lse = torch.empty_like(lse_BHM[:, :, rows])
            forward(request, q_BMHD[:, rows], k_BNGD[:, keys], v_BNGE[:, keys], layer, part, part_lse)
            merge_(total[:, rows], lse_BHM[:, :, rows], part, part_lse)
        if sinks_H is not None:
            join_sinks_(total, lse_BHM, sinks_H)
        if total is not out_BMHE:
            out_BMHE.copy_(total)

    return whole


def backward_by_layer(backward: Callable[..., None], partial_dtype: PartialDtype) -> Callable[..., None]:
    """Make ``Kernel.backward`` of the backward of a layer.

    With the joint out and lse, each layer's gradients are its exact share of the whole.
    """

    def whole(
        request: Request,
        dout_BMHE: torch.Tensor,
        q_BMHD: torch.Tensor,
        k_BNGD: torch.Tensor,
        v_BNGE: torch.Tensor,
        out_BMHE: torch.Tensor,
        lse_BHM: torch.Tensor,
        call: Call,
        dq_BMHD: torch.Tensor,
        dk_BNGD: torch.Tensor,
        dv_BNGE: torch.Tensor,
        sinks_H: torch.Tensor | None = None,
        dsinks_H: torch.Tensor | None = None,
    ) -> None:
        """Write dq, dk and dv; see ``Kernel.backward``."""
        grads = totals = (dq_BMHD, dk_BNGD, dv_BNGE)
        sinks, layers = (sinks_H, dsinks_H), list(call.layers)
        if len(layers) == 1:
            backward(request, dout_BMHE, q_BMHD, k_BNGD, v_BNGE, out_BMHE, lse_BHM, call, *grads, *sinks)
            return
        dtype = partial_dtype(q_BMHD.dtype)
        if _in_place(call) and dtype == dq_BMHD.dtype:
            first = layers.pop(0)
            k, v, dk, dv = (x[:, first.keys] for x in (k_BNGD, v_BNGE, dk_BNGD, dv_BNGE))
            if first.k_len < call.k_len:
                dk_BNGD.zero_()
                dv_BNGE.zero_()
            backward(request, dout_BMHE, q_BMHD, k, v, out_BMHE, lse_BHM, first, dq_BMHD, dk, dv, *sinks)
        else:
            totals = tuple(torch.zeros_like(x, dtype=lse_BHM.dtype) for x in grads)
        for layer in layers:
            rows, keys = layer.rows, layer.keys
            spans = zip(grads, (rows, keys, keys), strict=True)
            parts = [torch.empty_like(x[:, span], dtype=dtype) for x, span in spans]
            backward(
                request, dout_BMHE[:, rows], q_BMHD[:, rows], k_BNGD[:, keys], v_BNGE[:, keys], out_BMHE[:, rows],
                lse_BHM[:, :, rows], layer, *parts,
            )  # fmt: skip
            for total, part, span in zip(totals, parts, (rows, keys, keys), strict=True):
                total[:, span] += part
        if totals is not grads:
            for grad, total in zip(grads, totals, strict=True):
                grad.copy_(total)
            add_sinks_gradient_(dsinks_H, sinks_H, dout_BMHE, out_BMHE, lse_BHM)

    return whole


def _in_place(call: Call) -> bool:
    """Whether the first layer can write all rows, so that the second is the only one to add."""
    return len(call.layers) == 2 and call.layers[0].q_len == call.q_len
