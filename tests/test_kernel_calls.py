"""Every kernel on calls of several blocks (documents, sink tokens, rings), against a dense float64 mask.

Where there is no GPU, Triton's programs run in its interpreter, in a process of their own: Triton
chooses when they are defined.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from dtensor_ring_swa import Window, make_plan
from dtensor_ring_swa.band import Band
from dtensor_ring_swa.block import Call
from dtensor_ring_swa.kernels import KERNELS, Request
from dtensor_ring_swa.kernels.few_keys import few_keys
from dtensor_ring_swa.kernels.intervals import intervals_of_keys, intervals_of_queries
from dtensor_ring_swa.kernels.split_keys import split_keys
from dtensor_ring_swa.layout import Run, runs
from dtensor_ring_swa.testing import RankPool
from dtensor_ring_swa.visible import blocks_between

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CPU = torch.device("cpu")
# (dtype, largest relative error in the norm)
DTYPES = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 1.2e-2, "float16": 2e-3}
NOTHING = Call(0, 1, 0, 1, ())


@dataclass(frozen=True)
class Problem:
    """A call and the tensors for it."""

    call: Call
    dtype: str = "float32"
    batch: int = 1
    groups: int = 1
    group: int = 2
    head_dim: int = 8
    v_head_dim: int = 8
    softcap: float = 0.0
    sinks: bool = False
    strided: bool = False
    device: str = DEVICE

    @property
    def request(self) -> Request:
        dtype = getattr(torch, self.dtype)
        return Request(torch.device(self.device), dtype, self.head_dim, self.v_head_dim, 0.3, self.softcap)


def shown(call: Call) -> torch.Tensor:
    """How often each query row sees each key row."""
    seen = torch.zeros(call.q_len, call.k_len, dtype=torch.int)
    for b in call.blocks:
        part = seen[b.q_start : b.q_stop, b.k_start : b.k_stop]
        distance = torch.arange(part.shape[1]) - torch.arange(part.shape[0])[:, None]
        part += (distance >= b.band.lower) & (distance <= b.band.upper)
    return seen


def covered(bounds: torch.Tensor, count: int) -> torch.Tensor:
    """How often the intervals of each row hold each of ``count`` rows of the other side."""
    lo, hi = bounds.unbind(1)
    columns = torch.arange(count)
    return ((columns >= lo[..., None]) & (columns < hi[..., None])).sum(0, dtype=torch.int)


def tensors(problem: Problem) -> tuple[torch.Tensor, ...]:
    """dout, q, k, v and the sinks of a problem; strided ones are slices of larger tensors with heads first."""
    generator = torch.Generator().manual_seed(problem.call.q_len * 31 + problem.call.k_len)
    heads = problem.groups * problem.group

    def draw(rows: int, heads: int, width: int) -> torch.Tensor:
        shape = (problem.batch, rows, heads, width)
        if problem.strided:
            shape = (problem.batch, heads + 1, rows + 3, width)
        x = torch.randn(shape, generator=generator).to(problem.device, getattr(torch, problem.dtype))
        return x.transpose(1, 2)[:, 2:-1, :-1] if problem.strided else x

    m, n, d, e = problem.call.q_len, problem.call.k_len, problem.head_dim, problem.v_head_dim
    sinks = torch.randn(heads, generator=generator).to(problem.device)
    # An absent sink is a legal value.
    sinks[0] = float("-inf")
    return draw(m, heads, e), draw(m, heads, d), draw(n, problem.groups, d), draw(n, problem.groups, e), sinks


def computed(name: str, problem: Problem) -> list[torch.Tensor]:
    """out, lse, dq, dk, dv of a kernel. They start as NaN: every element has to be written."""
    kernel, request = KERNELS[name], problem.request
    dout, q, k, v, sinks = tensors(problem)
    out, dq = (torch.full_like(x, float("nan")) for x in (dout, q))
    dk, dv = (torch.full_like(x, float("nan"), dtype=kernel.partial_dtype(x.dtype)) for x in (k, v))
    wide = torch.promote_types(q.dtype, torch.float32)
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), float("nan"), dtype=wide, device=q.device)
    kernel.forward(request, q, k, v, problem.call, out, lse, sinks if problem.sinks else None)
    kernel.backward(request, dout, q, k, v, out, lse, problem.call, dq, dk, dv)
    return [out, lse, dq, dk, dv]


def dense(problem: Problem) -> list[torch.Tensor]:
    """The same with the whole mask in float64."""
    dout, *inputs, sinks = (x.double() for x in tensors(problem))
    q, k, v = (x.requires_grad_() for x in inputs)
    keys, values = (x.repeat_interleave(problem.group, 2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, keys) * problem.request.scale
    if problem.softcap:
        scores = problem.softcap * torch.tanh(scores / problem.softcap)
    scores = scores.masked_fill(shown(problem.call).to(q.device) == 0, float("-inf"))
    lse = scores.logsumexp(-1)
    if problem.sinks:
        lse = torch.logaddexp(lse, sinks[:, None])
    weights = (scores - lse.masked_fill(lse == float("-inf"), 0.0).unsqueeze(-1)).exp()
    out = torch.einsum("bhij,bjhd->bihd", weights, values)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


def errors(name: str, problem: Problem) -> dict[str, float]:
    """Each result's relative error in the norm."""
    found = {}
    names = ("out", "lse", "dq", "dk", "dv")
    for what, got, want in zip(names, computed(name, problem), dense(problem), strict=True):
        if what == "lse":
            assert torch.equal(got.isinf(), want.isinf()), "lse: other rows see no key"
            got, want = got.nan_to_num(neginf=0.0, nan=1e9), want.nan_to_num(neginf=0.0)
        # Where terms cancel, rounding is relative to the terms: about 1 an element for these inputs.
        found[what] = float((got.double() - want).norm() / want.norm().clamp(min=0.3 * want.numel() ** 0.5))
    return found


def supports(name: str, problem: Problem) -> str | None:
    return KERNELS[name].supports(problem.request)


@pytest.fixture(scope="module")
def check() -> Iterator[Callable[[str, Problem], None]]:
    """Check a problem with a kernel where it can run; skip the test where it cannot."""
    pool = RankPool(1, timeout=300)

    def run(function: Callable[[str, Problem], Any], name: str, problem: Problem) -> Any:
        if name != "triton" or DEVICE == "cuda":
            return function(name, problem)
        with mock.patch.dict(os.environ, TRITON_INTERPRET="1"):
            return pool.run(function, name, problem)[0]

    def check(name: str, problem: Problem) -> None:
        if reason := run(supports, name, problem):
            pytest.skip(f"{name}: {reason}")
        found = run(errors, name, problem)
        # A nan is no less than anything.
        assert all(error < DTYPES[problem.dtype] for error in found.values()), found

    yield check
    pool.close()


@st.composite
def calls(draw: st.DrawFn, most: int = 120) -> Call:
    """A rank's calls: of a halo plan, or of a ring step between any two ranks in any layout."""
    ranks = draw(st.integers(1, 3))
    rank, other = draw(st.integers(0, ranks - 1)), draw(st.integers(0, ranks - 1))
    window = Window(*draw(st.tuples(*[st.one_of(st.integers(0, 40), st.just(-1))] * 2)))
    sink_tokens = draw(st.sampled_from([0, 1, 3, 50]))
    layout = draw(st.sampled_from(["halo", "contiguous", "striped", "zigzag"]))
    seq_len = 2 * ranks * draw(st.integers(1, most // (2 * ranks)))
    boundaries = (0, *sorted(draw(st.lists(st.integers(0, seq_len), max_size=5))), seq_len)
    if layout == "halo":
        plan = make_plan(seq_len, ranks, rank, window, boundaries, sink_tokens)
        return draw(st.sampled_from(plan.interior_calls + plan.boundary_calls))
    queries, keys = (list(runs(layout, seq_len, ranks, each)) for each in (rank, other))
    blocks = blocks_between(queries, keys, window, boundaries, sink_tokens)
    # All rows of a step, also those that see nothing.
    return replace(NOTHING, q_stop=sum(map(len, queries)), k_stop=sum(map(len, keys)), blocks=tuple(blocks))


# More key rows than a tile of the split, and more queries than a chunk.
SINK_TOKENS = Call.of(make_plan(1200, 1, 0, (3, 0), sink_tokens=20).blocks)
# A few configurations, since flash and triton compile programs for each.
CONFIGURATIONS = (
    Problem(NOTHING, "float32", 1, 1, 2, 8, 8, sinks=True),
    Problem(NOTHING, "float32", 2, 2, 1, 20, 7, softcap=2.0, strided=True),
    Problem(NOTHING, "float32", 1, 1, 2, 8, 8, softcap=1e30),
    Problem(NOTHING, "float16", 1, 2, 4, 64, 64, sinks=True),
    Problem(NOTHING, "float16", 2, 1, 3, 40, 64, softcap=2.0, sinks=True),
    Problem(NOTHING, "bfloat16", 1, 1, 8, 64, 64, sinks=True, strided=True),
    Problem(NOTHING, "bfloat16", 2, 2, 1, 128, 128),
    Problem(NOTHING, "float64", 2, 1, 2, 3, 5, softcap=2.0, sinks=True, strided=True),
)


def label(problem: Problem) -> str:
    return f"{problem.dtype}-{problem.head_dim}"


@pytest.mark.parametrize("problem", CONFIGURATIONS, ids=label)
@pytest.mark.parametrize("name", list(KERNELS))
@settings(max_examples=5, phases=set(Phase) - {Phase.shrink})
@given(call=calls())
# Windows and sink tokens of documents that end inside a tile.
@example(call=Call.of(make_plan(120, 1, 0, (5, 0), (0, 30, 37, 90, 120), 2).blocks))
# Sink tokens of one document, on one rank and on the second of two, whose first rows see no window beside them.
@example(call=Call.of(make_plan(150, 1, 0, (5, 0), sink_tokens=4).blocks))
@example(call=Call.of(make_plan(150, 2, 1, (9, 2), sink_tokens=16).boundary_calls[0].blocks))
# Rows in three blocks.
@example(
    call=Call.of(blocks_between([Run(0, 30), Run(90, 120)], [Run(0, 30), Run(60, 90)], Window(70, 0), (0, 120), 3))
)
# More than one tile of everything.
@example(call=Call.single(150, 140, Band(-90, 30)))
def test_calls(check: Callable[[str, Problem], None], name: str, problem: Problem, call: Call) -> None:
    check(name, replace(problem, call=call))


@pytest.mark.parametrize("name", list(KERNELS))
def test_keys_that_very_many_queries_see(check: Callable[[str, Problem], None], name: str) -> None:
    dtype = "float32" if name == "reference" else "float16"
    check(name, Problem(SINK_TOKENS, dtype, batch=2, groups=1, group=1, head_dim=8, v_head_dim=16))


def test_split_keys_are_shared_out_whole() -> None:
    rest, split = split_keys(SINK_TOKENS, CPU)
    assert split is not None and split.rows.tolist() == list(range(20))
    seen = shown(SINK_TOKENS).T
    assert torch.equal(covered(rest, SINK_TOKENS.q_len), seen.index_fill(0, split.rows, 0))
    # The parts of a key row, summed as their gradients are.
    parts = covered(split.bounds, SINK_TOKENS.q_len)
    assert parts.sum(1).max() <= 512
    assert torch.equal(split.sums(parts[None, :, :, None].float())[0, :, :, 0].int(), seen[split.rows])


@settings(max_examples=300)
@given(call=calls(400))
@example(call=Call.of(make_plan(150, 1, 0, (5, 0), sink_tokens=4).blocks))
def test_few_keys_are_told_from_the_others(call: Call) -> None:
    few = few_keys(call, CPU)
    if few is None:
        return
    seen = shown(call)
    assert torch.equal(covered(few.bounds, call.k_len), seen)
    among = torch.zeros(call.k_len, dtype=torch.bool)
    among[few.keys] = True
    assert among.sum() <= 16 and not covered(few.bounds[1:], call.k_len)[:, ~among].any()
    assert torch.equal(shown(few.others), covered(few.bounds[:1], call.k_len))


def test_sink_tokens_of_one_document_are_few_keys() -> None:
    for ranks in (1, 2, 3):
        plan = make_plan(300, ranks, ranks - 1, (20, 0), sink_tokens=4)
        (call,) = plan.interior_calls + plan.boundary_calls
        few = few_keys(call, CPU)
        assert few is not None and few.keys == slice(0, 4)
    assert few_keys(Call.of(make_plan(300, 1, 0, (20, 0), sink_tokens=17).blocks), CPU) is None
    assert few_keys(Call.of(make_plan(300, 1, 0, (20, 0)).blocks), CPU) is None


@settings(max_examples=300)
@given(call=calls(400))
def test_intervals_show_what_the_blocks_show(call: Call) -> None:
    seen = shown(call)
    assert seen.max() <= 1, "a row sees a key twice"
    assert torch.equal(covered(intervals_of_queries(call, CPU), call.k_len), seen)
    assert torch.equal(covered(intervals_of_keys(call, CPU), call.q_len), seen.T)


def test_tiles_walk_little_that_none_of_their_rows_sees() -> None:
    # Documents of all lengths with sink tokens: neighbours see keys that lie far apart.
    edges = (0, 900, 910, 4000, 4100, 7000, 7001, 7002, 12000)
    call = Call.of(make_plan(12000, 1, 0, (100, 0), edges, 4).blocks)
    bounds = intervals_of_queries(call, CPU)
    walked = 0
    for start in range(0, call.q_len, 64):
        for lo, hi in bounds[:, :, start : start + 64]:
            if (lo < hi).any():
                walked += 64 * int(hi.max() - lo[lo < hi].min())
    pairs = sum(block.pairs for block in call.blocks)
    assert len(bounds) <= 4 and pairs < walked < 2 * pairs
