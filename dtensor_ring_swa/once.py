"""A check that is passed once for all calls alike."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_R = TypeVar("_R")


def once(check: Callable[_P, _R]) -> Callable[_P, _R]:
    """Let arguments that have passed a check pass again without it, with the same result.

    Arguments that cannot be hashed are checked each time, and so are all while torch.compile traces.
    """
    passed: Callable[..., _R] = lru_cache(maxsize=1024, typed=True)(check)

    @wraps(check)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not torch.compiler.is_compiling():
            try:
                return passed(*args, **kwargs)
            except TypeError:
                pass
        return check(*args, **kwargs)

    return run
