"""``--check``: every method's numbers against the whole sequence in float64 on one device."""

from __future__ import annotations

import math

import torch

from dtensor_ring_swa.attention import ring_attention
from dtensor_ring_swa.bench.case import Case
from dtensor_ring_swa.bench.inputs import Inputs
from dtensor_ring_swa.bench.methods import Given
from dtensor_ring_swa.layout import runs

# Of |x - expected| / |expected|: a few roundings of the dtype.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}

Expected = dict[str, torch.Tensor]


NAMES = ("out", "dq", "dk", "dv", "dsinks")


# Share of the other tensors' size below which a gradient is nothing but rounding of float64.
_CANCELLED = 1e-13


def expected(inputs: Inputs) -> Expected:
    """The whole sequence's out, dq, dk and dv, from the reference kernel. Every rank computes all of them."""
    case = inputs.case
    q, k, v, dout = (inputs.whole(name).double() for name in Given._fields)
    extras = case.extras.arguments(case.seq_len, case.shape.q_heads, q.device, case.request.dtype)
    if "sinks" in extras:
        extras["sinks"] = extras["sinks"].detach().double().requires_grad_()
    leaves = tuple(x.requires_grad_() for x in (q, k, v))
    out = ring_attention(
        *map(case.extras.pack, leaves), window=case.shape.window, softcap=case.shape.softcap, kernel="reference",
        **extras,
    )  # fmt: skip
    besides = tuple(extras[name] for name in ("sinks",) if name in extras)
    grads = torch.autograd.grad(out, (*leaves, *besides), case.extras.pack(dout))
    return dict(zip(NAMES, (case.extras.unpack(out.detach()), *grads), strict=False))


def rows_of(case: Case, whole: Expected, layout: str) -> Expected:
    """This rank's rows in a layout. The gradient of learned sinks has none."""
    environment = case.environment
    held = runs(layout, case.seq_len, environment.ranks, environment.rank)
    return {
        name: x if name == "dsinks" else torch.cat([x[:, run.start : run.stop : run.step] for run in held], dim=1)
        for name, x in whole.items()
    }


def errors(wanted: Expected, found: Expected) -> dict[str, float]:
    """The relative error of each tensor found; infinite for a wrong shape or NaN.

    Where a row sees one key, the gradients of q and k are zero: in float64 what remains of terms that cancel. There the
    error is relative to the largest of the tensors, as a mean over their elements.
    """
    result = {}
    typical = max((_mean_square(want) for want in wanted.values()), default=0.0) ** 0.5
    for name, x in found.items():
        want = wanted[name]
        if x.shape != want.shape:
            result[name] = math.inf
            continue
        scale = want.norm().item()
        if scale <= _CANCELLED * typical * want.numel() ** 0.5:
            scale = typical * want.numel() ** 0.5 or 1.0
        error = (x.double() - want).norm().item() / scale
        result[name] = error if math.isfinite(error) else math.inf
    return result


def _mean_square(x: torch.Tensor) -> float:
    return (x.norm() ** 2 / max(x.numel(), 1)).item()
