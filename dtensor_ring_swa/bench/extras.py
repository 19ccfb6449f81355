"""Packed documents and sinks: what ``ring_attention`` takes besides a window, and what it costs."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from random import Random
from typing import Any

import torch

from dtensor_ring_swa.band import Band
from dtensor_ring_swa.documents import Documents
from dtensor_ring_swa.window import Window

# Short documents beside long ones, none a multiple of a tile.
MIXTURE = (137, 2041, 89)


@dataclass(frozen=True)
class Extras:
    """What is asked for; the same on every rank.

    Attributes:
        lengths: Lengths that the packed documents are drawn from; empty for one document.
        sinks: Whether each query head has a learned sink logit.
        sink_tokens: First tokens of each document that every query sees.
    """

    lengths: tuple[int, ...] = ()
    sinks: bool = False
    sink_tokens: int = 0

    @property
    def given(self) -> bool:
        """Whether there are any."""
        return bool(self.lengths or self.sinks or self.sink_tokens)

    @property
    def asked(self) -> str:
        """What was asked for, in words."""
        parts = {"packed documents": self.lengths, "learned sinks": self.sinks, "sink tokens": self.sink_tokens}
        return " and ".join(name for name, wanted in parts.items() if wanted)

    def documents(self, seq_len: int) -> list[int]:
        """Document lengths that fill the sequence: drawn with a fixed seed, the last one cut to fit."""
        if not self.lengths:
            return [seq_len]
        draw, filled, drawn = Random(0), 0, []
        while filled < seq_len:
            drawn.append(min(draw.choice(self.lengths), seq_len - filled))
            filled += drawn[-1]
        return drawn

    def boundaries(self, seq_len: int) -> tuple[int, ...] | None:
        """Where the documents begin and end, if any are packed."""
        return (0, *accumulate(self.documents(seq_len))) if self.lengths else None

    def pairs(self, seq_len: int, window: Window) -> int:
        """Visible (query, key) pairs of the whole sequence. A learned sink is none."""
        total = 0
        for length in self.documents(seq_len):
            left, right = window.reach(length)
            total += Band(-left, right).pairs(length, length)
            # Sink tokens that lie before a row's window: of row i those below min(sink_tokens, i - left).
            beyond = Band(-length, -left - 1)
            total += beyond.pairs(length, min(self.sink_tokens, length))
        return total

    def arguments(self, seq_len: int, q_heads: int, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        """The keyword arguments of ``ring_attention``; a learned sink wants a gradient."""
        found: dict[str, Any] = {}
        if self.lengths:
            found["cu_seqlens"] = Documents(torch.tensor(self.boundaries(seq_len), dtype=torch.int32))
        if self.sinks:
            generator = torch.Generator().manual_seed(0)
            found["sinks"] = torch.randn(q_heads, generator=generator).to(device, dtype).requires_grad_()
        if self.sink_tokens:
            found["sink_tokens"] = self.sink_tokens
        return found

    def pack(self, x_BSHD: torch.Tensor) -> torch.Tensor:
        """``[1, S, H, D]`` as ``[T, H, D]`` where documents are packed."""
        return x_BSHD.squeeze(0) if self.lengths else x_BSHD

    def unpack(self, x: torch.Tensor) -> torch.Tensor:
        """``pack`` undone."""
        return x.unsqueeze(0) if self.lengths else x


NO_EXTRAS = Extras()
