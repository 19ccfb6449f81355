"""What cannot be honoured raises on every rank before anything is sent, and says what to do."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from dtensor_ring_swa import (
    RingAttention,
    Window,
    apply_context_parallel,
    gather_sequence,
    positions,
    ring_attention,
    shard_sequence,
    token_mean,
)
from dtensor_ring_swa.testing import RankPool

from cases import mesh_of

Pools = Callable[[int], RankPool]


def qkv(**shapes: Any) -> dict[str, Any]:
    sizes = {name: shapes.get(name, (1, 4, 2, 8)) for name in "qkv"}
    return {name: torch.randn(size) for name, size in sizes.items()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": (1, 5, 2, 8), "v": (1, 5, 2, 8)}, r"same length .*q \[1, 4, 2, 8\], k \[1, 5"),
        ({"v": (1, 5, 2, 8)}, "same length"),
        ({"k": (2, 4, 2, 8), "v": (2, 4, 2, 8)}, "same batch size"),
        ({"q": (1, 4, 3, 8)}, r"multiple of those of k and v .*q \[1, 4, 3, 8\]"),
        ({"v": (1, 4, 1, 8)}, "same number of heads"),
        ({"k": (1, 4, 2, 6)}, "q and k must have the same head dim"),
        (
            {"q": (4, 2, 8)},
            r"q must be \[batch, sequence, heads, head_dim\], or \[tokens, .* with cu_seqlens, got 3 dims",
        ),
        ({"q": (1, 4, 0, 8)}, "at least 1"),
    ],
)
def test_shapes(change: dict[str, tuple[int, ...]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ring_attention(**qkv(**change))


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"window": (-2, 0)}, r"window left must be >= 0 tokens, or -1 .*got -2"),
        ({"window": (0, -5)}, "window right"),
        ({"window": 4}, r"Window.tokens\(n\)"),
        ({"window": (1, 2, 3)}, "pair"),
        ({"window": (1.5, 0)}, r"integer number of tokens, got 1\.5"),
        ({"window": (2**63, 0)}, "window left must be at most"),
        ({"kernel": []}, r"unknown kernel \[\]"),
        ({"kernel": "cudnn"}, "unknown kernel 'cudnn'; choose 'auto'"),
        ({"softcap": -1.0}, r"softcap .*got -1\.0"),
        ({"softcap": float("nan")}, "softcap"),
        ({"scale": float("inf")}, "scale"),
        ({"scale": "0.1"}, "scale"),
        ({"scale": -(10**400)}, "scale must be a finite number, .* got an integer of 1329 bits, more than a float's"),
        ({"softcap": 10**400}, "softcap must be a positive number from 1e-30 to 1e.30, .* got an integer of 1329 bits"),
        ({"softcap": 1e300}, "softcap must be a positive number from 1e-30"),
        ({"softcap": 1e-40}, "softcap must be a positive number from 1e-30"),
        ({"layout": "spiral"}, "layout must be"),
        ({"load_balance": "maybe"}, "load_balance must be"),
        ({"layout": "striped", "load_balance": "zigzag"}, "re-deals contiguous shards"),
        ({"exchange": "broadcast"}, "exchange must be"),
        ({"sink_tokens": -1}, r"sink_tokens must be a number of tokens >= 0, got -1"),
        ({"sink_tokens": 2**63}, "sink_tokens must be at most"),
        ({"sink_tokens": 1.0}, r"sink_tokens .* got 1\.0"),
        ({"sink_tokens": True}, r"sink_tokens .* got True"),
        ({"sinks": torch.zeros(3)}, r"logit for each of the \[2\] query heads, got 3"),
        ({"sinks": torch.zeros(1)}, r"logit for each of the \[2\] query heads, got 1"),
        ({"sinks": torch.zeros(2, 1)}, r"sinks must be a float tensor \[2\].* got torch\.float32 \[2, 1\]"),
        ({"sinks": torch.zeros(2).long()}, r"sinks must be a float tensor .* got torch\.int64 \[2\]"),
        ({"sinks": [0.0, 0.0]}, r"sinks must be a float tensor .* got \[0\.0, 0\.0\]"),
        (
            {"sinks": torch.zeros(2).to_sparse()},
            r"sinks must be a dense tensor, got torch\.sparse_coo; pass sinks.to_d",
        ),
        ({"sinks": torch.zeros(2, device="meta")}, "sinks and q must be on one device, got meta and cpu"),
        ({"cu_seqlens": torch.tensor([1, 4])}, r"start at 0 .* cu_seqlens\[0\] = 1"),
        ({"cu_seqlens": torch.tensor([0])}, r"at least 2 entries, got 1 entries"),
        ({"cu_seqlens": torch.tensor([0, 3, 2, 4])}, r"must not decrease, got cu_seqlens\[2\] = 2 after 3"),
        (
            {"cu_seqlens": torch.tensor([0, 3, 5])},
            r"end at the 4 tokens .* got cu_seqlens\[-1\] = 5; make padding .* if these are shards",
        ),
        ({"cu_seqlens": [0, 3]}, r"end at the 4 tokens .* got cu_seqlens\[-1\] = 3; make padding"),
        ({"cu_seqlens": torch.tensor([[0, 4], [0, 4]])}, r"got \[2, 2\] for 1 rows"),
        ({"cu_seqlens": torch.tensor([0.0, 4.0])}, r"must be int32 or int64 .* got torch\.float32 \[2\]"),
        ({"cu_seqlens": torch.tensor([0, 4]).to_sparse()}, r"must be a dense tensor, got .*; pass cu_seqlens.to_dense"),
        ({"cu_seqlens": "0, 4"}, r"must be int32 or int64 .* got '0, 4'"),
        ({"cu_seqlens": [0, None, 4]}, r"must be int32 or int64 .* got \[0, None, 4\]"),
        ({"cu_seqlens": [0, [4]]}, r"must be int32 or int64"),
        ({"seq_len": 9}, "seq_len=9 contradicts the 4 tokens given; leave it out, or pass mesh= if these are shards"),
        ({"seq_len": 4.0}, r"seq_len must be a number of tokens >= 0, got 4\.0"),
        ({"seq_len": -4}, "seq_len must be a number of tokens >= 0, got -4"),
        ({"seq_len": 2**63}, "seq_len must be at most"),
        ({"mesh": "cp"}, "mesh must be a 1-D DeviceMesh or a ProcessGroup, got str"),
    ],
)
def test_options(option: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ring_attention(**qkv(), **option)


def test_an_error_of_packed_tensors_says_how_dims_are_counted() -> None:
    x = torch.randn(4, 2, 8)
    with pytest.raises(ValueError, match=r"same length \(dim 1\)") as caught:
        ring_attention(x, x[:3], x[:3], cu_seqlens=[0, 4])
    assert caught.value.__notes__ == ["q, k and v of [T, H, D] are taken as [1, T, H, D]; dims are counted there"]


@pytest.mark.parametrize("kernel", ["aten", "flash"])
def test_what_a_kernel_cannot_do_is_never_dropped(kernel: str) -> None:
    with pytest.raises(NotImplementedError, match=kernel):
        ring_attention(**qkv(), kernel=kernel)


def test_dtypes_and_kinds() -> None:
    tensors = qkv()
    with pytest.raises(ValueError, match=r"q must be float64, .* got torch\.int64"):
        ring_attention(**{name: x.long() for name, x in tensors.items()})
    with pytest.raises(ValueError, match=r"q must be a dense tensor, got torch\.sparse_coo"):
        ring_attention(tensors["q"].to_sparse(), tensors["k"], tensors["v"])
    nested = torch.nested.nested_tensor(list(tensors["v"]))
    with pytest.raises(ValueError, match="v must be a dense tensor, got a nested one; pack its parts"):
        ring_attention(tensors["q"], tensors["k"], nested)
    with pytest.raises(ValueError, match="same dtype"):
        ring_attention(tensors["q"].double(), tensors["k"], tensors["v"])
    with pytest.raises(ValueError, match="v must be a tensor or DTensor, got NoneType"):
        ring_attention(tensors["q"], tensors["k"], None)  # type: ignore[arg-type]


def raises(error: type[Exception], **arguments: Any) -> str:
    """The error of a call on this rank, having checked that no message was sent for it."""
    with mock.patch.object(dist, "batch_isend_irecv", side_effect=AssertionError("sent something")):
        try:
            ring_attention(**arguments)
        except error as found:
            return str(found)
    raise AssertionError(f"nothing was raised, expected {error.__name__}")


def on(names: tuple[str, ...], placements: list[Placement], shape: tuple[int, ...] = (2, 4, 4, 8)) -> DTensor:
    mesh = mesh_of((2, 2) if len(names) == 2 else (4,), names)
    return DTensor.from_local(torch.randn(shape), mesh, placements, run_check=False)


def bad_placements() -> dict[str, str]:
    two, sequence = ("dp", "cp"), [Replicate(), Shard(1)]
    good = on(two, sequence)
    cases: dict[str, dict[str, Any]] = {
        "two axes": dict.fromkeys("qkv", on(two, [Shard(1), Shard(1)])),
        "partial": dict.fromkeys("qkv", on(two, [Partial(), Shard(1)])),
        "head dim": dict.fromkeys("qkv", on(two, [Shard(3), Shard(1)])),
        "k and v": {"q": good, "k": good, "v": on(two, [Replicate(), Replicate()], (2, 8, 4, 8))},
        "q and k": {"q": good} | dict.fromkeys("kv", on(two, [Replicate(), Replicate()], (2, 8, 4, 8))),
        "batch": {"q": on(two, [Shard(0), Shard(1)], (1, 4, 4, 8))} | dict.fromkeys("kv", good),
        "meshes": {"q": on(("cp",), [Shard(1)], (2, 2, 4, 8))} | dict.fromkeys("kv", good),
        "mixed": {"q": good, "k": good, "v": torch.randn(2, 8, 4, 8)},
        "mesh": dict.fromkeys("qkv", good) | {"mesh": mesh_of((4,), ("cp",))},
        "seq_len": dict.fromkeys("qkv", good) | {"seq_len": 9},
    }
    return {name: raises(ValueError, window=(3, 0), **arguments) for name, arguments in cases.items()}


def test_placements(pools: Pools) -> None:
    wanted = {
        "two axes": "sharded on the mesh axes ['dp', 'cp']",
        "partial": "q cannot be Partial",
        "head dim": "accepted are Shard(0) (batch), Shard(1) (sequence), Shard(2) (heads) and Replicate()",
        "k and v": "k and v must have the same placements",
        "q and k": "batch and sequence must be sharded alike",
        "batch": "batch and sequence must be sharded alike",
        "meshes": "different meshes",
        "mixed": "three DTensors or three plain tensors",
        "mesh": "leave mesh= out for DTensors",
        "seq_len": "seq_len=9 contradicts",
    }
    for messages in pools(4).run(bad_placements):
        for name, message in wanted.items():
            assert message in messages[name], f"{name}: {messages[name]}"


def bad_sinks() -> dict[str, str]:
    two = ("dp", "cp")
    batch_and_sequence = dict.fromkeys("qkv", on(two, [Shard(0), Shard(1)]))
    heads = dict.fromkeys("qkv", on(("tp", "cp"), [Shard(2), Shard(1)]))
    plain = dict.fromkeys("qkv", torch.randn(1, 4, 4, 8))

    def sinks(names: tuple[str, ...], placements: list[Placement], local: int = 4) -> DTensor:
        mesh = mesh_of((2, 2) if len(names) == 2 else (4,), names)
        return DTensor.from_local(torch.zeros(local), mesh, placements, run_check=False)

    cases: dict[str, dict[str, Any]] = {
        "partial": batch_and_sequence | {"sinks": sinks(two, [Replicate(), Partial()])},
        "on cp": batch_and_sequence | {"sinks": sinks(two, [Replicate(), Shard(0)], 2)},
        "mesh": batch_and_sequence | {"sinks": sinks(("other",), [Replicate()])},
        "heads": batch_and_sequence | {"sinks": sinks(two, [Replicate(), Replicate()], 3)},
        "local heads": batch_and_sequence | {"sinks": torch.zeros(2)},
        "sharded heads": heads | {"sinks": torch.zeros(3)},
        "plain": plain | {"sinks": sinks(two, [Replicate(), Replicate()]), "mesh": mesh_of((4,), ("cp",))},
    }
    return {name: raises(ValueError, window=(3, 0), **arguments) for name, arguments in cases.items()}


def test_sinks_of_other_placements_or_sizes(pools: Pools) -> None:
    wanted = {
        "partial": "sinks cannot be Partial",
        "on cp": "sinks cannot be Shard(dim=0) on mesh axis 'cp'; accepted are Replicate(), and Shard(0) where",
        "mesh": "sinks lie on mesh axis 'other', which q's mesh",
        "heads": "each of the [4] query heads, got 3",
        "local heads": "each of the [4] query heads, got 2",
        "sharded heads": "each of the [4, 8] query heads, got 3",
        "plain": "pass sinks.to_local(), this rank's copy",
    }
    for messages in pools(4).run(bad_sinks):
        for name, message in wanted.items():
            assert message in messages[name], f"{name}: {messages[name]}"


def bad_documents_of_dtensors() -> dict[str, str]:
    tensors = dict.fromkeys("qkv", on(("dp", "cp"), [Shard(0), Shard(1)]))  # [4, 8, 4, 8] on 2 x 2
    cases = {"rows": [[0, 8], [0, 8]], "end": [0, 4], "order": [[0, 8, 8]] * 3 + [[0, 9, 8]]}
    return {name: raises(ValueError, cu_seqlens=torch.tensor(x), **tensors) for name, x in cases.items()}


def test_boundaries_that_do_not_fit_dtensors(pools: Pools) -> None:
    for messages in pools(4).run(bad_documents_of_dtensors):
        assert "got [2, 2] for 4 rows" in messages["rows"]
        assert "end at the 8 tokens" in messages["end"] and "cu_seqlens[-1] = 4" in messages["end"]
        assert "cu_seqlens[3][2] = 8 after 9" in messages["order"]


def heads_that_do_not_divide() -> str:
    names, q = ("tp", "cp"), [Shard(2), Shard(1)]
    mesh = mesh_of((2, 2), names)
    shape, stride = torch.Size((2, 8, 3, 8)), (192, 24, 8, 1)
    heads = 2 - mesh.get_local_rank("tp")
    x = DTensor.from_local(torch.randn(2, 4, heads, 8), mesh, q, run_check=False, shape=shape, stride=stride)
    return raises(ValueError, q=x, k=x, v=x)


def test_heads_that_do_not_divide_over_ranks(pools: Pools) -> None:
    for message in pools(4).run(heads_that_do_not_divide):
        assert "3 query heads and 3 key/value heads do not divide over 2 ranks" in message


class Torn(list[int]):
    """Boundaries whose reading fails in a way that no check foresees."""

    def __iter__(self) -> Any:
        raise OSError("cannot be read")


def bad_shards(what: str) -> str:
    rank = dist.get_rank()
    rows = 4
    arguments: dict[str, Any] = {"window": (3, 0), "mesh": mesh_of((4,), ("cp",))}
    tensors = qkv(**dict.fromkeys("qkv", (1, rows, 2, 8)))
    if what == "lengths" and rank == 1:
        tensors = qkv(**dict.fromkeys("qkv", (1, 3, 2, 8)))
    if what == "one rank" and rank == 2:
        tensors["k"] = torch.randn(1, 5, 2, 8)
    if what == "window":
        arguments["window"] = (3 + rank // 3, 0)
    if what == "dtype" and rank == 3:
        tensors = {name: x.double() for name, x in tensors.items()}
    if what == "device" and rank == 1:
        tensors = {name: x.to("meta") for name, x in tensors.items()}
    if what == "not boundaries" and rank == 1:
        arguments["cu_seqlens"] = object()
    if what == "error of another kind" and rank == 1:
        arguments["cu_seqlens"] = Torn([0, 16])
    if what == "gradient":
        tensors["q"].requires_grad_(rank == 0)
    if what == "kernel" and rank == 0:
        arguments["kernel"] = "nonsense"
    if what == "sink_tokens":
        arguments["sink_tokens"] = rank // 3
    if what == "sinks" and rank != 2:
        arguments["sinks"] = torch.zeros(2)
    if what == "shape of sinks":
        arguments["sinks"] = torch.zeros(2 + rank // 3)
    if what == "cu_seqlens":
        arguments["cu_seqlens"] = torch.tensor([0, 6 + rank // 3, 16])
    if what == "without cu_seqlens" and rank != 1:
        arguments["cu_seqlens"] = torch.tensor([0, 6, 16])
    if what == "order of cu_seqlens":
        arguments["cu_seqlens"] = torch.tensor([0, 6, 6 - rank // 3, 16])
    if what == "end of cu_seqlens":
        arguments["cu_seqlens"] = torch.tensor([0, 6, 15])
    if what == "end on one rank":
        arguments["cu_seqlens"] = torch.tensor([0, 6, 16 + rank // 3])
    if what == "2-D":
        arguments["mesh"] = mesh_of((2, 2), ("dp", "cp"))
    return raises(Exception, **tensors, **arguments)


@pytest.mark.parametrize(
    ("what", "rank", "own", "others"),
    [
        ("lengths", 0, "are not torch.chunk's of 15 tokens", "are not torch.chunk's of 15 tokens"),
        ("one rank", 2, "same length", "rank 2 of the context-parallel group refused"),
        ("window", 0, "disagree on the window's left: [3, 3, 3, 4]", "disagree on the window's left"),
        ("dtype", 0, "the dtype: ranks [3] of the context-parallel group have another than rank 0", "the dtype: "),
        ("device", 0, "disagree on the kind of device", "disagree on the kind of device"),
        ("not boundaries", 1, "must be int32 or int64", "rank 1 of the context-parallel group refused"),
        ("error of another kind", 1, "cannot be read", "rank 1 of the context-parallel group refused"),
        ("gradient", 0, "disagree on whether a gradient is needed", "disagree on whether a gradient is needed"),
        ("kernel", 0, "unknown kernel 'nonsense'", "rank 0 of the context-parallel group refused"),
        ("sink_tokens", 0, "disagree on sink_tokens: [0, 0, 0, 1]", "disagree on sink_tokens"),
        ("sinks", 0, "disagree on whether there are sinks: [1, 1, 0, 1]", "disagree on whether there are sinks"),
        ("shape of sinks", 3, "[2] query heads, got 3", "rank 3 of the context-parallel group refused"),
        ("cu_seqlens", 0, "disagree on cu_seqlens", "disagree on cu_seqlens"),
        ("without cu_seqlens", 0, "disagree on cu_seqlens", "disagree on cu_seqlens"),
        ("order of cu_seqlens", 3, "cu_seqlens[2] = 5 after 6", "rank 3 of the context-parallel group refused"),
        ("end of cu_seqlens", 0, "end at the 16 tokens", "got cu_seqlens[-1] = 15"),
        ("end on one rank", 0, "disagree on cu_seqlens", "disagree on cu_seqlens"),
        ("2-D", 0, "pass a slice such as mesh['cp']", "pass a slice such as mesh['cp']"),
    ],
)
def test_plain_shards_that_do_not_fit_raise_on_all_ranks(
    pools: Pools, what: str, rank: int, own: str, others: str
) -> None:
    for found, message in enumerate(pools(4).run(bad_shards, what)):
        assert (own if found == rank else others) in message


def replicated_everywhere() -> float:
    mesh = mesh_of((2, 2), ("dp", "cp"))
    x = torch.randn(1, 5, 2, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    whole = DTensor.from_local(x, mesh, [Replicate(), Replicate()], run_check=False)
    with mock.patch.object(dist, "batch_isend_irecv", side_effect=AssertionError("sent something")):
        out = ring_attention(whole, whole, whole, window=(2, 0), mesh=mesh)
    assert isinstance(out, DTensor) and out.placements == (Replicate(), Replicate())
    return float((out.to_local() - ring_attention(x, x, x, window=Window.tokens(3))).abs().max())


def test_a_replicated_sequence_is_legal_and_sends_nothing(pools: Pools) -> None:
    assert max(pools(4).run(replicated_everywhere)) == 0.0


def refusal_of_rank_1_alone(change: dict[str, Any]) -> str:
    if dist.get_rank() == 0:
        return "not called"
    try:
        ring_attention(**{**qkv(), "mesh": mesh_of((2,), ("cp",)), "seq_len": 8, **change})
    except ValueError as problem:
        return str(problem)
    return "accepted"


@pytest.mark.parametrize("change", [{"window": (-2, 0)}, {"k": torch.randn(1, 5, 2, 8)}], ids=["option", "tensor"])
def test_with_seq_len_a_refusal_waits_for_nobody(pools: Pools, change: dict[str, Any]) -> None:
    # The ranks compare nothing then: one that raises must not begin a comparison which its peers never join.
    _, said = pools(2).run(refusal_of_rank_1_alone, change)
    assert "window left must be" in said or "same length" in said


@cache
def of_two(kind: str) -> Any:
    """A mesh or a group of ranks 0 and 1 of three; made by all three, once."""
    return DeviceMesh("cpu", [0, 1], mesh_dim_names=("cp",)) if kind == "mesh" else dist.new_group([0, 1])


def with_an_outsider(kind: str, what: str) -> float | str:
    """How far the members' answer is from one process; the outsider's error."""
    mesh = of_two(kind)
    whole = torch.arange(8.0).view(1, 8, 1, 1)
    try:
        if what == "token_mean":
            return abs(float(token_mean(torch.tensor(3.0 + dist.get_rank()), 2, mesh)) - 7 / 4)
        if what == "positions":
            return abs(int(positions(mesh, 8)[0]) - 4 * dist.get_rank())
        if what == "gather_sequence":
            return float((gather_sequence(mesh, whole[:, :4] + 4 * dist.get_rank()) - whole).abs().max())
        if what == "shard_sequence":
            return abs(float(shard_sequence(mesh, whole)[0, 0]) - 4 * dist.get_rank())
        if what == "a plan":
            core = RingAttention((5, 0))
            apply_context_parallel(torch.nn.ModuleDict({"core": core}), mesh, ["core"])
            x = whole[:, 4 * dist.get_rank() :][:, :4]
            want = ring_attention(whole, whole, whole, window=(5, 0))[:, 4 * dist.get_rank() :][:, :4]
            return float((core(x, x, x) - want).abs().max())
        if what == "DTensors":
            x = distribute_tensor(whole, mesh, [Shard(1)], src_data_rank=None)
            out = ring_attention(x, x, x, window=(5, 0))
            assert isinstance(out, DTensor)
            return float((out.full_tensor() - ring_attention(whole, whole, whole, window=(5, 0))).abs().max())
        x = whole[:, 4 * dist.get_rank() :][:, :4]
        out = ring_attention(x, x, x, window=(5, 0), mesh=mesh)
        want = ring_attention(whole, whole, whole, window=(5, 0))[:, 4 * dist.get_rank() :][:, :4]
        return float((out - want).abs().max())
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        *((kind, what) for kind in ("mesh", "group") for what in
          ("ring_attention", "shard_sequence", "gather_sequence", "positions", "token_mean")),
        ("mesh", "DTensors"),
        ("mesh", "a plan"),
    ],
)  # fmt: skip
def test_a_rank_outside_of_the_mesh_raises_and_its_members_go_on(pools: Pools, kind: str, what: str) -> None:
    *members, outsider = pools(3).run(with_an_outsider, kind, what)
    assert all(isinstance(far, float | int) and far < 1e-5 for far in members), members
    given = "DeviceMesh((cp=2)" if kind == "mesh" else "GroupMember.NON_GROUP_MEMBER"
    assert isinstance(outsider, str)
    assert f"rank 2 got {'a process group' if kind == 'group' else given}" in outsider and given in outsider
    assert "that the calling rank is a member of: call on the members alone" in outsider
