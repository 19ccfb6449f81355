"""The call signatures of other systems, against the dense oracle."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from dtensor_ring_swa import Window, shard_sequence
from dtensor_ring_swa.compat import nanotron, ring_flash_attn, ring_swa, striped_attention
from dtensor_ring_swa.testing import RankPool, dense_attention

from cases import Case, mesh_of

Pools = Callable[[int], RankPool]
TOLERANCE = 1e-10

# What each family is called with, in front of the options.
FORMS = {"func": ("q", "k", "v"), "kvpacked_func": ("q", "kv"), "qkvpacked_func": ("qkv",)}
FAMILIES = {"ring_flash_attn": "contiguous", "zigzag_ring_flash_attn": "zigzag", "stripe_flash_attn": "striped"}
OPTIONS = {
    "dropout_p": 0.0, "softmax_scale": None, "causal": False, "window_size": (-1, -1), "alibi_slopes": None,
    "deterministic": False, "return_attn_probs": False, "group": None,
}  # fmt: skip
RANKS = ("cp_group", "cp_size", "cp_local_rank", "cp_prev_global_rank", "cp_next_global_rank")
WITHOUT_SHRINKING = set(Phase) - {Phase.shrink}

windows = st.tuples(*[st.one_of(st.just(-1), st.integers(0, 12))] * 2)


def flash_call(name: str, form: str, tensors: list[torch.Tensor], **options: Any) -> Any:
    """Call a function of ring-flash-attention with q, k and v packed as it wants them."""
    q, k, v = tensors
    packed = {"func": [q, k, v], "kvpacked_func": [q, torch.stack((k, v), 2)]}
    arguments = packed[form] if form in packed else [torch.stack((q, k, v), 2)]
    return getattr(ring_flash_attn, f"{name}_{form}")(*arguments, **options)


def expected(case: Case) -> list[torch.Tensor]:
    """out, lse, dq, dk and dv of the whole sequence, each with the sequence on dim 1."""
    q, k, v, dout = case.inputs()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = dense_attention(
        q, k, v, case.window, case.scale, sink_tokens=case.sink_tokens, cu_seqlens=case.cu_seqlens
    )
    return [out.detach(), lse.detach().transpose(1, 2), *torch.autograd.grad(out, leaves, dout)]


def shards(case: Case, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    if case.mesh == (1,) and not dist.is_initialized():
        return [x.detach().clone() for x in tensors]
    mesh = mesh_of(case.mesh, case.axes)["cp"]
    return [shard_sequence(mesh, x.detach(), layout=case.layout).clone() for x in tensors]


def distance(case: Case, out: torch.Tensor, lse: torch.Tensor | None, leaves: list[torch.Tensor]) -> float:
    """The largest distance from the oracle, of everything a call gives on this rank."""
    (dout,) = shards(case, [case.inputs()[3]])
    want = shards(case, expected(case))
    got = [out, want[1] if lse is None else lse.transpose(1, 2), *torch.autograd.grad(out, leaves, dout)]
    assert [x.shape for x in got] == [x.shape for x in want]
    return max(float((x - y).detach().abs().max()) if x.numel() else 0.0 for x, y in zip(got, want, strict=True))


def flash_distance(case: Case, name: str, form: str, options: dict[str, Any], grouped: bool = False) -> float:
    leaves = [x.requires_grad_() for x in shards(case, list(case.inputs()[:3]))]
    group = mesh_of(case.mesh, case.axes)["cp"].get_group() if grouped else None
    out, lse, nothing = flash_call(name, form, leaves, return_attn_probs=True, group=group, **options)
    assert nothing is None and torch.equal(out, flash_call(name, form, leaves, group=group, **options))
    return distance(case, out, lse, leaves)


def flash_case(name: str, form: str, options: dict[str, Any], ranks: int = 2, **sizes: Any) -> Case:
    case = {
        "seq_len": 12 * ranks, "q_heads": 4, "kv_heads": 4 if form == "qkvpacked_func" else 2,
        "mesh": (ranks,), "layout": FAMILIES[name], "scale": options.get("softmax_scale"),
    }  # fmt: skip
    window = Window.flash(options.get("window_size", (-1, -1)), options.get("causal", False))
    return Case(**{**case, "window": (window.left, window.right), **sizes})


@settings(max_examples=120, phases=WITHOUT_SHRINKING)
@given(
    ranks=st.integers(1, 4), name=st.sampled_from(list(FAMILIES)), form=st.sampled_from(list(FORMS)),
    causal=st.booleans(), window_size=windows, scale=st.sampled_from([None, 0.3]), batch=st.integers(1, 2),
    width=st.integers(1, 4), deterministic=st.booleans(),
)  # fmt: skip
def test_families_of_ring_flash_attn(
    pools: Pools, ranks: int, name: str, form: str, causal: bool, window_size: tuple[int, int], scale: float | None,
    batch: int, width: int, deterministic: bool,
) -> None:  # fmt: skip
    options = {
        "causal": causal, "window_size": window_size, "softmax_scale": scale, "deterministic": deterministic
    }  # fmt: skip
    case = flash_case(name, form, options, ranks, seq_len=2 * ranks * width, batch=batch)
    assert max(pools(ranks).run(flash_distance, case, name, form, options)) < TOLERANCE


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "window_size": (5, -1)}], ids=str)
def test_every_function_on_two_ranks_and_on_one_device(
    pools: Pools, name: str, form: str, options: dict[str, Any]
) -> None:
    case = flash_case(name, form, options)
    assert max(pools(2).run(flash_distance, case, name, form, options)) < TOLERANCE
    alone = flash_case(name, form, options, ranks=1)
    assert flash_distance(alone, name, form, options) < TOLERANCE


@pytest.mark.parametrize("name", FAMILIES)
def test_a_group_of_some_ranks(pools: Pools, name: str) -> None:
    case = flash_case(name, "func", {"causal": True}, mesh=(2, 2), axes=("dp", "cp"), seq_len=8)
    assert max(pools(4).run(flash_distance, case, name, "func", {"causal": True}, True)) < TOLERANCE


def test_contiguous_shards_may_be_uneven(pools: Pools) -> None:
    for seq_len in (3, 7):
        case = flash_case("ring_flash_attn", "kvpacked_func", {"causal": True}, ranks=4, seq_len=seq_len)
        found = pools(4).run(flash_distance, case, "ring_flash_attn", "kvpacked_func", {"causal": True})
        assert max(found) < TOLERANCE


def seen_by(name: str, row: int, window_size: tuple[int, int]) -> list[int]:
    """The positions that a row sees: uniform weights, values that are the positions' powers of two."""
    mesh, seq_len = mesh_of((2,), ("cp",)), 8
    values = 2.0 ** torch.arange(seq_len, dtype=torch.float64).view(1, seq_len, 1, 1)
    (v,) = shards(Case(mesh=(2,), layout=FAMILIES[name]), [values])
    out, lse, _ = flash_call(
        name, "func", [torch.zeros_like(v), torch.zeros_like(v), v], causal=True, window_size=window_size,
        return_attn_probs=True,
    )  # fmt: skip
    sums = (out.flatten() * lse.flatten().exp()).round().long()
    held = shard_sequence(mesh, torch.arange(seq_len)[None], layout=FAMILIES[name])[0].tolist()
    return [p for p in range(seq_len) if row in held and int(sums[held.index(row)]) >> p & 1]


@pytest.mark.parametrize("name", FAMILIES)
def test_windows_count_positions_of_the_sequence(pools: Pools, name: str) -> None:
    for row, keys in ((4, [3, 4]), (5, [4, 5])):
        assert [seen for seen in pools(2).run(seen_by, name, row, (1, 0)) if seen] == [keys]


# nanotron


def nanotron_distance(case: Case, options: dict[str, Any]) -> float:
    leaves = [x.requires_grad_() for x in shards(case, list(case.inputs()[:3]))]
    batch, rows = leaves[0].shape[:2]
    cu_seqlens = torch.tensor([row * rows for row in range(batch + 1)], dtype=torch.int32)
    q, k, v = (x.flatten(0, 1) for x in leaves)
    arguments = (None, q, k, v, cu_seqlens, rows)
    ((out, lse, nothing),) = nanotron.ATTENTION_FUNCTIONS["ring"](*arguments, return_attn_probs=True, **options)
    (same,) = nanotron.ring_flash_attn_varlen_func(*arguments, sliding_window=None, position_ids=None, **options)
    assert nothing is None and torch.equal(out, same) and out.shape[:2] == (batch * rows, case.q_heads)
    return distance(case, out.unflatten(0, (batch, rows)), lse.unflatten(1, (batch, rows)).transpose(0, 1), leaves)


@settings(max_examples=60, phases=WITHOUT_SHRINKING)
@given(
    ranks=st.integers(1, 4), causal=st.booleans(), window_size=windows, scale=st.sampled_from([None, 0.3]),
    batch=st.integers(1, 3), seq_len=st.integers(1, 24),
)  # fmt: skip
@example(ranks=2, causal=True, window_size=(-1, -1), scale=None, batch=2, seq_len=16)
@example(ranks=4, causal=True, window_size=(3, -1), scale=None, batch=2, seq_len=3)
def test_nanotron(
    pools: Pools, ranks: int, causal: bool, window_size: tuple[int, int], scale: float | None, batch: int, seq_len: int
) -> None:
    options = {"causal": causal, "window_size": window_size, "scaling": scale}
    window = Window.flash(window_size, causal)
    case = Case(
        batch=batch, seq_len=seq_len, q_heads=4, kv_heads=2, v_head_dim=3, window=(window.left, window.right),
        mesh=(ranks,), scale=scale,
    )  # fmt: skip
    assert max(pools(ranks).run(nanotron_distance, case, options)) < TOLERANCE


def test_nanotron_on_one_device() -> None:
    case = Case(batch=2, window=(-1, -1), mesh=(1,))
    assert nanotron_distance(case, {}) < TOLERANCE


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (
            {"cu_seqlens": torch.tensor([0, 3, 8])},
            NotImplementedError,
            r"one length, got \[0, 3, 8\]: .* cu_seqlens=Documents\(\.\.\.\)",
        ),
        ({"cu_seqlens": torch.tensor([0, 5, 4, 8])}, ValueError, r"cu_seqlens\[2\] = 4 after 5"),
        ({"cu_seqlens": torch.tensor([0, 3, 6])}, ValueError, "= 6 tokens, got sizes"),
        ({"cu_seqlens": None}, ValueError, "cu_seqlens must be the boundaries"),
        ({"max_seqlen": 3}, ValueError, "max_seqlen=3 is less than the 4 tokens of a batch row"),
        ({"max_seqlen": "4"}, ValueError, "max_seqlen must be an integer or None, got '4'"),
        ({"dropout": 0.1}, NotImplementedError, "dropout of attention weights"),
        ({"alibi_slopes": torch.ones(2)}, NotImplementedError, "alibi_slopes"),
        ({"sliding_window": 4}, NotImplementedError, r"window_size=\(n - 1, 0\)"),
        ({"document_ids": 1}, NotImplementedError, "document_ids cannot be honoured"),
        ({"window_size": 4}, ValueError, "window must be a pair"),
        ({"q": torch.randn(2, 4, 2, 4)}, ValueError, "q must be"),
        ({"k": None}, ValueError, "k must be .*, got a NoneType"),
    ],
)
def test_what_nanotrons_refuses(change: dict[str, Any], error: type[Exception], words: str) -> None:
    x = torch.randn(8, 2, 4)
    given = {"module": None, "q": x, "k": x, "v": x, "cu_seqlens": torch.tensor([0, 4, 8]), "max_seqlen": 4}
    assert nanotron.ring_flash_attn_varlen_func(**given)[0].shape == x.shape
    with pytest.raises(error, match=words):
        nanotron.ring_flash_attn_varlen_func(**{**given, **change})


# ring_swa


def swa_distance(case: Case, told: bool = False, flat: bool = False) -> float:
    """Call the function that the case's documents and sink tokens mean; packed tensors with or without a batch dim."""
    leaves = [x.requires_grad_() for x in shards(case, list(case.inputs()[:3]))]
    name = "ring_streaming_llm_attn" if case.sink_tokens else "ring_sliding_window_attn"
    documents = [] if case.cu_seqlens is None else [case.boundaries()]
    function = getattr(ring_swa, name + "_varlen" * len(documents))
    tensors = [x.squeeze(0) for x in leaves] if flat else leaves
    group, before, rank, after = neighbours(case)
    if told:
        ranks = (group, dist.get_world_size(group), rank, before, after)
        out = function(*tensors, case.window[0], *documents, *ranks, case.scale)
    else:
        named = dict(zip(["cu_seqlens"], documents, strict=False))
        out = function(*tensors, window_size=case.window[0], cp_group=group, softmax_scale=case.scale, **named)
    assert out.ndim == tensors[0].ndim
    return distance(case, out.unsqueeze(0) if flat else out, None, leaves)


def neighbours(case: Case) -> tuple[dist.ProcessGroup, int, int, int]:
    group = mesh_of(case.mesh, case.axes)["cp"].get_group()
    peers, rank = dist.get_process_group_ranks(group), dist.get_rank(group)
    return group, peers[rank - 1], rank, peers[(rank + 1) % len(peers)]


@settings(max_examples=80, phases=WITHOUT_SHRINKING)
@given(
    ranks=st.sampled_from([1, 2, 4]), window_size=st.integers(0, 12), seq_len=st.integers(1, 24),
    batch=st.integers(1, 2), scale=st.sampled_from([None, 0.3]), told=st.booleans(), sink_tokens=st.integers(0, 1),
    cuts=st.none() | st.lists(st.integers(0, 24), max_size=4),
)  # fmt: skip
def test_ring_swa(
    pools: Pools, ranks: int, window_size: int, seq_len: int, batch: int, scale: float | None, told: bool,
    sink_tokens: int, cuts: list[int] | None,
) -> None:  # fmt: skip
    cu_seqlens = None if cuts is None else (0, *sorted(min(cut, seq_len) for cut in cuts), seq_len)
    case = Case(
        batch=batch if cuts is None else 1, seq_len=seq_len, q_heads=4, kv_heads=2, window=(window_size, 0),
        mesh=(ranks,), scale=scale, sink_tokens=sink_tokens, cu_seqlens=cu_seqlens,
    )  # fmt: skip
    flat = cuts is not None and len(cuts) % 2 == 0
    assert max(pools(ranks).run(swa_distance, case, told, flat)) < TOLERANCE


def test_ring_swa_on_one_device() -> None:
    x = torch.randn(8, 2, 4, dtype=torch.float64)
    for cu_seqlens in (None, torch.tensor([0, 3, 8])):
        for sink_tokens, name in ((0, "ring_sliding_window_attn"), (1, "ring_streaming_llm_attn")):
            want, _ = dense_attention(
                x[None], x[None], x[None], (2, 0), sink_tokens=sink_tokens,
                cu_seqlens=None if cu_seqlens is None else cu_seqlens.tolist(),
            )  # fmt: skip
            if cu_seqlens is None:
                out = getattr(ring_swa, name)(x[None], x[None], x[None], 2)[0]
            else:
                out = getattr(ring_swa, name + "_varlen")(x, x, x, 2, cu_seqlens)
            assert torch.allclose(out, want[0], rtol=0, atol=TOLERANCE)


def test_ring_swa_on_a_group_of_some_ranks(pools: Pools) -> None:
    assert max(pools(4).run(swa_distance, Case(mesh=(2, 2), axes=("dp", "cp"), sink_tokens=1), True)) < TOLERANCE


def one_device_among_ranks() -> bool:
    """Whether a call without a group keeps each rank's sequence to itself."""
    x = torch.randn(1, 5, 2, 4, dtype=torch.float64) + dist.get_rank()
    out = ring_swa.ring_sliding_window_attn(x, x, x, 2)
    return torch.allclose(out, dense_attention(x, x, x, (2, 0))[0], rtol=0, atol=TOLERANCE)


def test_ring_swa_without_a_group_sends_nothing(pools: Pools) -> None:
    assert all(pools(2).run(one_device_among_ranks))


def swa_refusal(wrong: str, where: int) -> str:
    """What each rank says when rank ``where`` passes a wrong value."""
    group, before, rank, after = neighbours(case := Case(mesh=(3,)))
    said: dict[str, Any] = dict(zip(RANKS, (group, 3, rank, before, after), strict=True))
    if rank == where:
        said[wrong] = 7
    x = shards(case, [torch.randn(1, 6, 1, 4)])[0]
    try:
        ring_swa.ring_sliding_window_attn(x, x, x, 2, **said)
    except ValueError as problem:
        return str(problem)
    return ""


@pytest.mark.parametrize("wrong", RANKS[1:])
def test_ring_swa_refuses_ranks_that_contradict_the_group(pools: Pools, wrong: str) -> None:
    for where in (0, 2):
        for rank, message in enumerate(pools(3).run(swa_refusal, wrong, where)):
            assert (f"{wrong}=7 contradicts" if rank == where else f"rank {where} ") in message
    x, said = torch.randn(1, 6, 1, 4), dict[str, Any]({wrong: 7})
    with pytest.raises(ValueError, match=f"{wrong}=7 contradicts the group, where it is"):
        ring_swa.ring_sliding_window_attn(x, x, x, 2, **said)


def swa_without_boundaries(where: int) -> str:
    """What each rank says when rank ``where`` passes no boundaries."""
    group, x = mesh_of((2,), ("cp",)).get_group(), torch.randn(1, 4, 2, 4)
    cu_seqlens = None if dist.get_rank() == where else torch.tensor([0, 3, 8])
    try:
        ring_swa.ring_sliding_window_attn_varlen(x, x, x, 2, cu_seqlens, group)  # pyright: ignore
    except ValueError as problem:
        return str(problem)
    return ""


def test_ring_swa_refuses_documents_without_boundaries(pools: Pools) -> None:
    message = "cu_seqlens must be the boundaries of the documents in the whole sequence, got None"
    for rank, said in enumerate(pools(2).run(swa_without_boundaries, 1)):
        assert (message if rank == 1 else "rank 1 ") in said
    x = torch.randn(1, 8, 2, 4)
    for function in (ring_swa.ring_sliding_window_attn_varlen, ring_swa.ring_streaming_llm_attn_varlen):
        with pytest.raises(ValueError, match=message):
            function(x, x, x, 2, None)  # pyright: ignore


# Refusals and signatures


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", FAMILIES)
def test_what_the_families_refuse(name: str, form: str) -> None:
    x = [torch.randn(1, 8, 2, 4)] * 3
    with pytest.raises(NotImplementedError, match=r"dropout .* got 0.1; pass 0.0"):
        flash_call(name, form, x, dropout_p=0.1)
    with pytest.raises(NotImplementedError, match=r"alibi_slopes .* pass None"):
        flash_call(name, form, x, alibi_slopes=torch.ones(2))
    with pytest.raises(ValueError, match="window must be a pair"):
        flash_call(name, form, x, window_size=4)
    with pytest.raises(ValueError, match="mesh must be a 1-D DeviceMesh or a ProcessGroup, got int"):
        flash_call(name, form, x, group=0)
    if form != "func":
        packed, parts = FORMS[form][-1], len(FORMS[form][-1])
        with pytest.raises(ValueError, match=rf"{packed} must be \[batch, sequence, {parts}, heads, head_dim\]"):
            getattr(ring_flash_attn, f"{name}_{form}")(*[torch.randn(1, 8, 4, 2, 4)] * len(FORMS[form]))
        with pytest.raises(ValueError, match=rf"{packed} must be .*, got a NoneType"):
            getattr(ring_flash_attn, f"{name}_{form}")(*[x[0]] * (len(FORMS[form]) - 1), None)


def lonely_refusal(which: str) -> str:
    """Rank 1 alone passes what cannot be honoured; what each rank says."""
    x, wrong = torch.randn(1, 4, 2, 4), dist.get_rank() == 1
    try:
        if which == "nanotron":
            cu_seqlens = torch.tensor([0, 1, 4] if wrong else [0, 2, 4])
            nanotron.ring_flash_attn_varlen_func(None, x[0], x[0], x[0], cu_seqlens, 4)
        else:
            flash_call(which, "func", [x, x, x], dropout_p=0.5 if wrong else 0.0)
    except (ValueError, NotImplementedError) as problem:
        return f"{type(problem).__name__}: {problem}"
    return ""


@pytest.mark.parametrize("which", [*FAMILIES, "nanotron"])
def test_a_refusal_on_one_rank_raises_on_all(pools: Pools, which: str) -> None:
    messages = pools(3).run(lonely_refusal, which)
    assert messages[1].startswith("NotImplementedError: ")
    assert all(m.startswith("ValueError: rank 1 ") and "refused" in m for m in (messages[0], messages[2]))


def defaults(function: Callable[..., Any]) -> dict[str, Any]:
    return {name: p.default for name, p in inspect.signature(function).parameters.items()}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", FAMILIES)
def test_signatures_of_the_families(name: str, form: str) -> None:
    function = getattr(ring_flash_attn, f"{name}_{form}")
    assert defaults(function) == {**dict.fromkeys(FORMS[form], inspect.Parameter.empty), **OPTIONS}
    assert list(defaults(function)) == [*FORMS[form], *OPTIONS]
    assert function.__name__ == function.__qualname__ == f"{name}_{form}"
    assert pickle.loads(pickle.dumps(function)) is function
    assert all(f"    {argument}: " in (function.__doc__ or "") for argument in defaults(function))


def test_striped_attention_is_the_same_family() -> None:
    for name in striped_attention.__all__:
        assert getattr(striped_attention, name) is getattr(ring_flash_attn, name)


def test_signature_of_nanotrons() -> None:
    function = nanotron.ring_flash_attn_varlen_func
    assert nanotron.ATTENTION_FUNCTIONS["ring"] is function
    assert list(defaults(function))[:-1] == [
        "module", "q", "k", "v", "cu_seqlens", "max_seqlen", "dropout", "scaling", "causal", "window_size",
        "alibi_slopes", "deterministic", "return_attn_probs", "ring_pg",
    ]  # fmt: skip
    assert inspect.signature(function).parameters["others"].kind is inspect.Parameter.VAR_KEYWORD
    assert defaults(function)["window_size"] == (-1, -1) and defaults(function)["causal"] is False


@pytest.mark.parametrize("name", ring_swa.__all__)
def test_signatures_of_ring_swa(name: str) -> None:
    documents = ["cu_seqlens"] if name.endswith("varlen") else []
    signature = defaults(getattr(ring_swa, name))
    assert list(signature) == ["q", "k", "v", "window_size", *documents, *RANKS, "softmax_scale"]
    assert all(signature[optional] is None for optional in (*RANKS, "softmax_scale"))
