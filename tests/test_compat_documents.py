"""Packed documents through other systems' signatures, and faults seen elsewhere, against the dense oracle."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from dtensor_ring_swa import Documents, Window, ring_attention, shard_sequence
from dtensor_ring_swa.compat import ring_flash_attn, ring_swa
from dtensor_ring_swa.testing import RankPool, dense_attention

from cases import Case, errors, expected, mesh_of, on_mesh, on_shards

Pools = Callable[[int], RankPool]
TOLERANCE = 1e-10
WITHOUT_SHRINKING = set(Phase) - {Phase.shrink}

FORMS = {"func": ("q", "k", "v"), "kvpacked_func": ("q", "kv"), "qkvpacked_func": ("qkv",)}
SHARES = {"ring_flash_attn_varlen": "contiguous", "zigzag_ring_flash_attn_varlen": "zigzag"}
LLAMA3 = "llama3_flash_attn_varlen"
BETWEEN = {
    **{name: ["cu_seqlens", "max_seqlen"] for name in SHARES},
    LLAMA3: ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "heads_k_stride", "local_k_slice"],
}

windows = st.tuples(*[st.one_of(st.just(-1), st.integers(0, 12))] * 2)


def ranks_here() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def local_part(name: str, documents: list[int], x: torch.Tensor) -> torch.Tensor:
    """This rank's ``[T_local, ...]`` of ``[T, ...]``: a share of each document, or a shard of the whole."""
    if not dist.is_initialized():
        return x
    mesh = mesh_of((dist.get_world_size(),), ("cp",))
    if name == LLAMA3:
        return shard_sequence(mesh, x, dim=0)
    shares = [shard_sequence(mesh, x[a:b], dim=0, layout=SHARES[name]) for a, b in pairwise(documents)]
    return torch.cat(shares)


def arguments(name: str, documents: list[int], causal: bool) -> list[Any]:
    """What stands between the tensors and the options on this rank."""
    rank, ranks = ranks_here()
    cu_seqlens = torch.tensor(documents, dtype=torch.int32)
    if name != LLAMA3:
        local = cu_seqlens // ranks
        return [local, int(local.diff().max())]
    *prepared, rows = ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens(cu_seqlens, causal, rank, ranks)
    return [*prepared, 1, rows]


def call(name: str, form: str, tensors: list[torch.Tensor], between: list[Any], **options: Any) -> Any:
    q, k, v = tensors
    given = [q, k, v]
    if form != "func":
        given = [q, torch.stack((k, v), 1)] if form == "kvpacked_func" else [torch.stack((q, k, v), 1)]
    return getattr(ring_flash_attn, f"{name}_{form}")(*given, *between, **options)


def varlen_distance(name: str, form: str, documents: list[int], options: dict[str, Any]) -> float:
    """The largest distance from the oracle of out, lse and gradients on this rank."""
    heads = 4 if form == "qkvpacked_func" else 2
    case = Case(seq_len=documents[-1], q_heads=4, kv_heads=heads, v_head_dim=4 if form != "func" else 3)
    window = Window.flash(options.get("window_size", (-1, -1)), options.get("causal", False))
    whole = [x.requires_grad_() for x in case.inputs()[:3]]
    dout = case.inputs()[3]
    mask = (window.left, window.right)
    q, k, v = whole
    want, want_lse = dense_attention(q, k, v, mask, options.get("softmax_scale"), cu_seqlens=documents)
    results = [want[0].detach(), want_lse[0].detach().T, *(x[0] for x in torch.autograd.grad(want, whole, dout))]

    leaves = [local_part(name, documents, x.detach()[0]).clone().requires_grad_() for x in whole]
    between = arguments(name, documents, options.get("causal", False))
    out, lse, nothing = call(name, form, leaves, between, return_attn_probs=True, **options)
    assert nothing is None and torch.equal(out, call(name, form, leaves, between, **options))
    got = [out, lse.T, *torch.autograd.grad(out, leaves, local_part(name, documents, dout[0]))]
    mine = [local_part(name, documents, x) for x in results]
    assert [x.shape for x in got] == [x.shape for x in mine]
    return max(float((x - y).detach().abs().max()) if x.numel() else 0.0 for x, y in zip(got, mine, strict=True))


@st.composite
def calls(draw: st.DrawFn) -> tuple[int, str, list[int]]:
    """Ranks, a family, and boundaries that it can take."""
    ranks, name = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from(list(BETWEEN)))
    if name == LLAMA3:
        total = ranks * draw(st.integers(1, 6))
        return ranks, name, [0, *sorted(draw(st.lists(st.integers(0, total), max_size=5))), total]
    width = ranks * (2 if name.startswith("zigzag") else 1)
    lengths = draw(st.lists(st.integers(0, 3), min_size=1, max_size=4).filter(any))
    return ranks, name, [0, *(width * sum(lengths[: i + 1]) for i in range(len(lengths)))]


@settings(max_examples=80, phases=WITHOUT_SHRINKING)
@given(
    sizes=calls(), form=st.sampled_from(list(FORMS)), causal=st.booleans(), window_size=windows,
    scale=st.sampled_from([None, 0.3]),
)  # fmt: skip
@example(sizes=(2, LLAMA3, [0, 5, 9, 16]), form="func", causal=True, window_size=(-1, -1), scale=None)
@example(sizes=(4, LLAMA3, [0, 3, 4, 11, 16]), form="func", causal=False, window_size=(-1, -1), scale=None)
@example(sizes=(2, LLAMA3, [0, 8, 16]), form="func", causal=True, window_size=(3, -1), scale=None)
def test_varlen_families(
    pools: Pools, sizes: tuple[int, str, list[int]], form: str, causal: bool, window_size: tuple[int, int],
    scale: float | None,
) -> None:  # fmt: skip
    ranks, name, documents = sizes
    options = {"causal": causal, "window_size": window_size, "softmax_scale": scale}
    assert max(pools(ranks).run(varlen_distance, name, form, documents, options)) < TOLERANCE


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", BETWEEN)
def test_varlen_on_one_device(name: str, form: str) -> None:
    assert varlen_distance(name, form, [0, 6, 8, 16], {"causal": True, "window_size": (3, -1)}) < TOLERANCE


def test_prepared_boundaries() -> None:
    cu_seqlens = torch.tensor([0, 3, 4, 11, 16], dtype=torch.int32)
    prepare = ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens
    queries, keys, longest_q, longest_k, rows = prepare(cu_seqlens, True, 2, 4)
    assert (queries.tolist(), keys.tolist(), longest_q, longest_k, rows) == ([0, 3, 4], [0, 7, 8], 3, 7, slice(4, 12))
    queries, keys, longest_q, longest_k, rows = prepare(cu_seqlens, False, 2, 4)
    assert (queries.tolist(), keys.tolist(), longest_q, longest_k, rows) == ([0, 3, 4], [0, 7, 12], 3, 7, slice(4, 16))
    assert queries.dtype == keys.dtype == torch.int32
    with pytest.raises(ValueError, match="16 tokens do not divide over 3 ranks"):
        prepare(cu_seqlens, True, 0, 3)


# Refusals


def refusal(name: str, wrong: str, everywhere: bool) -> str:
    """What this rank says when rank 1 alone, or every rank, passes something wrong."""
    x = torch.randn(8, 2, 4, generator=torch.Generator().manual_seed(0))
    between, options = (
        arguments(name, [0, 8, 16, 24] if name == LLAMA3 else [0, 6, 24], True),
        dict[str, Any](causal=True),
    )
    if everywhere or dist.get_rank() == 1:
        if wrong == "dropout":
            options["dropout_p"] = 0.5
        elif wrong == "end":
            between[0] = torch.tensor([0, 9])
        elif wrong == "max_seqlen":
            between[1 if name != LLAMA3 else 2] = 1
        elif wrong == "documents" and name == LLAMA3:
            between = arguments(name, [0, 3, 16, 24], True)
        elif wrong == "documents":
            between[0] = torch.tensor([0, 4, 8], dtype=torch.int32)
        elif wrong == "kind":
            between[0] = None
        elif wrong == "window":
            options["window_size"] = (2, 0)
    try:
        call(name, "func", [x, x, x], between, **options)
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}"
    return ""


@pytest.mark.parametrize(
    ("wrong", "own"),
    [
        ("dropout", "NotImplementedError: dropout"),
        ("end", "= 9 tokens, got sizes [8, 2, 4]"),
        ("max_seqlen", " tokens of the longest document"),
        ("kind", "Error: "),
    ],
)
@pytest.mark.parametrize("name", BETWEEN)
def test_a_refusal_on_one_rank_raises_on_all(pools: Pools, name: str, wrong: str, own: str) -> None:
    messages = pools(3).run(refusal, name, wrong, False)
    assert own in messages[1]
    assert all("rank 1 of the context-parallel group refused" in m for m in (messages[0], messages[2]))
    assert all(own in message for message in pools(3).run(refusal, name, wrong, True))


@pytest.mark.parametrize("name", BETWEEN)
def test_ranks_that_differ_raise_on_all(pools: Pools, name: str) -> None:
    wanted = {"documents": "the ranks disagree on cu_seqlens", "window": "the ranks disagree on the window's left"}
    if name == LLAMA3:
        wanted["documents"] = "rank 0 of the group has keys [0, 8) for a document that, by the boundaries of all ranks"
    for wrong, words in wanted.items():
        assert all(words in message for message in pools(3).run(refusal, name, wrong, False)), wrong


def zigzag_of_odd_shares() -> str:
    x, cu_seqlens = torch.randn(5, 2, 4), torch.tensor([0, 2, 5])
    try:
        call("zigzag_ring_flash_attn_varlen", "func", [x, x, x], [cu_seqlens, 3], causal=True)
    except ValueError as problem:
        return str(problem)
    return ""


def test_zigzag_shares_must_be_even(pools: Pools) -> None:
    for message in pools(2).run(zigzag_of_odd_shares):
        assert "needs a multiple of 4 tokens, got 6" in message


def llama3_prepared_for_another_mask() -> str:
    x = torch.randn(4, 2, 4)
    try:
        call(LLAMA3, "func", [x, x, x], arguments(LLAMA3, [0, 8], True), causal=False)
    except ValueError as problem:
        return str(problem)
    return ""


def test_llama3_refuses_boundaries_prepared_for_another_mask(pools: Pools) -> None:
    for message in pools(2).run(llama3_prepared_for_another_mask):
        assert "rank 0 of the group has keys [0, 4)" in message and "with the causal of this call" in message


def test_what_the_varlen_families_refuse() -> None:
    x, cu_seqlens = torch.randn(8, 2, 4), torch.tensor([0, 8])
    function = ring_flash_attn.ring_flash_attn_varlen_kvpacked_func
    with pytest.raises(ValueError, match=r"kv must be \[tokens, 2, heads, head_dim\], got sizes \[8, 2, 4\]"):
        function(x, x, cu_seqlens, 8)
    with pytest.raises(ValueError, match=r"cu_seqlens must be \[N \+ 1\], got sizes \[1, 2\]"):
        call("ring_flash_attn_varlen", "func", [x, x, x], [cu_seqlens[None], 8])
    with pytest.raises(ValueError, match="do not describe documents around"):
        call(LLAMA3, "func", [x, x, x], [torch.tensor([0, 3, 8]), torch.tensor([0, 4, 8]), 8, 8, 1, slice(0, 8)])
    with pytest.raises(ValueError, match=r"local_k_slice must be a slice .* got slice\(None, 8, None\)"):
        call(LLAMA3, "func", [x, x, x], [cu_seqlens, cu_seqlens, 8, 8, 1, slice(8)])
    with pytest.raises(ValueError, match="max_seqlen must be an integer or None, got '8'"):
        call("ring_flash_attn_varlen", "func", [x, x, x], [cu_seqlens, "8"])
    for rank, ranks in ((0, 0), (2, 2)):
        with pytest.raises(ValueError, match=f"got rank={rank} and world_size={ranks}"):
            ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens(cu_seqlens, True, rank, ranks)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", BETWEEN)
def test_signatures_of_the_varlen_families(name: str, form: str) -> None:
    function = getattr(ring_flash_attn, f"{name}_{form}")
    options = list(inspect.signature(ring_flash_attn.ring_flash_attn_func).parameters)[3:]
    assert list(inspect.signature(function).parameters) == [*FORMS[form], *BETWEEN[name], *options]
    assert function.__name__ == f"{name}_{form}" and function.__name__ in ring_flash_attn.__all__
    assert pickle.loads(pickle.dumps(function)) is function
    assert all(f"    {x}: " in (function.__doc__ or "") for x in inspect.signature(function).parameters)


# Faults seen elsewhere, through ring_attention and through the adapter that can say the same


def swa_errors(case: Case) -> float:
    """``ring_swa``'s function for the case, which is causal and limited, against the oracle."""
    mesh = mesh_of(case.mesh, case.axes)
    *whole, dout = case.inputs()
    leaves = [shard_sequence(mesh, x).clone().requires_grad_() for x in whole]
    name = "ring_streaming_llm_attn" if case.sink_tokens else "ring_sliding_window_attn"
    documents = {} if case.cu_seqlens is None else {"cu_seqlens": Documents(case.cu_seqlens)}
    function = getattr(ring_swa, name + "_varlen" * len(documents))
    out = function(*leaves, case.window[0], cp_group=mesh.get_group(), **documents)
    whole = [x.requires_grad_() for x in whole]
    want, _ = dense_attention(*whole, case.window, sink_tokens=case.sink_tokens, cu_seqlens=case.cu_seqlens)
    got = [out.detach(), *torch.autograd.grad(out, leaves, shard_sequence(mesh, dout))]
    mine = [shard_sequence(mesh, x) for x in (want.detach(), *torch.autograd.grad(want, whole, dout))]
    assert all(torch.isfinite(x).all() for x in got)
    return max(float((x - y).abs().max()) for x, y in zip(got, mine, strict=True))


FAULTS = {
    "no leak across documents": Case(seq_len=16, window=(7, 0), cu_seqlens=(0, 5, 9, 16)),
    "no leak without a limit": Case(seq_len=16, window=(-1, 0), cu_seqlens=(0, 5, 9, 16)),
    "a sink outside the window": Case(seq_len=8, window=(2, 0), cu_seqlens=(0, 3, 8), sink_tokens=1),
    "documents within shards": Case(seq_len=16, mesh=(4,), window=(5, 0), cu_seqlens=(0, 3, 4, 11, 16), sink_tokens=1),
    "rows that begin with different tokens": Case(seq_len=8, batch=2, window=(1, 0), sink_tokens=1),
    "the same on four ranks": Case(seq_len=8, batch=2, mesh=(4,), window=(1, 0), sink_tokens=1),
    # Rank 1 holds documents of one token only.
    "a rank of padding": Case(seq_len=8, window=(3, 0), cu_seqlens=(0, 4, 5, 6, 7, 8), sink_tokens=1),
    "a rank in one padding document": Case(seq_len=16, mesh=(4,), window=(3, 0), cu_seqlens=(0, 9, 16)),
    # Rank 1 has eight queries of a document of which rank 0 holds one key.
    "one key and many queries": Case(seq_len=16, window=(-1, 0), cu_seqlens=(0, 7, 16)),
    "one sink and many queries": Case(seq_len=16, mesh=(4,), window=(0, 0), cu_seqlens=(0, 3, 16), sink_tokens=1),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_seen_elsewhere(pools: Pools, name: str) -> None:
    case = FAULTS[name]
    ranks = case.mesh[0]
    for plain in (False, True):
        for found in pools(ranks).run(errors, Case(**{**vars(case), "plain": plain, "kv_heads": 2})):
            assert max(found.values()) < TOLERANCE, found
    assert max(pools(ranks).run(swa_errors, case)) < TOLERANCE


def seen_by_query_7(through: str) -> list[int]:
    """The positions on this rank whose values get a gradient from the last query of eight."""
    mesh, cu_seqlens = mesh_of((2,), ("cp",)), torch.tensor([0, 3, 8])
    x = torch.ones(1, 4, 1, 2, dtype=torch.float64)
    v = x.clone().requires_grad_()
    if through == "compat":
        out = ring_swa.ring_streaming_llm_attn_varlen(x, x, v, 2, cu_seqlens, mesh.get_group())
    else:
        out = ring_attention(x, x, v, window=(2, 0), sink_tokens=1, cu_seqlens=cu_seqlens, mesh=mesh)
    dout = torch.zeros_like(out)
    dout[:, 3] = dist.get_rank()
    (grad,) = torch.autograd.grad(out, v, dout)
    return [4 * dist.get_rank() + row for row in range(4) if grad[0, row].any()]


@pytest.mark.parametrize("through", ["compat", "ring_attention"])
def test_what_a_query_of_a_document_sees(pools: Pools, through: str) -> None:
    assert pools(2).run(seen_by_query_7, through) == [[3], [5, 6, 7]]


def sink_gradient_norm(plain: bool) -> float:
    case = Case(
        seq_len=16, q_heads=4, kv_heads=2, mesh=(dist.get_world_size(),), window=(3, 0), cu_seqlens=(0, 5, 9, 16),
        sink_tokens=1, sinks="plain" if plain else "dtensor", plain=plain,
    )  # fmt: skip
    mesh = mesh_of(case.mesh, case.axes)
    return float((on_shards if plain else on_mesh)(case, mesh)[5].norm())


@pytest.mark.parametrize("plain", [False, True])
def test_the_norm_of_the_sinks_gradient_does_not_depend_on_ranks(pools: Pools, plain: bool) -> None:
    norms = [norm for ranks in (1, 2, 4) for norm in pools(ranks).run(sink_gradient_norm, plain)]
    want = float(expected(Case(
        seq_len=16, q_heads=4, kv_heads=2, window=(3, 0), cu_seqlens=(0, 5, 9, 16), sink_tokens=1, sinks="plain"
    ))[5].norm())  # fmt: skip
    assert want > 0.01 and max(abs(norm - want) for norm in norms) < TOLERANCE
