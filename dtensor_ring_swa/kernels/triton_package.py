"""The package triton: whether it can be used here, and the programs that it runs."""

from __future__ import annotations

import importlib
from functools import lru_cache
from types import ModuleType


@lru_cache(maxsize=1)
def programs() -> ModuleType:
    """The module ``triton_kernels``, if triton can be imported."""
    return importlib.import_module("dtensor_ring_swa.kernels.triton_kernels")


@lru_cache(maxsize=1)
def missing() -> str | None:
    """Why the programs cannot be imported."""
    try:
        programs()
    except ImportError as error:
        return f"it needs triton (pip install 'dtensor-ring-swa[triton]'): {error}"
    except Exception as error:  # of any kind: it may not suit the driver
        return f"triton was found, and cannot be imported here: {error!r}"
    return None


@lru_cache(maxsize=1)
def is_interpreted() -> bool:
    """Whether Triton runs the programs in Python, on any device: it chose when they were defined."""
    return not isinstance(programs().forward, importlib.import_module("triton.runtime").JITFunction)


@lru_cache(maxsize=1)
def cannot_build() -> str | None:
    """Why Triton cannot start programs here. It builds its launchers with a C compiler and Python's headers."""
    try:
        _ = importlib.import_module("triton.runtime").driver.active.utils
    except Exception as error:
        return f"triton cannot build its launchers here: {error!r}"
    return None
