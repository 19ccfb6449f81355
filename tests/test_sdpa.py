"""``ring_sdpa``: PyTorch's own attention on DTensors, against the same call in one process."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from dtensor_ring_swa.exchange import Exchange
from dtensor_ring_swa.integrations.sdpa import ring_sdpa
from dtensor_ring_swa.schedule import Schedule
from dtensor_ring_swa.testing import RankPool
from dtensor_ring_swa.testing.dense import visible

from cases import HALF, Case, apart, mesh_of

Pools = Callable[[int], RankPool]
TOLERANCE = 1e-10
PLACEMENTS = {"dp": Shard(0), "cp": Shard(2), "tp": Shard(1), "rep": Replicate()}


class Attend(Protocol):
    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, /) -> torch.Tensor: ...


def whole(case: Case) -> list[torch.Tensor]:
    """q, k, v and dout as SDPA takes them, ``[B, H, S, D]``."""
    return [x.transpose(1, 2).contiguous() for x in case.inputs()]


def sharded(case: Case) -> list[DTensor]:
    mesh = mesh_of(case.mesh, case.axes, case.device)
    axes: list[Placement] = [PLACEMENTS[axis] for axis in case.axes]
    shared: list[Placement] = [
        Replicate() if axis == "tp" and case.shared_kv else PLACEMENTS[axis] for axis in case.axes
    ]
    placed = zip(whole(case), (axes, shared, shared, axes), strict=True)
    return [distribute_tensor(x, mesh, placements, src_data_rank=None) for x, placements in placed]


def far(case: Case, attend: Attend, is_causal: bool) -> float:
    """The largest distance of out and gradients from one process's float64 SDPA with a mask in place of the window."""
    q, k, v, dout = sharded(case)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = attend(*leaves)
    assert isinstance(out, DTensor) and out.placements == q.placements
    got = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
    q, k, v, dout = (x.double() for x in whole(case))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    mask = visible(case.seq_len, case.window[0], 0 if is_causal else case.window[1]).to(case.device)
    out = F.scaled_dot_product_attention(*leaves, attn_mask=mask, scale=case.scale, enable_gqa=True)
    want = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
    pairs = [(x.full_tensor(), y) for x, y in zip(got, want, strict=True) if isinstance(x, DTensor)]
    assert len(pairs) == 4 and all(x.shape == y.shape for x, y in pairs)
    return max(apart(x, y, case.dtype in HALF) for x, y in pairs)


# The same numbers as one process

FULL = Case(batch=2, seq_len=12, q_heads=4, kv_heads=2, window=(-1, -1), mesh=(2,))
UNEVEN = replace(FULL, seq_len=11, kv_heads=4, scale=0.3, v_head_dim=6)


def sdpa(case: Case, is_causal: bool, window: tuple[int, int] | None) -> float:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with ring_sdpa(window):
            return F.scaled_dot_product_attention(
                q, k, value=v, is_causal=is_causal, scale=case.scale, enable_gqa=case.q_heads != case.kv_heads
            )

    return far(case, attend, is_causal)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(
    "case",
    [
        FULL,
        UNEVEN,
        replace(FULL, mesh=(4,), seq_len=5),
        replace(FULL, mesh=(2, 2), axes=("cp", "tp")),
        replace(UNEVEN, mesh=(2, 2), axes=("tp", "cp")),
        replace(FULL, kv_heads=1, shared_kv=True, mesh=(2, 2), axes=("cp", "tp")),
        replace(FULL, mesh=(2, 2), axes=("dp", "cp"), seq_len=7),
    ],
)
def test_sdpa_equals_one_process(pools: Pools, case: Case, is_causal: bool) -> None:
    ranks = torch.Size(case.mesh).numel()
    assert max(pools(ranks).run(sdpa, case, is_causal, None)) < TOLERANCE


@pytest.mark.parametrize(("is_causal", "window"), [(True, (3, 0)), (True, (3, 2)), (False, (3, 0)), (False, (4, 2))])
def test_window_and_is_causal_both_hide(pools: Pools, is_causal: bool, window: tuple[int, int]) -> None:
    assert max(pools(2).run(sdpa, replace(UNEVEN, window=window), is_causal, window)) < TOLERANCE


def one_head_without_the_flag() -> float:
    case = replace(FULL, kv_heads=1)
    return far(case, lambda q, k, v: in_ring(q, k, v, enable_gqa=False), True)


def in_ring(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    with ring_sdpa():
        return F.scaled_dot_product_attention(q, k, v, **{"is_causal": True, "enable_gqa": True, **options})


def test_a_single_key_head_is_broadcast_as_sdpa_does(pools: Pools) -> None:
    assert max(pools(2).run(one_head_without_the_flag)) < TOLERANCE


# What passes through


class Below(TorchFunctionMode):
    """A mode below ``ring_sdpa``, which notes the arguments of SDPA and answers None."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            self.given = args, kwargs
            return None
        return func(*args, **kwargs or {})


def passed_through() -> None:
    case = replace(FULL, axes=("tp",))
    for q, k, v, mask in (sharded(case), whole(case), [*whole(FULL)[:2], *sharded(FULL)[2:]]):
        with Below() as below, ring_sdpa((1, 0)):
            out: object = F.scaled_dot_product_attention(q, k, value=v, attn_mask=mask, dropout_p=0.5, enable_gqa=True)
        args, kwargs = below.given
        assert out is None and args[0] is q and args[1] is k and len(args) == 2
        assert kwargs == {"value": v, "attn_mask": mask, "dropout_p": 0.5, "enable_gqa": True} and kwargs["value"] is v


def test_calls_without_a_sharded_sequence_pass_untouched(pools: Pools) -> None:
    pools(2).run(passed_through)


def test_plain_tensors_get_torch_s_own_answer() -> None:
    q, k, v, _ = whole(FULL)
    want = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    with ring_sdpa((1, 0)):
        assert torch.equal(F.scaled_dot_product_attention(q, k, v, enable_gqa=True), want)


def nested() -> tuple[float, float]:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with ring_sdpa((1, 0)), ring_sdpa((3, 0)):
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    return far(replace(FULL, window=(3, 0)), attend, True), far(replace(FULL, window=(1, 0)), attend, True)


def test_the_inner_context_counts(pools: Pools) -> None:
    for near, distant in pools(2).run(nested):
        assert near < TOLERANCE < distant


# What raises


def refusal(name: str) -> str:
    """The message of a call that must raise before anything is sent."""
    q, k, v, _ = sharded(FULL)
    short = distribute_tensor(torch.ones(2, 2, 6, 4, dtype=torch.float64), q.device_mesh, [Shard(2)])
    calls: dict[str, Callable[[], object]] = {
        "mask": lambda: in_ring(
            q, k, v, is_causal=False, attn_mask=distribute_tensor(visible(12, 3, 0), q.device_mesh)
        ),
        "dropout": lambda: in_ring(q, k, v, dropout_p=0.1),
        "lengths": lambda: in_ring(q, short, short),
        "heads": lambda: in_ring(q, k, v, enable_gqa=False),
        "dims": lambda: in_ring(q[0], k[0], v[0]),
        "placements": lambda: in_ring(q, k.redistribute(placements=[Replicate()]), v),
        "scale": lambda: in_ring(q, k, v, scale=float("inf")),
        "mha": lambda: in_module(q),
    }
    with mock.patch.object(Exchange, "__init__", side_effect=AssertionError("something was sent")):
        try:
            calls[name]()
        except (ValueError, NotImplementedError) as error:
            return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
    raise AssertionError("nothing was raised")


def in_module(q: DTensor) -> None:
    module = torch.nn.MultiheadAttention(4, 1, batch_first=True, dtype=torch.float64)
    x = q.detach()[:, 0]
    with ring_sdpa():
        module(x, x, x, need_weights=False)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mask", "NotImplementedError: .*attn_mask.*ring_sdpa\\(window=...\\)"),
        ("dropout", "NotImplementedError: .*dropout_p=0.1.*output projection"),
        ("lengths", "NotImplementedError: .*one length.*k \\[2, 2, 6, 4\\]"),
        ("heads", "ValueError: .*enable_gqa=True, got q \\[2, 4, 12, 4\\]"),
        ("dims", "NotImplementedError: .*\\[B, H, S, D\\]"),
        ("placements", "ValueError: k and v must have the same placements(.|\n)*exchanges dims 1 and 2 of q, k and v"),
        ("scale", "ValueError: scale must be a finite number"),
        ("mha", "NotImplementedError: .*nn.MultiheadAttention"),
    ],
)
def test_what_cannot_be_honoured_raises_on_every_rank(pools: Pools, name: str, words: str) -> None:
    first, second = pools(2).run(refusal, name)
    assert re.match(words, first) and first == second


def test_options_are_checked_when_the_context_is_made() -> None:
    wrong: list[dict[str, Any]] = [
        {"kernel": "fast"},
        {"layout": "other"},
        {"exchange": "none"},
        {"load_balance": "some"},
    ]
    for options in wrong:
        with pytest.raises(ValueError, match=f"{next(iter(options))}"):
            ring_sdpa(**options)
    with pytest.raises(ValueError, match="window"):
        ring_sdpa((-2, 0))


# Recomputation, modes of autograd and torch.compile

WINDOW = replace(FULL, window=(3, 0))


def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q * 1, k * 1, v * 1, enable_gqa=True) * 1


def own(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with ring_sdpa((3, 0)):
        return layer(q, k, v)


def repeated(form: str) -> tuple[float, int]:
    """The distance from one process, and how often attention ran forward."""
    forms: dict[str, Attend] = {
        "in the layer": lambda q, k, v: recomputed(own, q, k, v),
        "context_fn": lambda q, k, v: recomputed(
            layer, q, k, v, context_fn=lambda: (ring_sdpa((3, 0)), ring_sdpa((3, 0)))
        ),
        "compiled in a checkpoint": lambda q, k, v: recomputed(
            torch.compile(own, backend="aot_eager", fullgraph=True), q, k, v
        ),
        "around a graph": lambda q, k, v: around(torch.compile(layer, backend="aot_eager"), q, k, v),
    }
    torch._dynamo.reset()
    forward, ran = Schedule.forward, [0]

    def counted(*args: Any, **kwargs: Any) -> None:
        ran[0] += 1
        forward(*args, **kwargs)

    with mock.patch.object(Schedule, "forward", counted):
        return far(WINDOW, forms[form], True), ran[0]


def recomputed(function: Callable[..., torch.Tensor], *args: torch.Tensor, **options: Any) -> torch.Tensor:
    out = checkpoint(function, *args, use_reentrant=options.pop("use_reentrant", False), **options)
    assert isinstance(out, torch.Tensor)
    return out


def around(function: Callable[..., torch.Tensor], *args: torch.Tensor) -> torch.Tensor:
    with ring_sdpa((3, 0)):
        return function(*args)


@pytest.mark.parametrize(
    ("form", "times"),
    [("in the layer", 2), ("context_fn", 2), ("compiled in a checkpoint", 2), ("around a graph", 1)],
)
def test_checkpoints_and_graphs_that_hold_the_context(pools: Pools, form: str, times: int) -> None:
    for distance, ran in pools(2).run(repeated, form):
        assert distance < TOLERANCE and ran == times


def checkpoint_inside(form: str) -> str:
    """The error of a checkpoint that lies inside of the context, in forward, before anything is sent."""
    torch._dynamo.reset()
    q, k, v, _ = sharded(WINDOW)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    function = torch.compile(layer, backend="aot_eager", fullgraph=True) if form == "graph" else layer
    with mock.patch.object(Exchange, "__init__", side_effect=AssertionError("something was sent")), ring_sdpa((3, 0)):
        layer_runs_without_gradients(*leaves)
        try:
            recomputed(function, *leaves, use_reentrant=form == "reentrant")
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        else:
            raise AssertionError("nothing was raised")
    # On torch 2.11 the checkpoint that Dynamo's error has left lives on in a cycle, and its hooks with it: this process
    # would recompute whatever it saves next.
    gc.collect()
    return said


def layer_runs_without_gradients(*tensors: torch.Tensor) -> None:
    """Not for the eyes of whoever looks for a reentrant checkpoint: gradients are off by the user's will."""
    with mock.patch("dtensor_ring_swa.integrations.sdpa.ring_attention", lambda q, *_, **__: q):
        with torch.no_grad():
            layer(*tensors)
        with torch.inference_mode():
            layer(*tensors)


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ("non-reentrant", "NotImplementedError: ring_sdpa is outside of a checkpoint"),
        ("reentrant", "NotImplementedError: ring_sdpa is outside of a checkpoint"),
        ("graph", "enter ring_sdpa in the compiled function"),
    ],
)
def test_a_checkpoint_inside_of_the_context_raises_in_forward(pools: Pools, form: str, words: str) -> None:
    for message in pools(2).run(checkpoint_inside, form):
        assert words in message
