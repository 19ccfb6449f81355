"""``--check``: every method's numbers against the whole sequence in float64 on one device."""

from __future__ import annotations

import math

import torch

from dtensor_ring_swa.attention import ring_attention
from dtensor_ring_swa.bench.case import Inputs
from dtensor_ring_swa.bench.methods import Given

# Of |x - expected| / |expected|: a few roundings of the dtype.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}

Expected = dict[str, torch.Tensor]


def expected(inputs: Inputs) -> Expected:
    """This rank's out, dq, dk and dv, from the reference kernel. Every rank computes all of them."""
    case = inputs.case
    q, k, v, dout = (inputs.run_of(name, 0, case.seq_len).double() for name in Given._fields)
    leaves = tuple(x.requires_grad_() for x in (q, k, v))
    out = ring_attention(*leaves, window=case.shape.window, softcap=case.shape.softcap, kernel="reference")
    grads = torch.autograd.grad(out, leaves, dout)
    own = slice(case.plan.start, case.plan.stop)
    return {name: x.detach()[:, own] for name, x in zip(("out", "dq", "dk", "dv"), (out, *grads), strict=True)}


def errors(wanted: Expected, found: Expected) -> dict[str, float]:
    """The relative error of each tensor found; infinite for a wrong shape or NaN."""
    result = {}
    for name, x in found.items():
        want = wanted[name]
        if x.shape != want.shape:
            result[name] = math.inf
            continue
        scale = want.norm().item() or 1.0
        error = (x.double() - want).norm().item() / scale
        result[name] = error if math.isfinite(error) else math.inf
    return result
