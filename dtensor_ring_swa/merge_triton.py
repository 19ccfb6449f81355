"""``merge_`` in one pass over memory, in Triton."""

# Inside programs Triton's ranges are iterated and constants are plain numbers, which its types do not say.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Rows of one head, times width: 4,096 elements a program.
_ELEMENTS = 4096


@triton.jit(do_not_specialize=["M"])
def _merge(
    out, lse, part, part_lse, out_b, out_m, out_h, lse_b, lse_h, part_b, part_m, part_h, part_lse_b, part_lse_h, M, H,
    E: tl.constexpr, BLOCK: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    batch, exist = tl.cast(tl.program_id(1), tl.int64), pair < M * H
    row, head, e = tl.cast(pair // H, tl.int64), tl.cast(pair % H, tl.int64), tl.arange(0, BLOCK_E)
    mask = exist[:, None] & (e[None, :] < E)
    lse += batch * lse_b + head * lse_h + row
    old = tl.load(lse, mask=exist, other=0.0)
    new = tl.load(part_lse + batch * part_lse_b + head * part_lse_h + row, mask=exist, other=0.0)
    top = tl.maximum(old, new)
    base = tl.where(top == float("-inf"), 0.0, top)
    old, new = tl.exp(old - base), tl.exp(new - base)
    total = old + new
    divisor = tl.where(total == 0.0, 1.0, total)
    out += (batch * out_b + row * out_m + head * out_h)[:, None] + e[None, :]
    part += (batch * part_b + row * part_m + head * part_h)[:, None] + e[None, :]
    joint = tl.load(out, mask=mask, other=0.0).to(tl.float32) * (old / divisor)[:, None]
    joint += tl.load(part, mask=mask, other=0.0).to(tl.float32) * (new / divisor)[:, None]
    tl.store(out, joint.to(out.dtype.element_ty), mask=mask)
    tl.store(lse, tl.where(total == 0.0, float("-inf"), base + tl.log(divisor)), mask=exist)


def merge_(out: torch.Tensor, lse: torch.Tensor, part_BMHE: torch.Tensor, part_lse_BHM: torch.Tensor) -> None:
    """See ``merge.merge_``. The last dim of all four is contiguous, and lse is float32."""
    batch, rows, heads, width = out.shape
    if not out.numel():
        return
    block_e = triton.next_power_of_2(width)
    block = max(1, _ELEMENTS // block_e)
    with torch.cuda.device_of(out):
        _merge[triton.cdiv(rows * heads, block), batch](
            out, lse, part_BMHE, part_lse_BHM, *out.stride()[:3], *lse.stride()[:2], *part_BMHE.stride()[:3],
            *part_lse_BHM.stride()[:2], rows, heads, E=width, BLOCK=block, BLOCK_E=block_e,
        )  # fmt: skip
