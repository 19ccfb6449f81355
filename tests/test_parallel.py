"""RingAttention and ContextParallel in parallelize_module plans, against one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from dtensor_ring_swa import ContextParallel, RingAttention, Window, ring_attention
from dtensor_ring_swa.layout import shard
from dtensor_ring_swa.testing import RankPool, dense_attention

from cases import mesh_of

Pools = Callable[[int], RankPool]
WINDOW = (3, 0)


class Layer(nn.Module):
    """An attention core in a module; ``keywords`` says how it is called."""

    def __init__(self, window: tuple[int, int], keywords: bool = False) -> None:
        super().__init__()
        self.core = RingAttention(window)
        self.keywords = keywords

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self.core(q, k=k, v=v) if self.keywords else self.core(q, k, v)


class Pair(NamedTuple):
    out: torch.Tensor
    note: str


class Gives(nn.Module):
    """Returns what ``make`` makes of its inputs, and keeps the inputs as they came."""

    def __init__(self, make: Callable[..., Any]) -> None:
        super().__init__()
        self.make = make
        self.seen: tuple[Any, ...] = ()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.seen = (*args, *kwargs.values())
        return self.make(*self.seen)


def cp_mesh() -> DeviceMesh:
    return mesh_of((dist.get_world_size(),), ("cp",))


def qkv(seq_len: int, heads: int = 2) -> list[torch.Tensor]:
    return list(torch.randn(3, 2, seq_len, heads, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))


def mine(x: torch.Tensor) -> torch.Tensor:
    run = shard(x.shape[1], dist.get_world_size(), dist.get_rank())
    return x[:, run.start : run.stop]


def run_whole(window: tuple[int, int], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """out, dq, dk, dv of the sum of squares of out, from the dense oracle."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    out, _ = dense_attention(leaves[0], leaves[1], leaves[2], window)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]


def run_sharded(layer: nn.Module, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same four from a parallelized layer, of this rank's rows."""
    leaves = [mine(x).clone().requires_grad_() for x in inputs]
    out = layer(*leaves)
    assert not isinstance(out, DTensor)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]


def error(got: list[torch.Tensor], want: list[torch.Tensor]) -> float:
    """The largest difference of any row from the rows of the whole."""
    pairs = [(x, mine(y)) for x, y in zip(got, want, strict=True)]
    assert all(x.shape == y.shape for x, y in pairs)
    return max(float((x - y).abs().amax()) if x.numel() else 0.0 for x, y in pairs)


def distance_in_a_plan(seq_len: int, keywords: bool, stated: bool, window: tuple[int, int]) -> float:
    """How far a layer of the plan with WINDOW is from one process with ``window``."""
    style = ContextParallel(seq_len=seq_len) if stated else ContextParallel()
    layer = parallelize_module(Layer(WINDOW, keywords), cp_mesh(), {"core": style})
    return error(run_sharded(layer, qkv(seq_len)), run_whole(window, qkv(seq_len)))


# On 4 ranks: 2,2,2,1 and, with the last rank empty, 1,1,1,0.
@pytest.mark.parametrize(("ranks", "seq_len"), [(1, 8), (2, 16), (4, 7), (4, 3)])
@pytest.mark.parametrize("keywords", [False, True], ids=["positional", "keywords"])
@pytest.mark.parametrize("stated", [False, True], ids=["lengths compared", "seq_len given"])
def test_plan_equals_one_process(pools: Pools, ranks: int, seq_len: int, keywords: bool, stated: bool) -> None:
    assert max(pools(ranks).run(distance_in_a_plan, seq_len, keywords, stated, WINDOW)) < 1e-10


def test_window_is_not_lost_in_a_plan(pools: Pools) -> None:
    assert max(pools(2).run(distance_in_a_plan, 16, False, False, (-1, 0))) > 1e-3


def two_layers() -> tuple[float, float]:
    """Two layers, run in turn, forward both before backward both."""
    plans = [((3, 0), 2), ((1, 4), 3)]
    layers = [parallelize_module(Layer(w), cp_mesh(), {"core": ContextParallel()}) for w, _ in plans]
    leaves = [[mine(x).clone().requires_grad_() for x in qkv(16, heads)] for _, heads in plans]
    outs = [layer(*inputs) for layer, inputs in zip(layers, leaves, strict=True)]
    grads = [
        torch.autograd.grad(out.square().sum(), inputs)
        for out, inputs in reversed(list(zip(outs, leaves, strict=True)))
    ][::-1]
    first, second = (
        error([out.detach(), *grad], run_whole(window, qkv(16, heads)))
        for out, grad, (window, heads) in zip(outs, grads, plans, strict=True)
    )
    return first, second


def test_modules_with_other_windows_and_heads_do_not_interfere(pools: Pools) -> None:
    assert all(max(errors) < 1e-10 for errors in pools(2).run(two_layers))


def one_layer_after_lengths_change() -> list[float]:
    layer = parallelize_module(Layer(WINDOW), cp_mesh(), {"core": ContextParallel()})
    return [error(run_sharded(layer, qkv(n)), run_whole(WINDOW, qkv(n))) for n in (16, 5, 16)]


def test_a_plan_serves_sequences_of_any_length(pools: Pools) -> None:
    for errors in pools(2).run(one_layer_after_lengths_change):
        assert max(errors) < 1e-10


# What goes in and what comes out


def heads_first() -> float:
    """[B, H, S, D] tensors, for modules that keep the sequence in dim 2."""
    core = Gives(lambda q, k, v: ring_attention(*(x.transpose(1, 2) for x in (q, k, v)), window=WINDOW))
    parallelize_module(core, cp_mesh(), ContextParallel(seq_dim=2))
    out = core(*(mine(x).transpose(1, 2) for x in qkv(16)))
    return error([out], run_whole(WINDOW, qkv(16))[:1])


def test_seq_dim_is_the_modules(pools: Pools) -> None:
    assert max(pools(2).run(heads_first)) < 1e-10


def inputs_as_they_come() -> list[str]:
    core = Gives(lambda *_: None)
    parallelize_module(core, cp_mesh(), ContextParallel())
    core(torch.ones(1, 2), torch.ones(1, 2, dtype=torch.long), "text", None, scale=torch.ones(1, 2))
    return [f"{type(x).__name__} {list(x.shape)}" if isinstance(x, torch.Tensor) else repr(x) for x in core.seen]


def test_floating_tensors_become_dtensors_and_all_else_passes(pools: Pools) -> None:
    want = ["DTensor [1, 4]", "Tensor [1, 2]", "'text'", "None", "DTensor [1, 4]"]
    assert pools(2).run(inputs_as_they_come) == [want] * 2


def outputs_as_they_come() -> list[str]:
    makes: list[Callable[[Any], Any]] = [lambda x: x, lambda x: (x, 1), lambda x: [x, None]]
    kinds = []
    for make in makes:
        core = Gives(make)
        parallelize_module(core, cp_mesh(), ContextParallel())
        out = core(torch.ones(1, 2))
        parts = out if isinstance(out, (tuple, list)) else [out]
        kinds.append(f"{type(out).__name__}: {[type(x).__name__ for x in parts]}")
    return kinds


def test_outputs_come_back_local_in_what_held_them(pools: Pools) -> None:
    want = ["Tensor: ['Tensor']", "tuple: ['Tensor', 'int']", "list: ['Tensor', 'NoneType']"]
    assert pools(2).run(outputs_as_they_come) == [want] * 2


def named_output() -> str:
    core = Gives(lambda x: Pair(x, "note"))
    parallelize_module(core, cp_mesh(), ContextParallel())
    try:
        out = core(torch.ones(1, 2))
    except TypeError as problem:
        return str(problem)
    return f"{type(out).__name__}: {type(out.out).__name__}, {out.note}"


def test_a_named_tuple_comes_back_as_one(pools: Pools) -> None:
    assert pools(2).run(named_output) == ["Pair: Tensor, note"] * 2


# Errors


def refusal(rows: tuple[tuple[int, int, int], ...], seq_len: int | None) -> str:
    """What a layer says to q, k, v of these lengths, by rank."""
    layer = parallelize_module(Layer(WINDOW), cp_mesh(), {"core": ContextParallel(seq_len=seq_len)})
    try:
        layer(*(torch.ones(1, n, 2, 4) for n in rows[dist.get_rank()]))
    except ValueError as problem:
        return str(problem)
    return "accepted"


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_inputs_of_different_lengths_raise_on_every_rank(pools: Pools, bad_rank: int) -> None:
    rows = [(8, 8, 8), (8, 8, 8)]
    rows[bad_rank] = (8, 7, 8)
    said = pools(2).run(refusal, tuple(rows), None)
    assert "inputs differ in length on dim 1" in said[bad_rank] and "[1, 7, 2, 4]" in said[bad_rank]
    assert f"rank {bad_rank} " in said[1 - bad_rank] and "refused" in said[1 - bad_rank]


def test_shards_that_are_not_torch_chunks_raise_on_every_rank(pools: Pools) -> None:
    for said in pools(2).run(refusal, ((3,) * 3, (5,) * 3), None):
        assert "[3, 5]" in said and "[4, 4]" in said


@pytest.mark.parametrize("lengths", [(8, 7, 8), (8, 8, 7), (7, 7, 7)], ids=["k", "v", "all"])
def test_inputs_that_contradict_seq_len_raise(pools: Pools, lengths: tuple[int, int, int]) -> None:
    for said in pools(2).run(refusal, (lengths, lengths), 16):
        assert said != "accepted" and "7" in said


def other_refusals() -> list[str]:
    said = []
    two_axes = mesh_of((1, 2), ("dp", "cp"))
    core = Gives(lambda *_: None)
    parallelize_module(core, cp_mesh(), ContextParallel())
    attempts: list[Callable[[], Any]] = [
        lambda: parallelize_module(Layer(WINDOW), two_axes, {"core": ContextParallel()}),
        lambda: core(torch.ones(1, 2, dtype=torch.long)),
    ]
    for attempt in attempts:
        with pytest.raises(ValueError) as caught:
            attempt()
        said.append(str(caught.value))
    return said


def test_a_mesh_of_two_axes_and_inputs_without_a_sequence_raise(pools: Pools) -> None:
    for mesh, nothing in pools(2).run(other_refusals):
        assert "('dp', 'cp')" in mesh and "mesh['cp']" in mesh
        assert "Gives got no local tensor" in nothing


def test_ring_attention_module_refuses_at_construction() -> None:
    with pytest.raises(ValueError, match="got -2"):
        RingAttention(window=(-2, 0))
    with pytest.raises(ValueError, match="'nope'"):
        RingAttention(kernel="nope")


# Without a plan


def test_module_without_a_plan_is_the_function_with_its_options() -> None:
    q, k, v = qkv(8)
    module = RingAttention((3, 1), scale=0.3, softcap=2.0, kernel="reference", deterministic=True)
    want = ring_attention(q, k, v, window=(3, 1), scale=0.3, softcap=2.0, kernel="reference", deterministic=True)
    assert torch.equal(module(q, k, v), want)
    assert not torch.allclose(RingAttention((3, 1))(q, k, v), want)


def test_module_prints_its_window_and_kernel() -> None:
    assert repr(RingAttention(Window.tokens(4))) == "RingAttention(window=(3, 0), kernel='auto')"
