"""What people use around attention, on GPUs: torch.compile, CUDA graphs, autocast, SDPA, models, checkpoints, FSDP2.

Most of it is what the other tests do on CPU, with their functions and a device. Any number of GPUs will do.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dtensor_ring_swa import ring_attention
from dtensor_ring_swa.testing import RankFailure, RankPool
from dtensor_ring_swa.testing.dense import visible

import test_autograd
import test_compile
import test_parallel
import test_plans
import test_sdpa
import test_sinks_in_models
import test_train
from cases import Case, apart, gpu_ranks, supported
from forms import FORMS, attend, case_of, cp_mesh, from_whole, inputs

DEVICE = "cuda"
RANKS = gpu_ranks(least=2)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(RANKS < 1, reason="needs CUDA")]

Pools = Callable[[int], RankPool]
BF16, FP32 = torch.bfloat16, torch.float32
TOLERANCE = {BF16: 1.2e-2, FP32: 1e-4}
# Between two runs of one call in bfloat16: what the order of sums changes, far below one rounding of each element.
AGAIN = 4e-3
# A shard holds its window's keys and as many more, so that there are interior and boundary rows.
ROWS = 256


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    made = RankPool(RANKS, backend="nccl", timeout=300)
    yield made
    made.close()


def whole_case(kernel: str = "auto", window: tuple[int, int] = (127, 0)) -> Case:
    """A sequence of ``ROWS``, for each device by itself."""
    return Case(
        batch=2, seq_len=ROWS, q_heads=4, kv_heads=2, head_dim=64, v_head_dim=64, window=window, mesh=(RANKS,),
        dtype=BF16, kernel=kernel, device=DEVICE,
    )  # fmt: skip


# torch.compile


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("form", FORMS)
def test_one_graph_serves_new_data(pool: RankPool, form: str, backend: str) -> None:
    lengths, options = (ROWS * RANKS,) * 3, {"backend": backend}
    for found in pool.run(test_compile.lengths_compiled, form, (127, 0), lengths, False, options, BF16, DEVICE):
        assert max(far for far, _ in found) < TOLERANCE[BF16], found
        assert [graphs for _, graphs in found] == [1, 1, 1]


@pytest.mark.parametrize("form", ["dtensor", "plain"])
def test_a_dealt_ring_compiles(pool: RankPool, form: str) -> None:
    lengths: tuple[int, ...] = (ROWS * RANKS,) * 2
    for found in pool.run(test_compile.lengths_compiled, form, (-1, 0), lengths, False, {}, BF16, DEVICE):
        assert max(far for far, _ in found) < TOLERANCE[BF16] and found[-1][1] == 1, found


@pytest.mark.parametrize("kernel", ["auto", "triton", "aten"])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_without_a_mesh_equals_eager(pool: RankPool, mode: str, kernel: str) -> None:
    # "reduce-overhead" runs CUDA graphs from the third call on.
    options = {"backend": "inductor", "mode": mode}
    for found in pool.run(test_compile.alone, options, (ROWS,) * 5, supported(whole_case(kernel))):
        assert max(found) < AGAIN, found


# CUDA graphs

Tensors = list[torch.Tensor]
Step = Callable[[], Tensors]


class Attention:
    """Forward and backward on tensors that stay where they are: shards, or the whole sequence on each device."""

    def __init__(self, case: Case, sharded: bool) -> None:
        self.case, self.mesh = case, cp_mesh(case) if sharded else None
        q, k, v, dout = self._data(case)
        self.leaves, self.dout = [x.requires_grad_() for x in (q, k, v)], dout

    def _data(self, case: Case) -> Tensors:
        return [*case.inputs()] if self.mesh is None else inputs("plain", case)

    def put(self, seed: int) -> None:
        """Other data in the same tensors."""
        with torch.no_grad():
            for x, new in zip((*self.leaves, self.dout), self._data(replace(self.case, seed=seed)), strict=True):
                x.copy_(new)

    def __call__(self) -> Tensors:
        """out, dq, dk and dv. With ``seq_len`` the hosts send each other nothing."""
        q, k, v = self.leaves
        out = ring_attention(
            q, k, v, window=self.case.window, kernel=self.case.kernel, mesh=self.mesh, seq_len=self.case.seq_len
        )
        return [out.detach(), *torch.autograd.grad(out, self.leaves, self.dout)]

    def distance(self, got: Tensors) -> float:
        """How far results are from eager ones of the same data."""
        return max(apart(x, y, relative=True) for x, y in zip(got, self(), strict=True))


def stream_on(device: str) -> Any:
    """A stream to warm up on; None without a GPU."""
    return torch.cuda.Stream() if device == "cuda" else None


def record(step: Step, stream: Any, same_stream: bool) -> tuple[Tensors, Callable[[], None]]:
    """The results of a step, and how to compute them anew in the same tensors: a CUDA graph, captured after some runs.

    It is captured on the stream of those runs, or on torch's own for captures. Without a GPU there is no
    graph, and results are copied.
    """
    if stream is None:
        held = step()
        return held, partial(copy_step, step, held)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream if same_stream else None):
        held = step()
    return held, graph.replay


def copy_step(step: Step, held: Tensors) -> None:
    for x, new in zip(held, step(), strict=True):
        x.copy_(new)


def replayed(case: Case, sharded: bool, same_stream: bool) -> list[float]:
    """How far replays with new data are from eager."""
    step, found = Attention(case, sharded), []
    held, replay = record(step, stream_on(case.device), same_stream)
    for seed in (1, 2):
        step.put(seed)
        replay()
        found.append(step.distance(held))
    return found


GRAPHED = [(kernel, same) for kernel in ("auto", "triton", "aten") for same in (False, True)]


@pytest.mark.parametrize("window", [(127, 0), (255, 0)])
@pytest.mark.parametrize(("kernel", "same_stream"), GRAPHED)
def test_a_graph_without_a_mesh_equals_eager(
    pool: RankPool, kernel: str, same_stream: bool, window: tuple[int, int]
) -> None:
    for found in pool.run(replayed, supported(whole_case(kernel, window)), False, same_stream):
        assert max(found) < AGAIN, found


@pytest.mark.parametrize(("kernel", "same_stream"), GRAPHED)
def test_a_graph_of_shards_equals_eager(pool: RankPool, kernel: str, same_stream: bool) -> None:
    case = replace(supported(whole_case(kernel)), seq_len=ROWS * RANKS)
    for found in pool.run(replayed, case, True, same_stream):
        assert max(found) < AGAIN, found


def disturbed(case: Case, same_stream: bool) -> float:
    """A replay after much else has been computed, and all memory been used that is free."""
    step, stream = Attention(case, False), stream_on(case.device)
    held, replay = record(step, stream, same_stream)
    for left in range(100):  # more windows than any cache of what is prepared for a call
        Attention(replace(case, window=(left, 1)), False)()
    with torch.cuda.stream(stream):
        kept = [torch.full((4 << size,), -7, device=case.device) for size in range(12) for _ in range(50)]
    if case.device == "cuda":
        kept += [torch.full((1 << size,), -7).pin_memory() for size in range(12) for _ in range(50)]
        torch.cuda.synchronize()
    step.put(1)
    replay()
    return step.distance(held)


@pytest.mark.parametrize(("kernel", "same_stream"), GRAPHED)
def test_a_graph_holds_all_that_it_reads(pool: RankPool, kernel: str, same_stream: bool) -> None:
    assert max(pool.run(disturbed, supported(whole_case(kernel)), same_stream)) < AGAIN


def second_first(case: Case) -> list[float]:
    """Two graphs of the same shapes; the one captured last is replayed first, and the first not before."""
    steps = [Attention(replace(case, seed=seed), False) for seed in (1, 2)]
    recorded = [record(step, stream_on(case.device), False) for step in steps]
    found = []
    for step, (held, replay) in reversed(list(zip(steps, recorded, strict=True))):
        step.put(3)
        replay()
        found.append(step.distance(held))
    return found


@pytest.mark.parametrize("kernel", ["auto", "triton", "aten"])
def test_a_graph_needs_no_other(pool: RankPool, kernel: str) -> None:
    for found in pool.run(second_first, supported(whole_case(kernel))):
        assert max(found) < AGAIN, found


def eager_after_a_graph(case: Case) -> float:
    """Eager on a stream that has seen the call in a capture alone, whose graph never ran; against eager elsewhere."""
    stream, step = stream_on(case.device), Attention(case, False)
    step()  # the warm-up, on another stream
    if stream is not None:
        torch.cuda.synchronize()
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
            step()
    with torch.cuda.stream(stream):
        got = step()
    if stream is not None:
        torch.cuda.current_stream().wait_stream(stream)
    return step.distance(got)


@pytest.mark.parametrize("kernel", ["auto", "triton", "aten"])
def test_a_capture_leaves_nothing_behind_for_eager(pool: RankPool, kernel: str) -> None:
    assert max(pool.run(eager_after_a_graph, supported(whole_case(kernel)))) < AGAIN


def cold_capture(case: Case) -> None:
    Attention(case, False)()  # compiles what has to be
    cold = Attention(replace(case, window=(case.window[0] - 3, 0)), False)
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream_on(case.device)):
        cold()


def test_a_capture_of_what_never_ran_says_so(pool: RankPool) -> None:
    with pytest.raises(RankFailure, match="run it once, forward and backward, with the same shapes"):
        pool.run(cold_capture, supported(whole_case("triton")))


def graphed_module(dtype: torch.dtype, device: str) -> float:
    """A layer with projections as torch.cuda.make_graphed_callables makes it, against itself: out and all gradients."""
    torch.manual_seed(0)
    layer = test_autograd.Layer((127, 0)).to(device, dtype)
    eager = copy.deepcopy(layer)
    x, dout = torch.randn(2, 2, ROWS, 8, dtype=dtype, device=device)
    if device == "cuda":
        torch.cuda.make_graphed_callables(layer, (x.clone().requires_grad_(),))
    results = []
    for each in (layer, eager):
        leaf = x.clone().requires_grad_()
        out = each(leaf)
        results.append([out.detach(), *torch.autograd.grad(out, [leaf, *each.parameters()], dout)])
    return max(apart(got, want, relative=True) for got, want in zip(*results, strict=True))


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_a_graphed_module(pool: RankPool, dtype: torch.dtype) -> None:
    assert max(pool.run(graphed_module, dtype, DEVICE)) < AGAIN


# Autocast


@pytest.mark.parametrize("form", FORMS)
def test_autocast_is_a_call_with_bfloat16(pool: RankPool, form: str) -> None:
    # A short window, for which the kernel is deterministic.
    for dtypes, same in pool.run(test_autograd.run_autocast, form, ROWS * RANKS, (127, 0), DEVICE):
        assert dtypes == [BF16] + [FP32] * 3 and same


def autocast_beside_sdpa(form: str, seq_len: int, device: str) -> tuple[list[torch.dtype], list[torch.dtype], float]:
    """The dtypes of out and gradients under autocast, ours and those of torch's own attention, and the distance."""
    case = case_of(seq_len, (127, 0), FP32, device)
    mask = visible(seq_len, *case.window).to(device)

    def sdpa(*qkv: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in qkv)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)

    def cast(function: Callable[..., torch.Tensor], *qkv: torch.Tensor) -> torch.Tensor:
        with test_autograd.autocast(device=device):
            return function(*qkv)

    got = test_autograd.results(partial(cast, attend(form, case)), inputs(form, case)[:3], nullcontext())
    want = test_autograd.results(partial(cast, sdpa), [*case.inputs()[:3]], nullcontext())
    return [x.dtype for x in got], [x.dtype for x in want], from_whole(case, got, want, relative=True)


@pytest.mark.parametrize("form", FORMS)
def test_autocast_does_what_it_does_to_sdpa(pool: RankPool, form: str) -> None:
    for ours, theirs, far in pool.run(autocast_beside_sdpa, form, ROWS * RANKS, DEVICE):
        assert ours == theirs == [BF16] + [FP32] * 3
        assert far < 2 * TOLERANCE[BF16]  # each has its own rounding


# scaled_dot_product_attention on DTensors


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("window", [None, (127, 0)])
def test_sdpa_equals_dense(pool: RankPool, dtype: torch.dtype, window: tuple[int, int] | None) -> None:
    case = replace(whole_case(), seq_len=ROWS * RANKS, dtype=dtype, window=window or (-1, -1))
    assert max(pool.run(test_sdpa.sdpa, case, True, window)) < TOLERANCE[dtype]


# Hugging Face


@pytest.fixture(scope="module")
def models() -> Any:
    """The functions of the tests of transformers, if that is installed."""
    return pytest.importorskip("test_hf")


@pytest.mark.parametrize("name", ["mistral", "gpt_oss"])
def test_models_equal_their_own_eager(pool: RankPool, models: Any, name: str) -> None:
    pool.run(models.tokens_of, 1, 1)  # so that none waits for another that imports transformers
    for found in pool.run(models.attached, name, RANKS, None, None, 16 * RANKS, DEVICE):
        assert max(found) < TOLERANCE[FP32], found


def test_a_model_in_bfloat16_is_as_exact_as_its_own_eager(pool: RankPool, models: Any) -> None:
    pool.run(models.tokens_of, 1, 1)
    for ring, eager in pool.run(models.in_bfloat16, "mistral", RANKS, 16 * RANKS, DEVICE):
        assert all(0 < mine < 1.5 * theirs for mine, theirs in zip(ring, eager, strict=True)), (ring, eager)


# Checkpoints and FSDP2


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("form", FORMS)
def test_a_checkpoint_computes_attention_twice(pool: RankPool, form: str, dtype: torch.dtype) -> None:
    seq_len = ROWS * RANKS
    for far, ran in pool.run(test_autograd.checkpointed, form, {}, None, seq_len, (127, 0), dtype, DEVICE):
        assert far < TOLERANCE[dtype] and ran == 2


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled layers"])
def test_fsdp_accumulates_gradients_of_checkpointed_layers(pool: RankPool, compiled: bool) -> None:
    assert max(pool.run(test_autograd.accumulated, compiled, 32 * RANKS, FP32, DEVICE)) < TOLERANCE[FP32]


def test_documents_and_sinks_beside_fsdp(pool: RankPool) -> None:
    for found in pool.run(test_sinks_in_models.with_fsdp, (RANKS,), ("cp",), 4, FP32, DEVICE):
        assert len(found) == 19 and max(found.values()) < TOLERANCE[FP32], found


@pytest.mark.parametrize("more", [(), ("--pack",)], ids=["stream", "packed"])
def test_training_steps_equal_those_of_one_cpu(pool: RankPool, pools: Pools, more: tuple[str, ...]) -> None:
    flags = (f"--seq-len={64 * RANKS}", "--window=48", "--global-every=2", "--sinks", "--steps=4", *more)
    (alone,) = pools(1).run(test_train.steps, "--dp=1", "--cp=1", *flags)
    for found in pool.run(partial(test_train.steps, device=DEVICE), "--dp=1", f"--cp={RANKS}", *flags):
        test_train.assert_same(alone, found, TOLERANCE[FP32], 10 * TOLERANCE[FP32])


# Plans


@pytest.mark.parametrize("stated", [False, True], ids=["lengths compared", "seq_len given"])
def test_a_plan_equals_one_process(pool: RankPool, stated: bool) -> None:
    found = pool.run(test_parallel.distance_in_a_plan, 32 * RANKS, False, stated, test_parallel.WINDOW, FP32, DEVICE)
    assert max(found) < TOLERANCE[FP32]


def test_a_model_that_knows_nothing_of_a_plan(pool: RankPool) -> None:
    assert max(pool.run(test_plans.distance_from_one_process, 32 * RANKS, FP32, DEVICE)) < TOLERANCE[FP32]
