"""The kernels, and the choice among them."""

from __future__ import annotations

from dtensor_ring_swa.kernels import aten, flash, reference, triton
from dtensor_ring_swa.kernels.request import Kernel, Request


def _by_name(*kernels: Kernel) -> dict[str, Kernel]:
    return {kernel.NAME: kernel for kernel in kernels}


# In the order of preference for kernel="auto".
KERNELS = _by_name(flash, aten, triton, reference)

__all__ = ["KERNELS", "Kernel", "Request", "able_kernels", "check_name", "choose"]


def check_name(name: str) -> None:
    """Raise ValueError unless ``name`` is a kernel's or ``"auto"``."""
    if not isinstance(name, str) or (name != "auto" and name not in KERNELS):
        raise ValueError(f"unknown kernel {name!r}; choose 'auto' or one of {sorted(KERNELS)}")


def choose(name: str, request: Request) -> Kernel:
    """The kernel of this name, or for ``"auto"`` the fastest that can serve the request.

    Raises:
        ValueError: If there is no kernel of this name.
        NotImplementedError: If the named kernel cannot serve the request; it says why.
    """
    able = able_kernels(name, request)
    if able:
        return able[0]
    reason = KERNELS[name].supports(request)
    others = [other for other, kernel in KERNELS.items() if kernel.supports(request) is None]
    raise NotImplementedError(f"kernel {name!r} cannot do this: {reason}; these can: {others}, or 'auto'")


def able_kernels(name: str, request: Request) -> list[Kernel]:
    """The kernels that ``name`` allows and that can serve the request, the fastest first; all may for ``"auto"``.

    Raises:
        ValueError: If there is no kernel of this name.
    """
    check_name(name)
    allowed = _by_speed(request) if name == "auto" else [KERNELS[name]]
    return [kernel for kernel in allowed if kernel.supports(request) is None]


def _by_speed(request: Request) -> list[Kernel]:
    """The kernels, the fastest first.

    Measured on H200 at 32768 tokens, forward and backward in ms. 64/8 heads of 64 and a window of 127: triton
    0.48 / 1.14, flash 0.49 / 1.79, aten 1.04 / 2.66. 32/8 heads of 128 and 4095: flash 3.1 / 9.1, triton 4.7 / 14.7.
    """
    if request.device.type != "cuda":
        # Triton's interpreter, which serves other devices, is for tests.
        return [kernel for kernel in KERNELS.values() if kernel.NAME != "triton"]
    near = request.neighbours is not None and request.neighbours <= 128
    narrow = near and max(request.head_dim, request.v_head_dim) <= 64
    return sorted(KERNELS.values(), key=lambda kernel: not (narrow and kernel.NAME == "triton"))
