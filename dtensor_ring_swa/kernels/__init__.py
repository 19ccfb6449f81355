"""The kernels, and the choice among them."""

from __future__ import annotations

from typing import cast

from dtensor_ring_swa.kernels import aten, flash, reference, triton
from dtensor_ring_swa.kernels.request import Kernel, Request

# In the order of preference for kernel="auto".
KERNELS: dict[str, Kernel] = {k.NAME: k for k in (cast(Kernel, module) for module in (flash, aten, triton, reference))}

__all__ = ["KERNELS", "Kernel", "Request", "check_name", "choose"]


def check_name(name: str) -> None:
    """Raise ValueError unless ``name`` is a kernel's or ``"auto"``."""
    if name != "auto" and name not in KERNELS:
        raise ValueError(f"unknown kernel {name!r}; choose 'auto' or one of {sorted(KERNELS)}")


def choose(name: str, request: Request) -> Kernel:
    """The kernel of this name, or for ``"auto"`` the fastest that can serve the request.

    Raises:
        ValueError: If there is no kernel of this name.
        NotImplementedError: If the named kernel cannot serve the request; it says why.
    """
    check_name(name)
    if name == "auto":
        return next(kernel for kernel in KERNELS.values() if kernel.supports(request) is None)
    reason = KERNELS[name].supports(request)
    if reason is not None:
        able = [other for other, kernel in KERNELS.items() if kernel.supports(request) is None]
        raise NotImplementedError(f"kernel {name!r} cannot do this: {reason}; these can: {able}, or 'auto'")
    return KERNELS[name]
