"""Whether a call inside ``ring_sdpa`` will be repeated in backward, where the context is not there.

A checkpoint that is inside of the context calls its function again in backward. torch's own SDPA would
answer that call: without the window, with other tensors saved than forward had, or not at all. Even a
backward inside of the context would not help, since ``Tensor.backward`` is an overridable function, in
which torch takes the context away.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C import _autograd

_WHAT_TO_DO = (
    "ring_sdpa is outside of a checkpoint, whose recomputation in backward would not see it; enter ring_sdpa in the "
    "checkpointed function, or pass context_fn=lambda: (ring_sdpa(), ring_sdpa()), with use_reentrant=False"
)


class RecomputeWatch:
    """What was seen since a context was entered."""

    def __init__(self) -> None:
        self._traced = False
        self._hooks: object = None
        self._python_turned_grad_off = False

    def enter(self) -> None:
        """Take what holds now for what holds outside of the context."""
        self._traced = torch.compiler.is_compiling()
        if self._traced:
            return
        self._hooks = _saved_tensors_hooks()
        self._python_turned_grad_off = not torch.is_grad_enabled()

    def see(self, func: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """Know who turned gradients off, from the functions that the context sees."""
        # What torch.no_grad() and its kind call; no public function lies behind them (seen on torch 2.13).
        if func is torch._C._set_grad_enabled:
            if args[0] or torch.is_grad_enabled():
                self._python_turned_grad_off = not args[0]
        elif torch.is_grad_enabled():
            self._python_turned_grad_off = False

    def refuse(self) -> None:
        """Raise if the call at hand will be repeated in backward.

        Raises:
            NotImplementedError: In a checkpoint that was entered after the context.
        """
        # A graph does not know whether a checkpoint lies between it and the context, unless it holds the context.
        if not self._traced:
            self._refuse_outside_of_graphs()

    @torch.compiler.disable(reason="under torch.compile enter ring_sdpa in the compiled function, not around it")
    def _refuse_outside_of_graphs(self) -> None:
        hooks = _saved_tensors_hooks()
        if hooks != self._hooks and _is_checkpoint(hooks):
            raise NotImplementedError(_WHAT_TO_DO)
        # In the forward of an autograd.Function, such as a reentrant checkpoint, C++ has turned gradients off.
        if not (torch.is_grad_enabled() or torch.is_inference_mode_enabled() or self._python_turned_grad_off):
            raise NotImplementedError(_WHAT_TO_DO)


def _saved_tensors_hooks() -> tuple[Any, ...] | None:
    """The innermost hooks that pack and unpack what autograd saves."""
    # No public function tells them (seen on torch 2.13).
    return _autograd._top_saved_tensors_default_hooks(True)


def _is_checkpoint(hooks: tuple[Any, ...] | None) -> bool:
    """Whether they are a checkpoint's; those that move what is saved elsewhere do no harm."""
    return hooks is not None and getattr(hooks[0], "__module__", None) == "torch.utils.checkpoint"
