"""integrations/torchtitan.py in a decoder of torchtitan, against one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor.parallel import parallelize_module

from dtensor_ring_swa import ContextParallel, next_token_labels, positions, ring_attention, shard_sequence
from dtensor_ring_swa.integrations.torchtitan import InnerAttention
from dtensor_ring_swa.testing import RankPool, dense_attention

from cases import mesh_of

Pools = Callable[[int], RankPool]


def decoder_of(inner: Callable[[], torch.nn.Module]) -> Any:
    """torchtitan's small Llama 3, with this inner attention and two of its layers."""
    from torchtitan.models.llama3 import _debugmodel  # pyright: ignore

    torch.manual_seed(0)
    config = _debugmodel("flex")
    config.layers = config.layers[:2]
    model = config.build()
    model.init_states()
    for layer in model.layers.values():
        layer.attention.inner_attention = inner()
    return model


class Dense(torch.nn.Module):
    """The oracle, called as torchtitan calls it."""

    def __init__(self, window: tuple[int, int]) -> None:
        super().__init__()
        self.window = window

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, **_: Any) -> torch.Tensor:
        return dense_attention(q, k, v, self.window, scale)[0].to(q.dtype)


def causal_of_torchtitan() -> torch.nn.Module:
    from torchtitan.models.common.attention import ScaledDotProductAttention  # pyright: ignore

    return ScaledDotProductAttention(ScaledDotProductAttention.Config())


def difference(window: tuple[int, int]) -> tuple[float, float]:
    """Of this rank's logits, and of all parameters' gradients."""
    mesh = mesh_of((dist.get_world_size(),), ("cp",))
    tokens = torch.randint(2048, (2, 26), generator=torch.Generator().manual_seed(0))
    labels = next_token_labels(tokens)
    whole = decoder_of(causal_of_torchtitan if window == (-1, 0) else lambda: Dense(window))
    sharded = decoder_of(lambda: InnerAttention(window))
    parallelize_module(sharded, mesh, {"layers.*.attention.inner_attention": ContextParallel()})
    want = whole(tokens)
    got = sharded(shard_sequence(mesh, tokens), positions(mesh, 26)[None])
    (F.cross_entropy(want.flatten(0, 1), labels.flatten(), reduction="sum") / 50).backward()
    mine = shard_sequence(mesh, labels).flatten()
    (F.cross_entropy(got.flatten(0, 1), mine, reduction="sum") / 50).backward()
    worst = 0.0
    for one, other in zip(sharded.parameters(), whole.parameters(), strict=True):
        dist.all_reduce(one.grad)
        worst = max(worst, float((one.grad - other.grad).abs().amax()))
    return float((got - shard_sequence(mesh, want)).abs().amax()), worst


@pytest.mark.parametrize("window", [(-1, 0), (4, 0)])
def test_decoder_equals_one_process(pools: Pools, window: tuple[int, int]) -> None:
    pytest.importorskip("torchtitan.models.llama3", reason="torchtitan is not installed")
    assert max(map(max, pools(4).run(difference, window))) < 1e-5


def test_called_as_torchtitan_calls() -> None:
    q, k, v = torch.randn(3, 1, 8, 2, 4)
    inner = InnerAttention((3, 0), scale=2.0)
    out = inner(q, k, v, attention_masks=None, scale=0.3, enable_gqa=False)
    assert torch.equal(out, ring_attention(q, k, v, window=(3, 0), scale=0.3))
    # A call's scale is that call's alone.
    assert torch.equal(inner(q, k, v), ring_attention(q, k, v, window=(3, 0), scale=2.0))
    with pytest.raises(NotImplementedError, match="attention_masks, out_transform cannot be honoured"):
        InnerAttention((3, 0))(q, k, v, attention_masks=torch.ones(8, 8), out_transform=torch.relu)
