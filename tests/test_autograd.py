"""Autograd around attention on a mesh: checkpoints, FSDP2, autocast, threads, and what has no derivative."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch.autograd import forward_ad
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from dtensor_ring_swa import ContextParallel, RingAttention, ring_attention, shard_sequence
from dtensor_ring_swa.integrations.sdpa import ring_sdpa
from dtensor_ring_swa.schedule import Schedule
from dtensor_ring_swa.testing import RankPool

from cases import Case, apart
from forms import FORMS, Attend, attend, case_of, cp_mesh, distance, from_oracle, inputs

Pools = Callable[[int], RankPool]
TOLERANCE = 1e-12


@contextmanager
def counting() -> Iterator[list[int]]:
    """How often attention was computed forward, as a list of one number."""
    count, forward = [0], Schedule.forward

    def counted(*args: Any, **kwargs: Any) -> None:
        count[0] += 1
        forward(*args, **kwargs)

    with mock.patch.object(Schedule, "forward", counted):
        yield count


# Checkpoints

OP = torch.ops.dtensor_ring_swa.attention.default


def save_attention(policy: CheckpointPolicy, _: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return policy if op is OP else CheckpointPolicy.PREFER_RECOMPUTE


def checkpointed(
    form: str,
    options: dict[str, Any],
    policy: CheckpointPolicy | None,
    seq_len: int = 12,
    window: tuple[int, int] = (4, 1),
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
) -> tuple[float, int]:
    """The distance from the oracle, and how often attention ran."""
    case = case_of(seq_len, window, dtype, device)
    if policy is not None:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, partial(save_attention, policy))
    function = partial(checkpoint, attend(form, case), use_reentrant=False, **options)
    with counting() as count:
        return distance(form, case, function), count[0]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("check", ["default", "none"])
def test_non_reentrant_checkpoints_compute_attention_twice(pools: Pools, form: str, check: str) -> None:
    for far, ran in pools(2).run(checkpointed, form, {"determinism_check": check}, None):
        assert far < TOLERANCE and ran == 2


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("policy", "times"), [(CheckpointPolicy.MUST_SAVE, 1), (CheckpointPolicy.MUST_RECOMPUTE, 2)])
def test_a_selective_checkpoint_sees_the_op(pools: Pools, form: str, policy: CheckpointPolicy, times: int) -> None:
    for far, ran in pools(2).run(checkpointed, form, {}, policy):
        assert far < TOLERANCE and ran == times


# FSDP2


class Layer(nn.Module):
    """Attention with projections, on the residual stream ``[B, S, 8]``."""

    def __init__(self, window: tuple[int, int]) -> None:
        super().__init__()
        self.core = RingAttention(window)
        self.qkv = nn.Linear(8, 16, dtype=torch.float64)
        self.out = nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (4, 4)).split([2, 1, 1], dim=-2)
        return x + self.out(self.core(q, k, v).flatten(-2))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Layer((3, 0)), Layer((-1, 0))])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


def batch(step: int, seq_len: int) -> torch.Tensor:
    return torch.randn(1, seq_len, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def accumulated(compiled: bool, seq_len: int = 12, dtype: torch.dtype = torch.float64, device: str = "cpu") -> float:
    """Gradients of two batches under FSDP2 over the context-parallel ranks, against one process in float64."""
    mesh, model, alone = cp_mesh(case_of(seq_len, device=device)), Model().to(device, dtype), Model().to(device)
    parallelize_module(model, mesh, {"layers.*.core": ContextParallel()})
    for each in (*model.layers, model):
        fully_shard(each, mesh=mesh, reshard_after_forward=True)
    if compiled:
        torch._dynamo.reset()
        counters.clear()
        for layer in model.layers:
            layer.compile(fullgraph=True, backend="aot_eager")
    for step, last in ((0, False), (1, True)):
        model.set_requires_gradient_sync(last)  # pyright: ignore[reportCallIssue]
        whole = batch(step, seq_len).to(device)
        loss = model(shard_sequence(mesh, whole.to(dtype))).square().sum()
        (loss * mesh.size()).backward()  # FSDP2 takes the mean of the ranks' gradients, and the loss is a sum
        alone(whole).square().sum().backward()
    assert not compiled or counters["stats"]["unique_graphs"]
    worst = 0.0
    for mine, whole in zip(model.parameters(), alone.parameters(), strict=True):
        assert isinstance(mine.grad, DTensor) and whole.grad is not None
        worst = max(worst, apart(mine.grad.full_tensor(), whole.grad, relative=True))
    return worst


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled layers"])
def test_fsdp_accumulates_gradients_of_checkpointed_layers(pools: Pools, compiled: bool) -> None:
    assert max(pools(2).run(accumulated, compiled)) < 1e-11


# Autocast


def autocast(
    dtype: torch.dtype = torch.bfloat16, enabled: bool = True, device: str = "cpu"
) -> AbstractContextManager[Any]:
    return torch.autocast(device, dtype=dtype, enabled=enabled)


def results(function: Attend, given: list[torch.Tensor], outside: AbstractContextManager[Any]) -> list[torch.Tensor]:
    """out and dq, dk, dv; backward runs in ``outside``."""
    q, k, v = leaves = [x.detach().requires_grad_() for x in given]
    out = function(q, k, v)
    with outside:
        grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
    return [x.to_local() if isinstance(x, DTensor) else x for x in (out.detach(), *grads)]


def run_autocast(
    form: str, seq_len: int = 12, window: tuple[int, int] = (4, 1), device: str = "cpu"
) -> tuple[list[torch.dtype], bool]:
    """The dtypes of out and dq, dk, dv, and whether they are those of a call with bfloat16."""
    case = case_of(seq_len, window, torch.float32, device)
    function, given = attend(form, case), inputs(form, case)[:3]

    def cast(*qkv: torch.Tensor) -> torch.Tensor:
        with autocast(device=device):
            return function(*qkv)

    def by_hand(*qkv: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.bfloat16() for x in qkv)
        return function(q, k, v)

    got, want = results(cast, given, nullcontext()), results(by_hand, given, nullcontext())
    return [x.dtype for x in got], all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


@pytest.mark.parametrize("form", FORMS)
def test_autocast_casts_q_k_and_v(pools: Pools, form: str) -> None:
    for dtypes, same in pools(2).run(run_autocast, form):
        assert dtypes == [torch.bfloat16] + [torch.float32] * 3 and same


def test_autocast_takes_mixed_dtypes_and_leaves_float64_alone() -> None:
    q, k, v, _ = Case(dtype=torch.float32).inputs()
    with autocast(torch.float16):
        assert ring_attention(q, k.bfloat16(), v.half()).dtype == torch.float16
        assert ring_attention(q.double(), k.double(), v.double()).dtype == torch.float64
        with pytest.raises(ValueError, match="same dtype"):
            ring_attention(q, k, v.double())
        with autocast(enabled=False):
            assert ring_attention(q, k, v).dtype == torch.float32
    with pytest.raises(ValueError, match="same dtype"):
        ring_attention(q, k.bfloat16(), v)


def test_autocast_leaves_a_device_without_autocast_to_the_checks() -> None:
    q, k, v, _ = Case(dtype=torch.float32).inputs()
    with autocast(), pytest.raises(ValueError, match=r"same device, got .*'k': device\(type='meta'\)"):
        ring_attention(q, k.to("meta"), v)


def test_autocast_does_not_reach_into_a_kernel() -> None:
    # The reference kernel computes bfloat16 in float32; its products must stay there, in backward, too.
    given = [x.bfloat16() for x in Case(seq_len=64, q_heads=4, kv_heads=2, head_dim=16, v_head_dim=16).inputs()[:3]]

    def inside(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with autocast():
            return ring_attention(q, k, v, window=(9, 0))

    want = results(partial(ring_attention, window=(9, 0)), given, nullcontext())
    assert all(torch.equal(x, y) for x, y in zip(results(inside, given, autocast()), want, strict=True))


# Modes and graphs


def without_gradients(form: str) -> tuple[float, float]:
    """The distance of out from the oracle in no_grad and in inference_mode."""
    case, found = case_of(12, (4, 1)), []
    function = attend(form, case)
    for mode in (torch.no_grad, torch.inference_mode):
        q, k, v = (x.requires_grad_() for x in inputs(form, case)[:3])
        with mode():
            out = function(q, k, v)
        assert not out.requires_grad
        found.append(from_oracle(case, [out]))
    return found[0], found[1]


@pytest.mark.parametrize("form", FORMS)
def test_modes_without_gradients(pools: Pools, form: str) -> None:
    assert max(map(max, pools(2).run(without_gradients, form))) < TOLERANCE


def views_in_inference_mode() -> float:
    """DTensors of which attention needs views, [T, H, D] and SDPA's [B, H, S, D]: the distance from one device."""
    mesh = cp_mesh(case_of(12, (3, 0)))
    q, k, v = torch.randn(3, 12, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    want, want_lse = ring_attention(q, k, v, window=(3, 0), cu_seqlens=[0, 12], return_lse=True)
    packed = [distribute_tensor(x, mesh, [Shard(0)]).requires_grad_() for x in (q, k, v)]
    rows = [distribute_tensor(x.transpose(0, 1)[None], mesh, [Shard(2)]) for x in (q, k, v)]
    with torch.inference_mode():
        out, lse = ring_attention(*packed, window=(3, 0), cu_seqlens=[0, 12], return_lse=True)
        with ring_sdpa(window=(3, 0)):
            through_sdpa = F.scaled_dot_product_attention(rows[0], rows[1], rows[2], is_causal=True)
    assert not out.requires_grad
    pairs = (
        (out, shard_sequence(mesh, want, dim=0)), (lse, shard_sequence(mesh, want_lse)),
        (through_sdpa, shard_sequence(mesh, want.transpose(0, 1)[None], dim=2)),
    )  # fmt: skip
    locals_ = [(got._local_tensor, expected) for got, expected in pairs if isinstance(got, DTensor)]
    assert len(locals_) == len(pairs)
    return max(float((got - expected).abs().max()) for got, expected in locals_)


def test_dtensors_are_viewed_in_inference_mode(pools: Pools) -> None:
    assert max(pools(2).run(views_in_inference_mode)) < TOLERANCE


def backward_elsewhere(form: str) -> tuple[float, bool]:
    """Backward in another thread, twice: the distance from the oracle, and whether both are equal."""
    case = case_of(12, (4, 1))
    *given, dout = inputs(form, case)
    q, k, v = leaves = [x.requires_grad_() for x in given]
    out, grads = attend(form, case)(q, k, v), []

    def backward() -> None:
        grads.append(torch.autograd.grad(out, leaves, dout, retain_graph=True))

    for _ in range(2):
        thread = threading.Thread(target=backward)
        thread.start()
        thread.join()
    local = [[x.to_local() if isinstance(x, DTensor) else x for x in each] for each in grads]
    same = all(torch.equal(x, y) for x, y in zip(*local, strict=True))
    return from_oracle(case, [out.detach(), *grads[1]]), same


@pytest.mark.parametrize("form", FORMS)
def test_backward_needs_no_context_and_can_be_repeated(pools: Pools, form: str) -> None:
    for far, same in pools(2).run(backward_elsewhere, form):
        assert far < TOLERANCE and same


# What has no derivative


def second_derivative(form: str) -> str:
    case = case_of(12, (4, 1))
    q, k, v = (x.requires_grad_() for x in inputs(form, case)[:3])
    (dq,) = torch.autograd.grad(attend(form, case)(q, k, v).square().sum(), q, create_graph=True)
    try:
        torch.autograd.grad(dq.square().sum(), q)
    except RuntimeError as problem:
        return str(problem)
    return "accepted"


@pytest.mark.parametrize("form", FORMS)
def test_a_second_derivative_is_refused(pools: Pools, form: str) -> None:
    for said in pools(2).run(second_derivative, form):
        assert "dtensor_ring_swa.attention_backward" in said and "no autograd formula" in said


def windowed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return ring_attention(q, k, v, window=(3, 1))


def dual_output(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    with forward_ad.dual_level():
        return windowed(q, forward_ad.make_dual(k, torch.ones_like(k)), v)


@pytest.mark.parametrize(
    "derivative",
    [
        lambda *x: torch.func.jvp(windowed, x, x),
        lambda *x: torch.func.jacfwd(windowed)(*x),
        dual_output,
        lambda q, k, v: torch.func.jvp(lambda s: ring_attention(q, k, v, sinks=s), (q[0, 0, :, 0],), (q[0, 0, :, 0],)),
    ],
    ids=["jvp", "jacfwd", "dual tensor", "sinks"],
)
def test_forward_mode_is_refused(derivative: Callable[..., Any]) -> None:
    # Autograd itself would drop the tangents and answer zero.
    with pytest.raises(NotImplementedError, match="no forward-mode derivatives"):
        derivative(*Case().inputs()[:3])


def forward_mode_on_one_rank(form: str) -> str:
    q, k, v = inputs(form, case := case_of(12))[:3]
    try:
        with forward_ad.dual_level():
            attend(form, case)(forward_ad.make_dual(q, q) if torch.distributed.get_rank() else q, k, v)
    except (ValueError, NotImplementedError) as problem:
        return str(problem)
    return "accepted"


def test_forward_mode_on_one_rank_is_refused_on_all(pools: Pools) -> None:
    other, said = pools(2).run(forward_mode_on_one_rank, "plain")
    assert "rank 1 " in other and "refused" in other and "no forward-mode derivatives" in said


def test_functional_gradients_are_refused_by_torch() -> None:
    with pytest.raises(RuntimeError, match="functorch transforms"):
        torch.func.grad(lambda q, k, v: windowed(q, k, v).sum())(*Case().inputs()[:3])


def test_vmap_is_a_loop() -> None:
    q, k, v = (torch.stack([x, 2 * x, -x]) for x in Case().inputs()[:3])
    want = torch.stack([windowed(*each) for each in zip(q, k, v, strict=True)])
    assert torch.equal(torch.func.vmap(windowed)(q, k, v), want)
    want = torch.stack([windowed(each, k[0], v[0]) for each in q])
    assert torch.equal(torch.func.vmap(windowed, in_dims=(0, None, None))(q, k[0], v[0]), want)
