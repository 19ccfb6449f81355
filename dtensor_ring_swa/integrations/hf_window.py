"""Which window a mask function of transformers stands for.

transformers describes a mask as a function ``(batch, head, query, key) -> bool``, put together from a few
building blocks. The same function makes the dense mask of ``"eager"``, so it is what a model means. A block
is recognised by its code, which is that of a sample made by the public function for such blocks, and its
numbers are read from its closure. Whatever is not recognised is refused, so that nothing is lost when
transformers changes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import torch
from transformers import masking_utils

from dtensor_ring_swa.window import UNLIMITED, Window

MaskFunction = Callable[..., Any]


def _code(function: MaskFunction | None) -> CodeType | None:
    return getattr(function, "__code__", None)


# Samples of each block; seen on transformers 5.10 to 5.24.
_CAUSAL = masking_utils.causal_mask_function
_AND = _code(masking_utils.and_masks(_CAUSAL))
_LEFT = _code(masking_utils.sliding_window_overlay(1))
_BOTH = _code(masking_utils.sliding_window_bidirectional_overlay(1))
_PACKED = _code(masking_utils.packed_sequence_mask_function(torch.zeros(1, 1)))
# Older versions do without it.
_remap = getattr(masking_utils, "remap_positions_for_packed_sequence", None)
_REMAPPED = _code(_remap and _remap(_CAUSAL, torch.zeros(1, 1)))


def read_window(mask_function: MaskFunction) -> Window:
    """The window that a mask function shows.

    Packed documents are passed over: they are read from ``position_ids``, where all ranks can see them.

    Args:
        mask_function: What transformers hands to the functions of its ``AttentionMaskInterface``.

    Raises:
        NotImplementedError: If it is not a window, as far as can be told.
    """
    left = right = UNLIMITED
    for block in _blocks(mask_function):
        if block is _CAUSAL:
            right = _closer(right, 0)
        elif _code(block) == _LEFT:
            left = _closer(left, Window.tokens(_value(block)).left)
        elif _code(block) == _BOTH:
            # Counts neighbours, unlike the causal sliding window.
            left, right = (_closer(side, _value(block)) for side in (left, right))
        elif block is not masking_utils.bidirectional_mask_function and _code(block) != _PACKED:
            name = getattr(block, "__qualname__", repr(block))
            raise NotImplementedError(
                f"the model's mask contains {name}, which is no window; 'ring' can show causal, full and "
                "sliding-window masks, and packed documents: use another attn_implementation for this model"
            )
    return Window(left, right)


def _blocks(mask_function: MaskFunction) -> Iterator[MaskFunction]:
    """The blocks whose intersection is the mask."""
    if _code(mask_function) == _AND:
        for part in _value(mask_function):
            yield from _blocks(part)
    elif _REMAPPED and _code(mask_function) == _REMAPPED:
        # Positions within a document differ from those in the sequence by a constant, which no window sees.
        yield from _blocks(inspect.getclosurevars(mask_function).nonlocals["mask_function"])
    else:
        yield mask_function


def _value(block: MaskFunction) -> Any:
    """The one value that a block was made with."""
    (value,) = inspect.getclosurevars(block).nonlocals.values()
    return value


def _closer(side: int, other: int) -> int:
    """The smaller of two reaches."""
    return other if side == UNLIMITED else side if other == UNLIMITED else min(side, other)
