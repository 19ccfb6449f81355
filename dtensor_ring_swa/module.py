"""Attention as a module."""

from __future__ import annotations

import torch
from torch import nn

from dtensor_ring_swa.attention import ring_attention
from dtensor_ring_swa.call_checks import CuSeqlens
from dtensor_ring_swa.options import read_options
from dtensor_ring_swa.window import WindowLike, sides_of


class RingAttention(nn.Module):
    """``ring_attention`` as a module without parameters, the entry for a plan to name.

    Without a plan it is ordinary attention on one device. See ``ring_attention`` for what the options mean.

    Args:
        window: ``(left, right)`` tokens visible.
        scale: Factor on the scores; ``head_dim ** -0.5`` by default.
        softcap: Bound on the scores; 0.0 is off.
        kernel: A kernel's name or ``"auto"``.
        deterministic: Bitwise the same gradients on every run.
        layout: How positions lie on the ranks. ``ContextParallel(layout=...)`` sets it, so that the model
            need not know it.
        load_balance: Whether to compute contiguous shards in another layout.
        exchange: Halo or ring.
        sink_tokens: First tokens of each document that its later tokens see besides their window.

    Raises:
        ValueError: For an option that does not exist, or options that exclude each other.
    """

    def __init__(
        self,
        window: WindowLike = (-1, 0),
        scale: float | None = None,
        softcap: float = 0.0,
        kernel: str = "auto",
        deterministic: bool = False,
        layout: str = "contiguous",
        load_balance: str = "auto",
        exchange: str = "auto",
        sink_tokens: int = 0,
    ) -> None:
        super().__init__()
        left, right = sides_of(window)
        options = read_options(
            left, right, kernel, layout, load_balance, exchange, deterministic, sink_tokens, softcap, scale
        )  # fmt: skip
        self.window = options.window
        self.scale = scale
        self.softcap = softcap
        self.kernel = kernel
        self.deterministic = deterministic
        self.layout = layout
        self.load_balance = load_balance
        self.exchange = exchange
        self.sink_tokens = sink_tokens

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        sinks: torch.Tensor | None = None,
        cu_seqlens: CuSeqlens | None = None,
    ) -> torch.Tensor:
        """Attend: q ``[B, S, Hq, D]``, k ``[B, S, Hkv, D]``, v ``[B, S, Hkv, Dv]`` to ``[B, S, Hq, Dv]``.

        ``sinks`` and ``cu_seqlens`` go to ``ring_attention`` as they are.
        """
        return self._attend(q, k, v, self.scale, sinks, cu_seqlens)

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float | None,
        sinks: torch.Tensor | None = None,
        cu_seqlens: CuSeqlens | None = None,
    ) -> torch.Tensor:
        """Attend with the module's options, and a scale that may be the call's alone."""
        return ring_attention(
            q,
            k,
            v,
            window=self.window,
            scale=scale,
            softcap=self.softcap,
            sinks=sinks,
            sink_tokens=self.sink_tokens,
            cu_seqlens=cu_seqlens,
            layout=self.layout,
            load_balance=self.load_balance,
            exchange=self.exchange,
            kernel=self.kernel,
            deterministic=self.deterministic,
        )

    def extra_repr(self) -> str:
        """What ``print(model)`` shows: window, kernel, and the options that are not at their defaults."""
        usual = {"scale": None, "softcap": 0.0, "deterministic": False, "layout": "contiguous",
                 "load_balance": "auto", "exchange": "auto", "sink_tokens": 0}  # fmt: skip
        others = [f", {name}={getattr(self, name)!r}" for name, value in usual.items() if getattr(self, name) != value]
        return f"window=({self.window.left}, {self.window.right}), kernel={self.kernel!r}{''.join(others)}"
