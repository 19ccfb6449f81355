"""torch.compile: one graph, right numbers, no needless recompilation, refusals that can be read, warm caches."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch._inductor.config
from functorch.compile import aot_function, nop
from torch._dynamo.exc import Unsupported
from torch._dynamo.utils import counters

from dtensor_ring_swa import Documents, make_plan, ring_attention
from dtensor_ring_swa.ops import attention, attention_backward
from dtensor_ring_swa.options import Names
from dtensor_ring_swa.testing import RankPool

import cases
from cases import HALF, Case, apart, mesh_of
from forms import FORMS, Attend, attend, case_of, cp_mesh, distance, inputs

Pools = Callable[[int], RankPool]
TOLERANCE = 1e-12
ALONE = Case(q_heads=4, kv_heads=2, window=(3, 1))


def compile_anew(function: Any, **options: Any) -> Any:
    """Compile, after forgetting what was compiled and counted before."""
    torch._inductor.config.compile_threads = 1  # or each rank starts a pool of compilers
    torch._dynamo.reset()
    counters.clear()
    return torch.compile(function, **{"fullgraph": True, "backend": "aot_eager", **options})


def graphs() -> int:
    """How many graphs Dynamo has traced since ``compile_anew``."""
    return counters["stats"]["unique_graphs"]


def between(function: Attend) -> Attend:
    """Attention with pointwise operations around it, which a compiler fuses, and which change nothing."""
    return lambda q, k, v: function((q + q) / 2, k.transpose(1, 2).mul(2).transpose(1, 2) / 2, v) * 4 / 4


# Numbers and recompilation


def lengths_compiled(
    form: str,
    window: tuple[int, int],
    lengths: tuple[int, ...],
    mark: bool,
    options: dict[str, Any],
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
) -> list[tuple[float, int]]:
    """The distance from the oracle, and the graphs so far, after each length, with new data each time."""
    cases = [replace(case_of(n, window, dtype, device), seed=seed) for seed, n in enumerate(lengths)]
    function = compile_anew(between(attend(form, cases[0])), **options)
    return [(distance(form, case, function, mark), graphs()) for case in cases]


@pytest.mark.parametrize(
    ("form", "window"),
    [("dtensor", (3, 0)), ("dtensor", (-1, 0)), ("plan", (-1, 0)), ("plain", (3, 0))],
    ids=["dtensor, halo", "dtensor, dealt ring", "plan, dealt ring", "plain, halo"],
)
def test_one_graph_serves_new_data_and_two_serve_all_lengths(pools: Pools, form: str, window: tuple[int, int]) -> None:
    # The second length makes Dynamo trace again, with a length that is symbolic.
    for found in pools(2).run(lengths_compiled, form, window, (16, 16, 24, 40), False, {}):
        assert max(far for far, _ in found) < TOLERANCE
        assert [traced for _, traced in found] == [1, 1, 2, 2]


@pytest.mark.parametrize("form", FORMS)
def test_a_length_marked_dynamic_is_traced_once(pools: Pools, form: str) -> None:
    for found in pools(2).run(lengths_compiled, form, (3, 1), (16, 24, 8), True, {}):
        assert max(far for far, _ in found) < TOLERANCE
        assert [traced for _, traced in found] == [1, 1, 1]


# With DTensors as inputs, dynamic=True fails in torch itself: on (q + q) alone, too.
@pytest.mark.parametrize("form", ["plan", "plain"])
def test_dynamic_true_makes_the_window_symbolic_too(pools: Pools, form: str) -> None:
    for found in pools(2).run(lengths_compiled, form, (3, 1), (16, 24), False, {"dynamic": True}):
        assert max(far for far, _ in found) < TOLERANCE
        assert found[0][1] == found[-1][1]


def alone(options: dict[str, Any], lengths: tuple[int, ...], case: Case = ALONE) -> list[float]:
    """Compiled without a mesh: the largest difference from eager, by length, with new data each time."""
    function = between(lambda q, k, v: ring_attention(q, k, v, window=case.window, kernel=case.kernel))
    compiled, worst = compile_anew(function, **options), []
    for seed, n in enumerate(lengths):
        q, k, v, dout = replace(case, seq_len=n, seed=seed).inputs()
        given = [x.requires_grad_() for x in (q, k, v)]
        results = []
        for call in (compiled, function):
            out = call(q, k, v)
            results.append([out.detach(), *torch.autograd.grad(out, given, dout)])
        worst.append(max(apart(x, y, case.dtype in HALF) for x, y in zip(*results, strict=True)))
    return worst


@pytest.mark.parametrize("dynamic", [None, True])
def test_without_a_mesh(dynamic: bool | None) -> None:
    assert max(alone({"dynamic": dynamic}, (9, 9, 12, 30, 17))) < TOLERANCE
    assert graphs() <= 2


def run_compiled(case: Case) -> dict[str, float]:
    """``errors`` of a case whose calls are compiled into one graph."""
    eager = cases.ring_attention
    cases.ring_attention = compile_anew(eager)
    try:
        return cases.errors(case)
    finally:
        cases.ring_attention = eager


PACKED = Case(batch=2, seq_len=16, q_heads=4, kv_heads=2, window=(5, 0), cu_seqlens=(0, 5, 16), sink_tokens=1)


@pytest.mark.parametrize(
    "case",
    [
        replace(PACKED, sinks="plain"),
        replace(PACKED, sinks="plain", plain=True),
        replace(PACKED, cu_seqlens=((0, 5, 16), (0, 11, 16)), axes=("dp", "cp"), mesh=(2, 1)),
        replace(PACKED, sinks="dtensor", axes=("cp", "tp"), mesh=(1, 2), shared_kv=True),
        replace(PACKED, cu_seqlens=None, sink_tokens=0, layout="striped", softcap=2.0, scale=0.3),
        replace(PACKED, window=(-1, 0), cu_seqlens=None, sink_tokens=0, plain=True, load_balance="none"),
    ],
    ids=["documents and sinks", "plain", "documents by batch row", "shared heads", "striped", "not dealt"],
)
def test_what_eager_can_do(pools: Pools, case: Case) -> None:
    for found in pools(2).run(run_compiled, case):
        assert max(found.values()) < TOLERANCE


def packed_alone(cu_seqlens: Any, sinks: torch.Tensor | None = None) -> torch.Tensor:
    q, k, v, _ = PACKED.inputs()
    compiled = compile_anew(ring_attention)
    return compiled(q, k, v, window=PACKED.window, cu_seqlens=cu_seqlens, sinks=sinks)


def test_boundaries_in_all_their_forms() -> None:
    given = [0, 5, 16]
    want = ring_attention(*PACKED.inputs()[:3], window=PACKED.window, cu_seqlens=given)
    for form in (given, torch.tensor(given), Documents(given), [given, given], torch.tensor([given, given])):
        assert torch.equal(packed_alone(form), want)
    assert not torch.allclose(packed_alone([0, 4, 16]), want)


def test_new_boundaries_are_new_data() -> None:
    q, k, v, _ = PACKED.inputs()
    compiled = compile_anew(ring_attention)
    for given in ([0, 5, 16], [0, 9, 16], [0, 16, 16]):
        out = compiled(q, k, v, window=(5, 0), cu_seqlens=torch.tensor(given))
        assert torch.equal(out, ring_attention(q, k, v, window=(5, 0), cu_seqlens=given))
    assert graphs() == 1


# Inductor; more of it with the caches, below


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler to fuse operations on CPU")
def test_inductor_fuses_around_attention() -> None:
    assert max(alone({"backend": "inductor"}, (9,))) < TOLERANCE


# The ops' registration


def run_opcheck() -> None:
    mesh = mesh_of((2,), ("cp",))
    calls = ((2, 1), True, False), ((-1, 0), True, False), ((2, 0), False, True), ((2, 0), False, False)
    for window, packed, in_graph in calls:
        case = case_of(8, window)
        q, k, v = (x.requires_grad_() for x in inputs("plain", case)[:3])
        sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)
        more = (sinks, torch.tensor([0, 3, 8]) if packed else None)
        names = Names("auto", "contiguous", "auto", "auto", False, in_graph=in_graph).text
        options = ([*window, 1, 8], [0.5, 0.0], names, mesh.get_group().group_name)
        torch.library.opcheck(attention, (q, k, v, *more, *options))
        with torch.no_grad():
            results = attention(q, k, v, *more, *options)
        shards = [None if x is None else x.detach() for x in (torch.randn_like(q), q, k, v, *more)]
        torch.library.opcheck(attention_backward, (*shards, *results, *options))


def test_opcheck_of_both_ops_on_shards(pools: Pools) -> None:
    # All of opcheck's tests. They compare the halo too: rows that nobody sends must not be left to chance.
    pools(2).run(run_opcheck)


def kept_rows_of(window: tuple[int, int], sink_tokens: int) -> tuple[int, int, int]:
    """Rows that this rank keeps for backward of what others sent: in eager mode, in a graph, and what its plan says."""
    mesh = mesh_of((3,), ("cp",))
    q, k, v = inputs("plain", case_of(12, window))[:3]
    rows = []
    for in_graph in (False, True):
        names = Names("auto", "contiguous", "none", "halo", False, in_graph=in_graph).text
        tokens = [*window, sink_tokens, 12]
        kept = attention(q, k, v, None, None, tokens, [0.5, 0.0], names, mesh.get_group().group_name)[2]
        rows.append(kept.numel() // (k[:, 0].numel() + v[:, 0].numel()))
    plan = make_plan(12, 3, torch.distributed.get_rank(), window, sink_tokens=sink_tokens)
    return rows[0], rows[1], plan.received_rows


def test_only_a_graph_keeps_rows_that_nobody_sent(pools: Pools) -> None:
    for (window, sink_tokens), in_graph in {((3, 0), 0): 3, ((5, 2), 0): 7, ((2, 0), 1): 3}.items():
        found = pools(3).run(kept_rows_of, window, sink_tokens)
        assert all(eager == planned <= in_graph for eager, _, planned in found)
        assert [graph for _, graph, _ in found] == [in_graph] * 3
        assert found[0][0] == window[1]


def lengths_traced_without_dynamo() -> list[float]:
    """The distance from the oracle for each length, of one graph of AOTAutograd alone, with symbolic lengths."""
    traced = aot_function(attend("dtensor", case_of(12)), nop, dynamic=True)
    return [distance("dtensor", case_of(seq_len), traced) for seq_len in (12, 16, 8)]


def test_a_symbolic_length_needs_no_dynamo(pools: Pools) -> None:
    assert max(map(max, pools(2).run(lengths_traced_without_dynamo))) < TOLERANCE


# Refusals


def compiled_refusal(form: str, seq_len: int | None, change: dict[str, Any], fullgraph: bool, rows: int = 7) -> str:
    """What a compiled call says, or ``"right"`` where it answers, and rightly."""
    case = case_of(rows)
    function = attend(form, case, seq_len)
    if change:
        function = partial(ring_attention, **change)
    compiled = compile_anew(function, fullgraph=fullgraph)
    try:
        return "right" if distance(form, case, compiled) < TOLERANCE else "wrong"
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}"


@pytest.mark.parametrize(("form", "seq_len"), [("dtensor", None), ("plan", 7), ("plain", 7)])
def test_unequal_shards_stay_out_of_a_graph(pools: Pools, form: str, seq_len: int | None) -> None:
    for said in pools(2).run(compiled_refusal, form, seq_len, {}, True):
        first, second = said.splitlines()[:2]
        assert first.startswith("Unsupported") and "must divide over its ranks, got 7 tokens on 2 ranks; pad" in second


def test_unequal_shards_are_refused_by_the_op_where_none_knew(pools: Pools) -> None:
    for said in pools(2).run(compiled_refusal, "plain", None, {}, True):
        assert said.startswith("ValueError: in a graph of torch.compile shards must be of one length")
        assert "pad the sequence to 8 tokens" in said


def test_otherwise_attention_on_unequal_shards_runs_eagerly(pools: Pools) -> None:
    assert pools(2).run(compiled_refusal, "dtensor", None, {}, False) == ["right"] * 2


def graphs_around_unequal_shards(form: str, seq_len: int | None) -> list[list[str]]:
    """What is called in the graphs of a call between other operations."""
    found: list[list[str]] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        found.append(sorted({str(node.target) for node in graph.graph.nodes if node.op.startswith("call")}))
        return graph

    function = compile_anew(between(attend(form, case_of(7), seq_len)), fullgraph=False, backend=backend)
    assert distance(form, case_of(7), function) < TOLERANCE
    return found


@pytest.mark.parametrize(("form", "seq_len"), [("dtensor", None), ("plain", 7)])
def test_no_part_of_attention_on_unequal_shards_is_in_a_graph(pools: Pools, form: str, seq_len: int | None) -> None:
    for found in pools(2).run(graphs_around_unequal_shards, form, seq_len):
        assert len(found) == 2, found
        assert all("built-in function" in target or target in ("mul", "transpose") for part in found for target in part)


def test_other_refusals_can_be_read_as_well(pools: Pools) -> None:
    for said in pools(2).run(compiled_refusal, "dtensor", None, {"window": (-2, 0)}, True):
        assert "window left must be >= 0 tokens" in said.splitlines()[1]
    for said in pools(2).run(compiled_refusal, "dtensor", None, {"window": (-2, 0)}, False):
        assert said.startswith("ValueError: window left must be >= 0 tokens")
    # What lies on a mesh is checked by the rule, while the op is traced.
    for said in pools(2).run(compiled_refusal, "dtensor", None, {"sinks": torch.ones(3)}, True, 8):
        assert "sinks must have a logit for each of the [4] query heads, got 3" in said


@pytest.mark.parametrize(
    ("cu_seqlens", "sinks", "words"),
    [
        (torch.tensor([0.0, 16.0]), None, "cu_seqlens must be int32 or int64"),
        (torch.tensor([[0, 16]] * 3), None, r"got \[3, 2\] for 2 rows"),
        (
            torch.tensor([0, 15]),
            None,
            "cu_seqlens must end at the 16 tokens",
        ),  # by the op: while tracing there are no values
        (None, torch.ones(1), "a logit for each of the"),
        (None, torch.ones(4, dtype=torch.long), "sinks must be a float tensor"),
    ],
)
def test_boundaries_and_sinks_are_checked_in_a_graph_too(cu_seqlens: Any, sinks: Any, words: str) -> None:
    with pytest.raises((ValueError, Unsupported), match=words):
        packed_alone(cu_seqlens, sinks)


def with_own_mesh(right: bool) -> str:
    """DTensors with ``mesh=``, which says nothing new or contradicts them."""
    case = case_of(8)
    mesh = cp_mesh(case) if right else mesh_of((1, 2), ("one", "two"))["one"]
    compiled = compile_anew(partial(ring_attention, window=case.window, mesh=mesh))
    try:
        return "right" if distance("dtensor", case, compiled) < TOLERANCE else "wrong"
    except Unsupported as problem:
        return str(problem)


def test_a_mesh_that_contradicts_dtensors_is_refused(pools: Pools) -> None:
    assert pools(2).run(with_own_mesh, True) == ["right"] * 2
    for said in pools(2).run(with_own_mesh, False):
        assert "leave mesh= out for DTensors" in said.splitlines()[1]


def uneven_after_even() -> list[str]:
    """Compile for 12 tokens on 2 ranks, then pass 13: rank 1's shard has 6 rows both times."""
    function, said = compile_anew(attend("dtensor", case_of(12))), []
    for n in (12, 13):
        try:
            said.append(f"{distance('dtensor', case_of(n), function, mark=True) < TOLERANCE}")
        except Exception as problem:
            said.append(type(problem).__name__)
    return said


def test_no_rank_runs_an_old_graph_while_the_other_refuses(pools: Pools) -> None:
    # A length that is not dynamic has no guard in torch: there rank 1 would run the old graph, and wait for rank 0.
    assert pools(2).run(uneven_after_even) == [["True", "Unsupported"]] * 2


# Warm caches


@dataclass(frozen=True)
class Program:
    """A compiled call, and whether torch is known to serve it from its cache."""

    form: str
    case: Case
    grad: bool = True
    cached: bool = True


SHAPES = Case(batch=2, seq_len=16, q_heads=4, kv_heads=2, window=(5, 1))
SHARED = replace(SHAPES, axes=("cp", "tp"), shared_kv=True)
ON_2_RANKS = [
    *(Program(form, SHAPES, cached=form != "plan") for form in FORMS),
    # Each rank uses a key/value head of its own. Without gradients there is nothing for a C++ compiler.
    Program("dtensor", replace(SHARED, mesh=(1, 2)), grad=False),
]
ON_4_RANKS = [
    Program("dtensor", replace(SHARED, mesh=(2, 2)), grad=False),
    Program("dtensor", replace(SHAPES, mesh=(2, 2), axes=("dp", "cp"))),
    Program("plan", replace(SHAPES, mesh=(2, 2), axes=("rep", "cp")), cached=False),
]


def run_programs(programs: list[Program], cache: str) -> list[tuple[float, int]]:
    """The distance of each from the oracle, and how often torch's cache had its graph."""
    found = []
    with mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=cache):
        for program in programs:
            function = compile_anew(attend(program.form, program.case), backend="inductor")
            far = distance(program.form, program.case, function, grad=program.grad)
            found.append((far, counters["aot_autograd"]["autograd_cache_hit"]))
    return found


def check_programs(pool: RankPool, programs: list[Program], cache: Path, warm: bool) -> None:
    for found in pool.run(run_programs, programs, str(cache), timeout=120):
        for program, (far, hits) in zip(programs, found, strict=True):
            assert far < TOLERANCE, f"{program}, warm={warm}"
            assert not warm or hits or not program.cached, f"{program} was not in the cache"


def test_a_program_that_runs_again_finds_its_graphs(tmp_path: Path) -> None:
    for warm in (False, True):
        pool = RankPool(2)
        try:
            check_programs(pool, ON_2_RANKS, tmp_path, warm)
        finally:
            pool.close()


def test_a_warm_cache_serves_no_rank_the_graph_of_another(pools: Pools, tmp_path: Path) -> None:
    # Here the processes stay, since they cost seconds to start; what was compiled in them is forgotten.
    for warm in (False, True):
        check_programs(pools(4), ON_4_RANKS, tmp_path, warm)
