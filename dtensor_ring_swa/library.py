"""Registering an op with its own gradient, in less of the host's time a call than ``torch.library.custom_op``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch._ops import OpOverload

# Not torch.library.custom_op: its wrappers and those of register_autograd take the host several times as long around a
# call (seen on torch 2.11 and 2.13: 57 us with gradients, 21 without, against 25 and 14).
_LIBRARY = torch.library.Library("dtensor_ring_swa", "FRAGMENT")
# torch.compile(mode="reduce-overhead") makes CUDA graphs, from here on of what is around the ops: in the memory that it
# gives to a graph it must not find the integers that kernels keep on the device for later calls.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe)


def define(name: str, run: Callable[..., tuple[torch.Tensor, ...]]) -> OpOverload:
    """Register ``run`` as an op of this name, on all devices."""
    _LIBRARY.define(f"{name}{torch.library.infer_schema(run, mutates_args=())}", tags=_TAGS)
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    return getattr(torch.ops.dtensor_ring_swa, name).default


def below_autograd(op: OpOverload, *args: Any) -> tuple[torch.Tensor, ...]:
    """Call the op, past its gradient."""
    # Private, and what torch.library's own autograd kernels do; seen on torch 2.11 and 2.13.
    with torch._C._AutoDispatchBelowAutograd():
        return op(*args)


def differentiate(op: OpOverload, function: type[torch.autograd.Function], tensors: int) -> None:
    """Let autograd call ``function`` for ``op`` where one of its first ``tensors`` arguments needs a gradient."""

    def run(*args: Any) -> tuple[torch.Tensor, ...]:
        if torch.is_grad_enabled():
            for x in args[:tensors]:
                if x is not None and x.requires_grad:
                    return function.apply(*args)
        return below_autograd(op, *args)

    _LIBRARY.impl(op, run, "Autograd")


def out_of_graphs(op: OpOverload) -> Callable[..., tuple[torch.Tensor, ...]]:
    """The op for calls that Dynamo does not trace.

    After a graph break it lets the call run that it cannot trace, and traces what that calls: what is to stay out of
    its graphs, such as unequal shards, would be in one after all.
    """
    # Without this module nothing is traced, and it takes a second to import.
    return _disabled(op) if "torch._dynamo" in sys.modules else op


@lru_cache
def _disabled(op: OpOverload) -> Any:
    return torch.compiler.disable(lambda *args: op(*args))
