"""The mask function of "ring": a window instead of a dense mask, and where the model lies."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn
from transformers.masking_utils import causal_mask_function

from dtensor_ring_swa.integrations.hf_tokens import Edges, Mesh, Tokens, ranks_of, settle, state_of
from dtensor_ring_swa.integrations.hf_window import MaskFunction, read_window
from dtensor_ring_swa.window import Window


@dataclass(frozen=True)
class Scope:
    """Where the model that is running lies: its mesh and, if they are known, its tokens."""

    mesh: Mesh
    tokens: Tokens | None = None


scope: ContextVar[Scope | None] = ContextVar("dtensor_ring_swa.integrations.hf", default=None)


@dataclass(eq=False)
class RingMask:
    """What "ring" has for an attention mask: it travels through the layers as a mask does.

    Activation checkpointing hands it to the layers again when it recomputes them, so mesh and documents
    are there in backward too, on whatever thread and outside of whatever context it runs.
    """

    window: Window
    mesh: Mesh
    tokens: Tokens | None
    error: Exception | None = None

    def settle(
        self,
        module: nn.Module,
        q_BHSD: torch.Tensor,
        position_ids: torch.Tensor | None,
        edges: Edges,
        error: Exception | None = None,
    ) -> Tokens:
        """The tokens of this forward; at the first layer the ranks compare what they know. Then it is collective.

        Raises:
            Exception: ``error``, what this layer found wrong; all ranks raise where they compare.
        """
        if self.tokens is None:
            if self.error is None and position_ids is None and ranks_of(self.mesh) > 1:
                self.error = NotImplementedError(
                    f"{type(module).__name__} does not hand position_ids to its attention, so that they cannot be "
                    "checked; use attach(model, mesh), which sets them, instead of context_parallel(mesh)"
                )
            batch, _, rows, _ = q_BHSD.shape
            state = state_of(module, q_BHSD)
            self.tokens = settle(self.mesh, batch, rows, position_ids, edges, self.error or error, state=state)
        if error is not None:
            raise error
        return self.tokens


def refuse_together(error: Exception, q_BHSD: torch.Tensor) -> NoReturn:
    """Raise what a layer without a ``RingMask`` found wrong, also on ranks whose layer has one and waits to compare."""
    here = scope.get()
    if here is not None and here.tokens is None:
        settle(here.mesh, q_BHSD.shape[0], q_BHSD.shape[2], error=error)
    raise error


def ring_mask(
    *,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    mask_function: MaskFunction = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    **_: Any,
) -> RingMask:
    """The mask function of "ring": what a model's queries see, as a window.

    Args:
        q_length: Queries on this rank.
        kv_length: Keys on this rank.
        q_offset: Keys of earlier calls in a cache.
        mask_function: Which keys a query sees.
        attention_mask: Padding ``[B, S_local]``, True where a token is real.
        **_: What other implementations need to make a dense mask of it.

    Raises:
        RuntimeError: Outside of ``context_parallel`` and of attached models.
        NotImplementedError: For masks that are no window, padding, and caches with earlier keys.
    """
    here = scope.get()
    if here is None:
        raise RuntimeError(
            "attn_implementation='ring' does not know which ranks share the sequence: attach(model, mesh), or call "
            "the model in `with context_parallel(mesh):`; with mesh=None it runs on one device. If a backward pass "
            "raises this, the recomputed part makes its own mask: attach nothing inside it"
        )
    window, error = Window.full(), None
    try:
        window = read_window(mask_function)
        if kv_length != q_length or int(q_offset):
            raise NotImplementedError(
                f"a cache with earlier keys is not supported: {q_length} queries, {kv_length} keys, of which "
                f"{int(q_offset)} are earlier; call the model with use_cache=False and without a cache"
            )
        refuse_padding(attention_mask)
    except (NotImplementedError, ValueError) as problem:
        error = problem
    if here.tokens is not None and error is not None:
        raise error
    return RingMask(window, here.mesh, here.tokens, error)


def refuse_padding(attention_mask: object) -> None:
    """Raise NotImplementedError if a mask hides anything.

    Args:
        attention_mask: None, or a mask ``[B, S_local]`` of tokens.
    """
    if attention_mask is None:
        return
    what = type(attention_mask).__name__
    if isinstance(attention_mask, torch.Tensor):
        if attention_mask.ndim == 2 and bool(attention_mask.all()):
            return
        what = f"one of shape {list(attention_mask.shape)}"
    raise NotImplementedError(
        f"an attention_mask that hides tokens is not supported (got {what}); leave it out: in a causal model only "
        "padding sees the padding on the right, and its labels are -100. Or pack the documents"
    )
