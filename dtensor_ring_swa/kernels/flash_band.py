"""What the FlashAttention kernels share: any band, cut to what such a kernel takes.

FlashAttention aligns its window with the last query and the last key, and what it does with rows that
see no key differs by version. Cut to the rows that see a key and the keys that are seen, every band is
such a window, and the rest is known: zeros and ``-inf``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from dtensor_ring_swa.band import Band
from dtensor_ring_swa.kernels.request import Request

# Tokens visible to the left and right of the aligned query; None where a side hides nothing.
FlashWindow = tuple[int | None, int | None]


def forward_on_bands(run: Callable[..., None]) -> Callable[..., None]:
    """Make ``Kernel.forward`` of ``run(request, q, k, v, window, out, lse)``."""

    def forward(
        request: Request,
        q_BMHD: torch.Tensor,
        k_BNGD: torch.Tensor,
        v_BNGE: torch.Tensor,
        band: Band,
        out_BMHE: torch.Tensor,
        lse_BHM: torch.Tensor,
    ) -> None:
        """Write out and lse; see ``Kernel.forward``."""
        rows, keys, window = _cut(band, q_BMHD, k_BNGD)
        if len(range(q_BMHD.shape[1])[rows]) < q_BMHD.shape[1]:
            out_BMHE.zero_()
            lse_BHM.fill_(float("-inf"))
        q, k, v = q_BMHD[:, rows], k_BNGD[:, keys], v_BNGE[:, keys]
        if q.numel():
            run(request, q, k, v, window, out_BMHE[:, rows], lse_BHM[:, :, rows])

    return forward


def backward_on_bands(run: Callable[..., None]) -> Callable[..., None]:
    """Make ``Kernel.backward`` of ``run(request, dout, q, k, v, out, lse, window, dq, dk, dv)``."""

    def backward(
        request: Request,
        dout_BMHE: torch.Tensor,
        q_BMHD: torch.Tensor,
        k_BNGD: torch.Tensor,
        v_BNGE: torch.Tensor,
        out_BMHE: torch.Tensor,
        lse_BHM: torch.Tensor,
        band: Band,
        dq_BMHD: torch.Tensor,
        dk_BNGD: torch.Tensor,
        dv_BNGE: torch.Tensor,
    ) -> None:
        """Write dq and the shares of dk and dv; see ``Kernel.backward``."""
        rows, keys, window = _cut(band, q_BMHD, k_BNGD)
        for grad, kept in ((dq_BMHD, rows), (dk_BNGD, keys), (dv_BNGE, keys)):
            if grad[:, kept].shape != grad.shape:
                grad.zero_()
        q, k, v = q_BMHD[:, rows], k_BNGD[:, keys], v_BNGE[:, keys]
        if q.numel():
            run(
                request, dout_BMHE[:, rows], q, k, v, out_BMHE[:, rows], lse_BHM[:, :, rows], window,
                dq_BMHD[:, rows], dk_BNGD[:, keys], dv_BNGE[:, keys],
            )  # fmt: skip

    return backward


def padded(x: torch.Tensor, width: int) -> torch.Tensor:
    """The same rows ``width`` wide, the last dim contiguous. Zero columns change no score and no sum."""
    if x.shape[-1] != width:
        return F.pad(x, (0, width - x.shape[-1]))
    return x if x.stride(-1) == 1 else x.contiguous()


def multiple_of_8(width: int) -> int:
    """The head dim that the kernels compute with: their loads are 16 bytes wide."""
    return -(-width // 8) * 8


def _cut(band: Band, q_BMHD: torch.Tensor, k_BNGD: torch.Tensor) -> tuple[slice, slice, FlashWindow]:
    rows, keys, inner = band.trim(q_BMHD.shape[1], k_BNGD.shape[1])
    left, right = inner.flash_window(len(rows), len(keys))
    # A side as wide as the keys hides nothing. FlashAttention-2 turns such a window into an infinite
    # one by itself, and completes a lone open side to the number of keys.
    window = (left if left < len(keys) else None), (right if right < len(keys) else None)
    return slice(rows.start, rows.stop), slice(keys.start, keys.stop), window
