"""RingAttention and ContextParallel on one module, against one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from dtensor_ring_swa import ContextParallel, Documents, RingAttention, Window, module, ring_attention, shard_sequence
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


def cp_mesh(device: str = "cpu") -> DeviceMesh:
    return mesh_of((dist.get_world_size(),), ("cp",), device)


def qkv(seq_len: int, heads: int = 2, device: str = "cpu") -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return list(torch.randn(3, 2, seq_len, heads, 4, dtype=torch.float64, generator=generator).to(device))


def mine(x: torch.Tensor) -> torch.Tensor:
    run = shard(x.shape[1], dist.get_world_size(), dist.get_rank())
    return x[:, run.start : run.stop]


def run_whole(window: tuple[int, int], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """out, dq, dk, dv of the sum of squares of out, from the dense oracle."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    out, _ = dense_attention(leaves[0], leaves[1], leaves[2], window)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]


def run_sharded(layer: Callable[..., torch.Tensor], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
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


def distance_in_a_plan(
    seq_len: int,
    keywords: bool,
    stated: bool,
    window: tuple[int, int],
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
) -> float:
    """How far a layer of the plan with WINDOW is from one process with ``window``."""
    style = ContextParallel(seq_len=seq_len) if stated else ContextParallel()
    layer = parallelize_module(Layer(WINDOW, keywords), cp_mesh(device), {"core": style})
    inputs = qkv(seq_len, device=device)
    return error(run_sharded(layer, [x.to(dtype) for x in inputs]), run_whole(window, inputs))


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


def in_a_layout(layout: str, stated: bool) -> float:
    """Shards of another layout, which the plan or the module states."""
    model = Layer((-1, 0))
    if stated:
        model.core.layout = layout
    parallelize_module(model, cp_mesh(), {"core": ContextParallel(layout=None if stated else layout)})
    assert model.core.layout == layout
    leaves = [x.clone().requires_grad_() for x in shard_sequence(cp_mesh(), *qkv(16), layout=layout)]
    out = model(*leaves)
    got = [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]
    want = shard_sequence(cp_mesh(), *run_whole((-1, 0), qkv(16)), layout=layout)
    return max(float((x - y).abs().max()) for x, y in zip(got, want, strict=True))


@pytest.mark.parametrize("layout", ["striped", "zigzag"])
@pytest.mark.parametrize("stated", [False, True], ids=["by the plan", "by the module"])
def test_a_layout_reaches_the_attention(pools: Pools, layout: str, stated: bool) -> None:
    assert max(pools(2).run(in_a_layout, layout, stated)) < 1e-10


def transformed() -> list[float]:
    """A layer with a plan compiled into one graph, also with a checkpoint in it; under one; and as a deep copy."""
    layer = parallelize_module(Layer(WINDOW), cp_mesh(), {"core": ContextParallel()})
    want = run_whole(WINDOW, qkv(16))

    class Replayed(nn.Module):
        def forward(self, *inputs: torch.Tensor) -> Any:
            return checkpoint(layer, *inputs, use_reentrant=False)

    compiled = [torch.compile(each, fullgraph=True, backend="aot_eager") for each in (Replayed(), layer)]
    return [error(run_sharded(each, qkv(16)), want) for each in (*compiled, Replayed(), copy.deepcopy(layer))]


def test_plans_survive_checkpointing_copying_and_compiling(pools: Pools) -> None:
    for errors in pools(2).run(transformed):
        assert max(errors) < 1e-10


# What goes in and what comes out


def described(x: Any) -> str:
    return f"{type(x).__name__} {list(x.shape)}" if isinstance(x, torch.Tensor) else repr(x)


def heads_first() -> float:
    """[B, H, S, D] tensors, for modules that keep the sequence in dim 2."""
    core = Gives(lambda q, k, v: ring_attention(*(x.transpose(1, 2) for x in (q, k, v)), window=WINDOW))
    parallelize_module(core, cp_mesh(), ContextParallel(seq_dim=2))
    out = core(*(mine(x).transpose(1, 2) for x in qkv(16)))
    return error([out], run_whole(WINDOW, qkv(16))[:1])


def test_seq_dim_is_the_modules(pools: Pools) -> None:
    assert max(pools(2).run(heads_first)) < 1e-10


def viewed_in_the_module() -> float:
    """Shards with gaps, in a module that joins their first dims, as a linear layer does."""
    core = parallelize_module(Gives(lambda x: x.view(4, *x.shape[2:])), cp_mesh(), ContextParallel(seq_dim=2))
    x = qkv(7)[0]
    return error([core(mine(x).transpose(1, 2))], [x.transpose(1, 2).flatten(0, 1)])


def test_a_module_may_view_its_inputs(pools: Pools) -> None:
    assert pools(2).run(viewed_in_the_module) == [0.0, 0.0]


def inputs_as_they_come() -> list[str]:
    core = Gives(lambda *_: None)
    parallelize_module(core, cp_mesh(), ContextParallel())
    core(torch.ones(1, 2), torch.ones(1, 2, dtype=torch.long), "text", None, scale=torch.ones(1, 2))
    return [described(x) for x in core.seen]


def test_floating_tensors_become_dtensors_and_all_else_passes(pools: Pools) -> None:
    want = ["DTensor [1, 4]", "Tensor [1, 2]", "'text'", "None", "DTensor [1, 4]"]
    assert pools(2).run(inputs_as_they_come) == [want] * 2


def packed_inputs() -> list[str]:
    core = RingAttention()
    seen: list[str] = []
    keep: Any = lambda q, k, v, **options: seen.extend(described(x) for x in (q, k, v, options["cu_seqlens"]))  # noqa: E731
    core.forward = keep
    parallelize_module(core, cp_mesh(), ContextParallel())
    core(torch.ones(4, 2, 8), torch.ones(4, 1, 8), v=torch.ones(4, 1, 6), cu_seqlens=torch.tensor([0, 3, 8]))
    return seen


def test_packed_tensors_of_ring_attention_have_the_sequence_in_front(pools: Pools) -> None:
    want = ["DTensor [8, 2, 8]", "DTensor [8, 1, 8]", "DTensor [8, 1, 6]", "Tensor [3]"]
    assert pools(2).run(packed_inputs) == [want] * 2


class Named(nn.Module):
    """A forward with names and defaults, which keeps its inputs as they came."""

    def forward(
        self, x: Any, mask: Any = None, *, tokens: Any = None, position_ids: Any = None, **others: Any
    ) -> tuple[Any, ...]:
        self.seen = [described(each) for each in (x, mask, tokens, position_ids, *others.values())]
        self.position_ids = position_ids
        return x, {"mask": mask}


def named_inputs() -> list[list[str]]:
    """By position and name, with a dim each, integers too; what a call leaves out is skipped."""
    x, mask, tokens, extra = torch.ones(1, 2), torch.ones(3, 3, 2), torch.ones(1, 2, dtype=torch.long), torch.ones(2, 3)
    seen = []
    for inputs in ({0: 1, 1: -1}, {"x": 1, "mask": 2, "tokens": 1}, {"x": 1, "extra": 0}):
        core = Named()
        parallelize_module(core, cp_mesh(), ContextParallel(inputs=inputs))
        out, held = core(x, mask=mask, tokens=tokens, extra=extra)
        assert described(out) == "Tensor [1, 2]" and described(held["mask"]) == "Tensor [3, 3, 2]"
        seen.append(core.seen)
        core(x, None, extra=extra)
        seen.append(core.seen)
    return seen


def test_inputs_by_position_and_name(pools: Pools) -> None:
    x, mask, extra = "DTensor [1, 4]", "DTensor [3, 3, 4]", "Tensor [2, 3]"
    want = [
        [x, mask, "Tensor [1, 2]", "None", extra],
        [x, "None", "None", "None", extra],
        [x, mask, "DTensor [1, 4]", "None", extra],
        [x, "None", "None", "None", extra],
        [x, "Tensor [3, 3, 2]", "Tensor [1, 2]", "None", "DTensor [4, 3]"],
        [x, "None", "None", "None", "DTensor [4, 3]"],
    ]
    assert pools(2).run(named_inputs) == [want] * 2


def made_positions(layout: str, use_local_input: bool, given: torch.Tensor | None) -> tuple[str, str, list[Any]]:
    core = Named()
    style = ContextParallel(
        inputs={"x": 1}, positions="position_ids", layout=layout, use_local_input=use_local_input, seq_len=None
    )
    parallelize_module(core, cp_mesh(), style)
    core(torch.ones(2, 4), position_ids=given) if given is not None else core(torch.ones(2, 4))
    ids = core.position_ids
    return core.seen[0], described(ids), (ids.to_local() if isinstance(ids, DTensor) else ids).tolist()


@pytest.mark.parametrize(("layout", "want"), [("contiguous", ([0, 1, 2, 3], [4, 5, 6, 7])),
                                              ("zigzag", ([0, 1, 6, 7], [2, 3, 4, 5]))])  # fmt: skip
def test_positions_are_made_and_replaced(pools: Pools, layout: str, want: tuple[list[int], ...]) -> None:
    made = pools(2).run(made_positions, layout, True, None)
    assert made == [("Tensor [2, 4]", "Tensor [1, 4]", [rows]) for rows in want]
    counted_locally = torch.arange(4, dtype=torch.int32).expand(2, 4)
    made = pools(2).run(made_positions, layout, False, counted_locally)
    assert made == [("DTensor [2, 8]", "DTensor [2, 8]", [rows, rows]) for rows in want]


def outputs_as_they_come() -> list[str]:
    makes: list[Callable[[Any], Any]] = [lambda x: x, lambda x: (x, 1), lambda x: [x, None], lambda x: Pair(x, "note")]
    kinds = []
    for make in makes:
        core = Gives(make)
        parallelize_module(core, cp_mesh(), ContextParallel())
        out = core(torch.ones(1, 2))
        parts = out if isinstance(out, (tuple, list)) else [out]
        kinds.append(f"{type(out).__name__}: {[type(x).__name__ for x in parts]}")
    return kinds


def test_outputs_come_back_local_in_what_held_them(pools: Pools) -> None:
    want = ["Tensor: ['Tensor']", "tuple: ['Tensor', 'int']", "list: ['Tensor', 'NoneType']", "Pair: ['Tensor', 'str']"]
    assert pools(2).run(outputs_as_they_come) == [want] * 2


def ready_made() -> float:
    """DTensors on the context-parallel axis go in and come out."""
    layer = parallelize_module(Layer(WINDOW), cp_mesh(), {"core": ContextParallel()})
    leaves = [distribute_tensor(x, cp_mesh(), [Shard(1)]).requires_grad_() for x in qkv(7)]
    out = layer(*leaves)
    assert isinstance(out, DTensor) and out.shape[1] == 7
    grads = torch.autograd.grad(out.square().sum(), leaves)
    return error([cast(DTensor, x.detach()).to_local() for x in (out, *grads)], run_whole(WINDOW, qkv(7)))


def test_dtensors_pass_as_they_are(pools: Pools) -> None:
    assert max(pools(2).run(ready_made)) < 1e-10


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


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ((8, 7, 8), "differ in length on dim 1"),
        ((8, 8, 7), "differ in length on dim 1"),
        ((7, 7, 7), "of seq_len=16 tokens this rank has 8, not 7"),
    ],
    ids=["k", "v", "all"],
)
def test_inputs_that_contradict_seq_len_raise(pools: Pools, lengths: tuple[int, int, int], message: str) -> None:
    for said in pools(2).run(refusal, (lengths, lengths), 16):
        assert message in said and "[1, 7, 2, 4]" in said


def said_to(rank_inputs: list[tuple[Any, ...]], style: ContextParallel) -> str:
    """What a module says that is passed these inputs, by rank."""
    core = parallelize_module(Gives(lambda *x: x), cp_mesh(), style)
    try:
        core(*rank_inputs[dist.get_rank()])
    except ValueError as problem:
        return str(problem)
    return "accepted"


ROWS = torch.ones(1, 2)


# Inputs of rank 1, while rank 0 passes ROWS: neither may hang, and both must raise.
@pytest.mark.parametrize(
    ("inputs", "style", "own", "peers"),
    [
        ((ROWS, ROWS), ContextParallel(), "disagree on how many inputs", "disagree on how many inputs"),
        ((ROWS.double(),), ContextParallel(), "disagree on dtypes", "disagree on dtypes"),
        ((ROWS.to("meta"),), ContextParallel(), "kinds of device", "kinds of device"),
        ((torch.ones(3, 2),), ContextParallel(), "sizes of other dims", "sizes of other dims"),
        ((ROWS.clone().requires_grad_(),), ContextParallel(), "need of gradients", "need of gradients"),
        ((ROWS, Documents([0, 1, 4])), ContextParallel(), "or Documents: ranks [1]", "or Documents: ranks [1]"),
        ((torch.ones(1, 2, dtype=torch.long),), ContextParallel(), "no tensor to shard on the sequence", "refused"),
        ((torch.ones(3),), ContextParallel(), "of shape [3] has no dim 1", "refused"),
        (("text",), ContextParallel(inputs={0: 1}), "input 0 must be a tensor, got str", "refused"),
        ((), ContextParallel(inputs={0: 1}), "input 0 was not passed", "refused"),
        ((None,), ContextParallel(inputs={0: 1}), "no tensor to shard on the sequence", "refused"),
        ((ROWS, "x"), ContextParallel(inputs={0: 1}, positions=1), "local tensor of integers, got a str", "refused"),
        ((ROWS, ROWS), ContextParallel(inputs={0: 1}, positions=1), "got a torch.float32 Tensor", "refused"),
    ],
)
def test_one_ranks_wrong_inputs_raise_on_every_rank(
    pools: Pools, inputs: tuple[Any, ...], style: ContextParallel, own: str, peers: str
) -> None:
    right = (ROWS, torch.ones(1, 2, dtype=torch.long)) if style.positions else (ROWS,)
    good, bad = pools(2).run(said_to, [right, inputs], style)
    assert own in bad and bad.startswith("Gives got ")
    assert peers in good and good.startswith("Gives got 0: [1, 2]")


def other_mode_on_rank_1(mode: str) -> str:
    layer = parallelize_module(Layer(WINDOW), cp_mesh(), {"core": ContextParallel()})
    leaf, here = torch.ones(1, 2, 2, 4, requires_grad=True), dist.get_rank() == 1
    modes = {
        "autocast": lambda: torch.autocast("cpu", torch.bfloat16, enabled=here),
        "its dtype": lambda: torch.autocast("cpu", torch.bfloat16 if here else torch.float16),
        "gradients": lambda: torch.set_grad_enabled(here),
    }
    try:
        with modes[mode]():
            layer(leaf, leaf, leaf)
    except ValueError as problem:
        return str(problem)
    return "accepted"


@pytest.mark.parametrize("mode", ["autocast", "its dtype", "gradients"])
def test_ranks_in_different_modes_raise(pools: Pools, mode: str) -> None:
    for said in pools(2).run(other_mode_on_rank_1, mode):
        assert "the ranks disagree on dtypes, " in said and "autocast, or Documents: ranks [1]" in said


def nested_on_rank_1() -> str:
    core = parallelize_module(Gives(lambda *x: x), cp_mesh(), ContextParallel())
    try:
        core(torch.nested.nested_tensor([torch.ones(2)]) if dist.get_rank() == 1 else ROWS)
    except (ValueError, RuntimeError) as problem:
        return f"{type(problem).__name__}: {problem}"
    return "accepted"


def test_an_error_of_any_kind_on_one_rank_raises_on_every_rank(pools: Pools) -> None:
    good, bad = pools(2).run(nested_on_rank_1)
    assert bad.startswith("RuntimeError") and "size" in bad
    assert "rank 1 of the context-parallel group refused" in good


def test_a_length_that_the_layout_cannot_deal_raises_on_every_rank(pools: Pools) -> None:
    for said in pools(2).run(said_to, [(torch.ones(1, 3),)] * 2, ContextParallel(layout="zigzag")):
        assert "0: [1, 3]: layout='zigzag' on 2 ranks needs a multiple of 4 tokens, got 6" in said


def wrong_dtensors() -> list[str]:
    mesh = cp_mesh()
    wholes: list[Any] = [
        distribute_tensor(ROWS, mesh, [Replicate()]),
        DTensor.from_local(ROWS, mesh, [Partial()]),
        DTensor.from_local(ROWS, mesh, [Shard(1)], shape=torch.Size((1, 5)), stride=(5, 1)),
    ]
    said = [said_to([(x,)] * 2, ContextParallel()) for x in wholes]
    return [*said, said_to([(ROWS, distribute_tensor(ROWS, mesh, [Shard(1)]))] * 2, ContextParallel())]


def test_dtensors_that_hold_no_shard_raise(pools: Pools) -> None:
    for replicated, partial, longer, mixed in pools(2).run(wrong_dtensors):
        assert "must be Shard(1) there" in replicated and "must be Shard(1) there" in partial
        assert "DTensors of 5 tokens hold 4" in longer
        assert "the inputs lie differently: ['local', \"('cp',)\"]" in mixed


def partial_output() -> str:
    core = Gives(lambda x: x.sum(1))
    parallelize_module(core, cp_mesh(), ContextParallel())
    try:
        core(torch.ones(1, 2))
    except ValueError as problem:
        return str(problem)
    return "accepted"


def test_a_sum_over_the_sequence_does_not_leave_as_one_ranks_part(pools: Pools) -> None:
    for said in pools(2).run(partial_output):
        assert said.startswith("Gives: an output is Partial") and "redistribute()" in said


def refused_when_applied() -> list[str]:
    dp_cp, unnamed = mesh_of((1, 2), ("dp", "cp")), mesh_of((1, 2), ("dp", "context"))
    striped = RingAttention()
    striped.layout = "striped"
    attempts: list[tuple[nn.Module, DeviceMesh, ContextParallel]] = [
        (RingAttention(), unnamed, ContextParallel()),
        (RingAttention(), dp_cp, ContextParallel(axis="sequence")),
        (RingAttention(), dp_cp, ContextParallel(inputs={"query": 1})),
        (RingAttention(), dp_cp, ContextParallel(inputs={3: 1})),
        (RingAttention(), dp_cp, ContextParallel(seq_dim=2)),
        (RingAttention(), dp_cp, ContextParallel(inputs={0: 1, "q": 1})),
        (RingAttention(), dp_cp, ContextParallel(positions="position_ids")),
        (Named(), dp_cp, ContextParallel(inputs={"x": 1}, positions=0)),
        (striped, dp_cp, ContextParallel(layout="zigzag")),
        (nn.Sequential(striped, RingAttention()), dp_cp, ContextParallel()),
        (RingAttention(load_balance="zigzag"), dp_cp, ContextParallel(layout="striped")),
        (RingAttention(), dp_cp, ContextParallel(inputs={"q": 0, "k": 0, "v": 0})),
        (RingAttention(), dp_cp, ContextParallel(use_local_input=True)),
    ]
    said = []
    for model, mesh, style in attempts:
        with pytest.raises(ValueError) as caught:
            parallelize_module(model, mesh, style)
        said.append(str(caught.value))
    assert not striped._forward_pre_hooks and striped.layout == "striped"
    return said


def test_what_cannot_be_applied_raises_when_applied(pools: Pools) -> None:
    want = [
        "ContextParallel on RingAttention: the mesh has the axes ('dp', 'context') and none is named 'cp'",
        "none is named 'sequence'",
        "there is no input 'query'; forward takes q, k, v, sinks, cu_seqlens, scale",
        "there is no input 3",
        "seq_dim=2, but q, k and v are [B, S, H, D]",
        "names an input twice",
        "there is no input 'position_ids'",
        "input 'x' cannot both carry the sequence and be replaced",
        "layout='zigzag' contradicts the layouts of the RingAttention inside: ['striped']",
        "['contiguous', 'striped']",
        "load_balance='zigzag' re-deals contiguous shards",
        "inputs={'q': 0, 'k': 0, 'v': 0}, but q, k and v are [B, S, H, D]",
        "use_local_input=True would let it attend to this rank's shard alone",
    ]
    for said in pools(2).run(refused_when_applied):
        assert len(said) == len(want)
        assert not [(has, text) for has, text in zip(want, said, strict=True) if has not in text]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": (-2, 0)}, "got -2"),
        ({"kernel": "nope"}, "'nope'"),
        ({"layout": "diagonal"}, "'diagonal'"),
        ({"load_balance": "some"}, "'some'"),
        ({"layout": "zigzag", "load_balance": "striped"}, "re-deals contiguous shards"),
        ({"softcap": -1.0}, "got -1.0"),
        ({"scale": float("inf")}, "got inf"),
        ({"sink_tokens": -1}, "got -1"),
    ],
)
def test_ring_attention_module_refuses_at_construction(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RingAttention(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": "diagonal"}, "'diagonal'"),
        ({"inputs": ["q"]}, r"inputs must map names or positions to sequence dims, .* got \['q'\]"),
        ({"inputs": {"q": "1"}}, r"sequence dims must be integers, .* inputs=\{'q': '1'\}"),
        ({"seq_dim": None}, "sequence dims must be integers, got seq_dim=None"),
        ({"seq_len": 8.0}, r"seq_len must be a number of tokens >= 0, got 8\.0"),
    ],
)
def test_options_that_cannot_be_raise_in_the_style(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ContextParallel(**options)


# Without a plan


def test_module_without_a_plan_is_the_function_with_its_options() -> None:
    q, k, v = qkv(8)
    module = RingAttention((3, 1), scale=0.3, softcap=2.0, kernel="reference", deterministic=True)
    want = ring_attention(q, k, v, window=(3, 1), scale=0.3, softcap=2.0, kernel="reference", deterministic=True)
    assert torch.equal(module(q, k, v), want)
    assert not torch.allclose(RingAttention((3, 1))(q, k, v), want)


def test_module_passes_every_option_on(monkeypatch: pytest.MonkeyPatch) -> None:
    passed: dict[str, Any] = {}
    monkeypatch.setattr(module, "ring_attention", lambda *inputs, **options: passed.update(options, inputs=inputs))
    options = {
        "window": Window(3, 1), "scale": 0.3, "softcap": 2.0, "kernel": "reference", "deterministic": True,
        "layout": "striped", "load_balance": "none", "exchange": "ring", "sink_tokens": 4,
    }  # fmt: skip
    inputs, sinks, cu_seqlens = tuple(qkv(8)), torch.ones(2), torch.tensor([0, 8])
    RingAttention(**options)(*inputs, sinks=sinks, cu_seqlens=cu_seqlens)
    assert passed.keys() == {*options, "inputs", "sinks", "cu_seqlens"}
    assert all(passed[name] == value for name, value in options.items())
    assert passed["inputs"] == inputs and passed["sinks"] is sinks and passed["cu_seqlens"] is cu_seqlens


def test_module_prints_its_window_and_kernel_and_what_is_unusual() -> None:
    assert repr(RingAttention(Window.tokens(4))) == "RingAttention(window=(3, 0), kernel='auto')"
    assert repr(RingAttention(layout="zigzag")) == "RingAttention(window=(-1, 0), kernel='auto', layout='zigzag')"


def run_on_new_groups(stores: str) -> None:
    rank = dist.get_rank()
    for turn in range(2):
        dist.destroy_process_group()
        dist.init_process_group("gloo", init_method=f"file://{stores}/{turn}", rank=rank, world_size=4)
        for _ in range(turn):
            # Names of groups are counted: the second turn's are others.
            dist.new_group([0, 1, 2, 3])
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
        q, k, v = qkv(8)
        want, _ = dense_attention(q, k, v, WINDOW)
        sharded = [distribute_tensor(x, mesh, [Shard(1), Shard(2)], src_data_rank=None) for x in (q, k, v)]
        out = cast(DTensor, ring_attention(*sharded, window=WINDOW))
        layer = parallelize_module(Layer(WINDOW), mesh, {"core": ContextParallel()})
        local = [DTensor.from_local(x.to_local(), mesh["tp"], [Shard(2)]) for x in sharded]
        of_plan = DTensor.from_local(layer(*local).to_local(), mesh, [Shard(1), Shard(2)])
        assert out.device_mesh is mesh
        for found in (out, of_plan):
            assert torch.allclose(found.full_tensor(), want, atol=1e-10)


def test_groups_that_are_made_anew_are_the_ones_used(tmp_path: Path) -> None:
    # A mesh of the new groups equals the old one, whose groups are gone: what is cached must not be taken for it.
    pool = RankPool(4)
    try:
        pool.run(run_on_new_groups, str(tmp_path))
    finally:
        pool.close()
