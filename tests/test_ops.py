"""The registered ops: gradients by finite differences, registration, and precision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from dtensor_ring_swa import ring_attention
from dtensor_ring_swa.ops import attention, attention_backward
from dtensor_ring_swa.options import Names
from dtensor_ring_swa.testing import RankPool

from cases import Case, errors, expected, mesh_of

Pools = Callable[[int], RankPool]


def inputs(*shape: int, heads: tuple[int, int] = (4, 2), dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    batch, rows, width = shape
    return [
        torch.randn(batch, rows, count, width, generator=generator, dtype=dtype).requires_grad_()
        for count in (heads[0], heads[1], heads[1])
    ]


@pytest.mark.parametrize("window", [(2, 0), (0, 0), (1, 2), (-1, 0), (-1, -1)])
@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_gradcheck(window: tuple[int, int], softcap: float) -> None:
    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return ring_attention(q, k, v, window=window, softcap=softcap)

    assert torch.autograd.gradcheck(call, tuple(inputs(1, 5, 3)))


@pytest.mark.parametrize("extra", [False, True])
def test_opcheck(extra: bool) -> None:
    q, k, v = inputs(2, 6, 4)
    sinks = torch.randn(q.shape[2], dtype=torch.float64, requires_grad=True) if extra else None
    more = (sinks, torch.tensor([0, 2, 6]) if extra else None)
    names = Names("reference", "contiguous", "auto", "auto", False)
    options = ([2, 1, int(extra), 6], [0.5, 0.0], names.text, "")
    torch.library.opcheck(attention, (q, k, v, *more, *options))
    results = (x.detach() for x in attention(q, k, v, *more, *options))
    leaves = [x if x is None else x.detach() for x in (torch.randn_like(q), q, k, v, *more)]
    torch.library.opcheck(attention_backward, (*leaves, *results, *options))


def test_differentiating_twice_is_an_error_and_not_a_wrong_number() -> None:
    q, k, v = inputs(1, 4, 2)
    out = ring_attention(q, k, v, window=(1, 0))
    (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match=r"dtensor_ring_swa\.attention_backward"):
        torch.autograd.grad(dq.sum(), q)


def test_lse_is_not_differentiable_and_out_alone_is_returned_by_default() -> None:
    q, k, v = inputs(1, 4, 2)
    out, lse = ring_attention(q, k, v, window=(1, 0), return_lse=True)
    assert not lse.requires_grad and lse.shape == (1, 4, 4) and lse.dtype == torch.float64
    assert torch.equal(ring_attention(q, k, v, window=(1, 0)), out)
    half = [x.detach().bfloat16() for x in (q, k, v)]
    assert ring_attention(*half, return_lse=True)[1].dtype == torch.float32


def test_only_what_is_asked_gets_a_gradient() -> None:
    q, k, v = inputs(1, 4, 2)
    out = ring_attention(q.detach(), k, v.detach(), window=(1, 0))
    out.sum().backward()
    assert k.grad is not None and q.grad is None and v.grad is None
    with torch.no_grad():
        assert not ring_attention(q, k, v).requires_grad
    with torch.inference_mode():
        assert ring_attention(q, k, v).shape == q.shape


@pytest.mark.parametrize("exchange", ["halo", "ring"])
def test_gradients_of_strided_inputs_are_contiguous_as_a_graph_is_told(exchange: str) -> None:
    leaves = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in inputs(1, 4, 2)]
    out = ring_attention(*leaves, window=(1, 0), exchange=exchange)
    assert all(x.is_contiguous() for x in torch.autograd.grad(out, leaves, torch.ones_like(out)))


def test_an_expanded_gradient_equals_a_contiguous_one() -> None:
    grads = []
    for expand in (True, False):
        q, k, v = inputs(1, 6, 2)
        out = ring_attention(q, k, v, window=(2, 0))
        gradient = torch.ones((), dtype=torch.float64).expand(out.shape)
        grads.append(torch.autograd.grad(out, (q, k, v), gradient if expand else gradient.contiguous()))
    assert all(torch.equal(x, y) for x, y in zip(*grads, strict=True))


def run_sum_backward() -> float:
    """Backward of ``out.sum()`` on a DTensor: its gradient is an expanded, replicated DTensor."""
    case = Case(seq_len=12, window=(4, 1))
    mesh = mesh_of((2,), ("cp",))
    q, k, v = (distribute_tensor(x, mesh, [Shard(1)]).requires_grad_() for x in case.inputs()[:3])
    ring_attention(q, k, v, window=case.window).sum().backward()
    leaves = [x.requires_grad_() for x in case.inputs()[:3]]
    ring_attention(*leaves, window=case.window).sum().backward()
    worst = 0.0
    for x, y in zip((q, k, v), leaves, strict=True):
        assert isinstance(x.grad, DTensor) and x.grad.placements == (Shard(1),) and y.grad is not None
        worst = max(worst, float((x.grad.full_tensor() - y.grad).abs().max()))
    return worst


def test_a_replicated_gradient_is_redistributed(pools: Pools) -> None:
    assert max(pools(2).run(run_sum_backward)) < 1e-12


def test_bfloat16_error_does_not_grow_with_ranks(pools: Pools) -> None:
    # Windows of more than a shard: every dK and dV row is a sum of several ranks' shares.
    shapes = Case(seq_len=256, q_heads=4, kv_heads=2, head_dim=16, v_head_dim=16, window=(60, 0), dtype=torch.bfloat16)
    found = {}
    for ranks in (1, 8):
        case = replace(shapes, mesh=(ranks,))
        found[ranks] = pools(ranks).run(errors, case)[0]
    for name, alone in found[1].items():
        assert found[8][name] <= 1.1 * alone, f"{name}: {found[8][name]} on 8 ranks, {alone} on one"
    assert 1e-4 < max(found[1].values()) < 1e-2


def test_two_windows_and_head_counts_in_one_process() -> None:
    cases = [Case(window=(2, 0), q_heads=2), Case(window=(0, 3), q_heads=6, kv_heads=2)] * 2
    for case in cases:
        q, k, v, _ = case.inputs()
        difference = ring_attention(q, k, v, window=case.window) - expected(case)[0]
        assert difference.abs().max() < 1e-12
