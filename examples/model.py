"""A small decoder. It is written for one device: nothing in it knows how it will be sharded."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from dtensor_ring_swa import Documents, RingAttention, Window


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the decoder.

    ``window`` counts visible tokens, the query's own included. Every ``global_every``-th layer sees all
    earlier tokens instead; 0 is none. With ``sinks`` each layer learns a sink logit a query head.
    """

    vocabulary: int = 256
    layers: int = 4
    dim: int = 128
    heads: int = 4
    kv_heads: int = 2
    window: int = 128
    global_every: int = 0
    kernel: str = "auto"
    sinks: bool = False

    def window_of(self, layer: int) -> Window:
        """What the queries of a layer see; layers count from 0."""
        is_global = self.global_every > 0 and (layer + 1) % self.global_every == 0
        return Window.causal() if is_global else Window.tokens(self.window)


def rotate(x_BSHD: torch.Tensor, angles_SD: torch.Tensor) -> torch.Tensor:
    """Rotary embedding (Su et al. 2021, arXiv:2104.09864) of the rows at the given angles."""
    first, second = x_BSHD.chunk(2, dim=-1)
    cos, sin = (f(angles_SD)[:, None].to(x_BSHD.dtype) for f in (torch.cos, torch.sin))
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


class Sinks(nn.Module):
    """A learned logit for each query head, one term more in its softmax; a module, so that a plan can name it."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(heads))

    def forward(self) -> torch.Tensor:
        """The logits ``[H]``."""
        return self.logits


class Attention(nn.Module):
    """Grouped-query attention. ``core`` is the part that sees other tokens, the one to name in a plan."""

    def __init__(self, config: ModelConfig, window: Window) -> None:
        super().__init__()
        self.head_dim = config.dim // config.heads
        self.q = nn.Linear(config.dim, config.heads * self.head_dim, bias=False)
        self.k = nn.Linear(config.dim, config.kv_heads * self.head_dim, bias=False)
        self.v = nn.Linear(config.dim, config.kv_heads * self.head_dim, bias=False)
        self.core = RingAttention(window, kernel=config.kernel)
        self.sinks = Sinks(config.heads) if config.sinks else None
        self.out = nn.Linear(config.heads * self.head_dim, config.dim, bias=False)

    def forward(
        self, x_BSC: torch.Tensor, angles_SD: torch.Tensor, *, documents: Documents | None = None
    ) -> torch.Tensor:
        """Mix each token with those in its window, of its own document."""
        # As many heads as the projections give: a tensor-parallel rank has only its own.
        q, k, v = (project(x_BSC).unflatten(-1, (-1, self.head_dim)) for project in (self.q, self.k, self.v))
        sinks_H = None if self.sinks is None else self.sinks()
        mixed_BSHD = self.core(rotate(q, angles_SD), rotate(k, angles_SD), v, sinks=sinks_H, cu_seqlens=documents)
        return self.out(mixed_BSHD.flatten(2))


class FeedForward(nn.Module):
    """A gated feed-forward network: each token by itself."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, 3 * dim, bias=False)
        self.up = nn.Linear(dim, 3 * dim, bias=False)
        self.down = nn.Linear(3 * dim, dim, bias=False)

    def forward(self, x_BSC: torch.Tensor) -> torch.Tensor:
        """Each token's features to new ones."""
        return self.down(F.silu(self.gate(x_BSC)) * self.up(x_BSC))


class Layer(nn.Module):
    """Attention, then a feed-forward network, each with its norm and residual."""

    def __init__(self, config: ModelConfig, window: Window) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim)
        self.attention = Attention(config, window)
        self.feed_forward_norm = nn.RMSNorm(config.dim)
        self.feed_forward = FeedForward(config.dim)

    def forward(
        self, x_BSC: torch.Tensor, angles_SD: torch.Tensor, *, documents: Documents | None = None
    ) -> torch.Tensor:
        """One block of the decoder."""
        x_BSC = x_BSC + self.attention(self.attention_norm(x_BSC), angles_SD, documents=documents)
        return x_BSC + self.feed_forward(self.feed_forward_norm(x_BSC))


class Decoder(nn.Module):
    """Bytes to logits."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.dim // config.heads
        self.has_sinks = config.sinks
        self.embedding = nn.Embedding(config.vocabulary, config.dim)
        self.layers = nn.ModuleList(Layer(config, config.window_of(layer)) for layer in range(config.layers))
        self.norm = nn.RMSNorm(config.dim)
        self.head = nn.Linear(config.dim, config.vocabulary, bias=False)

    def forward(
        self, tokens_BS: torch.Tensor, positions_S: torch.Tensor, documents: Documents | None = None
    ) -> torch.Tensor:
        """Logits ``[B, S, 256]`` of tokens ``[B, S]`` at these global positions ``[S]``.

        Positions are those in the sequence, in packed documents too: rotary scores depend on distances alone, and
        none is taken across a boundary. So one row of positions serves all sequences, whatever their documents.
        """
        frequencies = 10000.0 ** -torch.arange(0, 1, 2 / self.head_dim, dtype=torch.float64, device=tokens_BS.device)
        angles_SD = positions_S[:, None] * frequencies
        x_BSC = self.embedding(tokens_BS)
        for layer in self.layers:
            x_BSC = layer(x_BSC, angles_SD, documents=documents)
        return self.head(self.norm(x_BSC))
