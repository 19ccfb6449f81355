"""Around the attention: shards, positions, labels and the mean over tokens."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

from dtensor_ring_swa import (
    Documents,
    documents_from_eos,
    gather_sequence,
    next_token_labels,
    positions,
    ring_attention,
    shard_sequence,
    token_mean,
)
from dtensor_ring_swa.testing import RankPool

from cases import mesh_of

Pools = Callable[[int], RankPool]
RANKS = (1, 2, 3, 4)
LENGTHS = (1, 2, 3, 5, 7, 8)  # On 4 ranks: 1,0,0,0 1,1,0,0 1,1,1,0 2,2,1,0 2,2,2,1 2,2,2,2.


def cp_mesh() -> DeviceMesh:
    return mesh_of((dist.get_world_size(),), ("cp",))


def axis(kind: str) -> Any:
    return cp_mesh() if kind == "mesh" else dist.group.WORLD


def refusal(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    try:
        function(*args, **kwargs)
    except (ValueError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


# shard_sequence and positions


def shards_of(seq_len: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.arange(2 * seq_len * 3).view(2, seq_len, 3)
    a, b = shard_sequence(cp_mesh(), x.movedim(1, dim), -x.movedim(1, dim), dim=dim)
    return a, b


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_shards_are_torch_chunks(pools: Pools, ranks: int, dim: int) -> None:
    for seq_len in LENGTHS:
        x = torch.arange(2 * seq_len * 3).view(2, seq_len, 3).movedim(1, dim)
        chunks = [*x.chunk(ranks, dim), *[x.narrow(dim, 0, 0)] * ranks][:ranks]
        for chunk, (a, b) in zip(chunks, pools(ranks).run(shards_of, seq_len, dim), strict=True):
            assert torch.equal(a, chunk) and torch.equal(b, -chunk)


def even_shards(seq_len: int, layout: str) -> Any:
    x = torch.arange(seq_len)[None]
    try:
        shard = shard_sequence(cp_mesh(), x, layout=layout, even=True)
    except ValueError as error:
        return str(error)
    return torch.equal(shard, shard_sequence(cp_mesh(), x, layout=layout))


@pytest.mark.parametrize(
    ("seq_len", "layout", "words"),
    [
        (9, "contiguous", None),
        (0, "contiguous", None),
        (12, "zigzag", None),
        # The last rank has one token, or none, and its peers equally many: all raise.
        (
            7,
            "contiguous",
            "even=True needs a length that divides over the 3 ranks, got 7 tokens on dim 1; pad them to 9,",
        ),
        (2, "contiguous", "got 2 tokens on dim 1; pad them to 3, or leave even out"),
        (9, "zigzag", "needs a multiple of 6 tokens, got 9"),
    ],
)
def test_even_shards_or_an_error_on_every_rank(pools: Pools, seq_len: int, layout: str, words: str | None) -> None:
    for found in pools(3).run(even_shards, seq_len, layout):
        assert found is True if words is None else words in found


def positions_of(seq_len: int, kind: str) -> torch.Tensor:
    return positions(axis(kind), seq_len)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("kind", ["mesh", "group"])
def test_positions_are_global(pools: Pools, ranks: int, kind: str) -> None:
    for seq_len in LENGTHS:
        parts = pools(ranks).run(positions_of, seq_len, kind)
        chunk = -(-seq_len // ranks)
        assert [len(x) for x in parts] == [max(0, min(chunk, seq_len - r * chunk)) for r in range(ranks)]
        assert torch.equal(torch.cat(parts), torch.arange(seq_len))
        assert {x.dtype for x in parts} == {torch.int64}


def positions_of_nothing(layout: str) -> torch.Tensor:
    return positions(cp_mesh(), 0, layout)


@pytest.mark.parametrize("layout", ["contiguous", "striped", "zigzag"])
def test_positions_of_an_empty_sequence(pools: Pools, layout: str) -> None:
    assert [len(x) for x in pools(3).run(positions_of_nothing, layout)] == [0, 0, 0]


def test_positions_without_a_mesh_are_all() -> None:
    assert positions(None, 5).tolist() == [0, 1, 2, 3, 4]


def test_positions_go_to_the_device() -> None:
    assert positions(None, 5, device="meta").device.type == "meta"


# gather_sequence


def round_trips(seq_len: int, kind: str) -> bool:
    x = torch.randn(2, seq_len, 3, generator=torch.Generator().manual_seed(0))
    y = torch.arange(2 * seq_len).view(2, seq_len)
    a, b = gather_sequence(axis(kind), *shard_sequence(axis(kind), x, y))
    mine = shard_sequence(axis(kind), y, dim=-1)
    assert isinstance(mine, torch.Tensor)
    last = gather_sequence(axis(kind), mine, dim=-1)
    assert isinstance(last, torch.Tensor)
    return torch.equal(a, x) and torch.equal(b, y) and torch.equal(last, y)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("kind", ["mesh", "group"])
def test_gather_is_the_inverse_of_shard(pools: Pools, ranks: int, kind: str) -> None:
    for seq_len in LENGTHS:
        assert pools(ranks).run(round_trips, seq_len, kind) == [True] * ranks, seq_len


def gather_gradient_error(seq_len: int) -> float:
    x, weight = torch.randn(2, 2, seq_len, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mine = shard_sequence(cp_mesh(), x)
    assert isinstance(mine, torch.Tensor)
    mine.requires_grad_()
    whole = gather_sequence(cp_mesh(), mine)
    assert isinstance(whole, torch.Tensor)
    (whole.square() * weight).sum().backward()
    expected = shard_sequence(cp_mesh(), 2 * x * weight)
    assert mine.grad is not None and isinstance(expected, torch.Tensor) and mine.grad.shape == expected.shape
    return float((mine.grad - expected).abs().sum())


@pytest.mark.parametrize("ranks", RANKS)
def test_gradient_of_gather_is_its_rows_of_the_gradient_of_the_whole(pools: Pools, ranks: int) -> None:
    for seq_len in LENGTHS:
        assert max(pools(ranks).run(gather_gradient_error, seq_len)) < 1e-12, seq_len


def gather_ones(rows: tuple[int, ...]) -> str:
    return refusal(gather_sequence, cp_mesh(), torch.ones(1, rows[dist.get_rank()]))


@pytest.mark.parametrize("rows", [(2, 3), (3, 1), (0, 2)])
def test_gather_of_other_shards_raises_on_every_rank(pools: Pools, rows: tuple[int, ...]) -> None:
    for said in pools(2).run(gather_ones, rows):
        assert said.startswith("ValueError") and str(list(rows)) in said and "shard_sequence" in said


def gather_odd(what: str) -> str:
    x: Any = torch.ones(2, 3)
    tensors: dict[str, list[Any]] = {"dims": [x[0]], "dtype": [x.double()], "size": [x[:1]], "more": [x, x],
                                     "none": [], "list": [[1]], "dim": [torch.tensor(1.0)]}  # fmt: skip
    if dist.get_rank() != 1:
        return refusal(gather_sequence, cp_mesh(), x, dim=-1)
    layout = {"layout": "spiral", "stripes": "striped"}.get(what, "contiguous")
    return refusal(gather_sequence, cp_mesh(), *tensors.get(what, [x]), dim=-1, layout=layout)


@pytest.mark.parametrize("what", ["dims", "dtype", "size", "more", "none", "list", "dim", "layout", "stripes"])
def test_gather_of_one_ranks_odd_tensors_raises_on_every_rank(pools: Pools, what: str) -> None:
    for said in pools(2).run(gather_odd, what):
        assert said.startswith("ValueError") and "timed out" not in said


# Errors


def refused_on_rank() -> list[str]:
    x, mesh = torch.ones(1, 4), cp_mesh()
    two_axes = mesh_of((1, dist.get_world_size()), ("dp", "cp"))
    anything: Any = "cp"
    return [
        refusal(shard_sequence, mesh, x, torch.ones(1, 5)),
        refusal(shard_sequence, mesh, x, dim=2),
        refusal(shard_sequence, mesh, x, dim="1"),
        refusal(gather_sequence, mesh, x, dim="1"),
        refusal(shard_sequence, mesh, x, torch.ones(4)),
        refusal(shard_sequence, mesh),
        *(refusal(f, mesh, distribute_tensor(x, mesh, [Shard(1)])) for f in (shard_sequence, gather_sequence)),
        *(refusal(positions, mesh, length) for length in (8.0, -8)),
        *(refusal(f, two_axes, y) for f, y in ((shard_sequence, x), (gather_sequence, x), (positions, 4))),
        *(refusal(f, anything, y) for f, y in ((shard_sequence, x), (gather_sequence, x), (positions, 4))),
        *(refusal(f, mesh, y, layout="ring") for f, y in ((shard_sequence, x), (gather_sequence, x), (positions, 4))),
    ]


def test_bad_arguments_raise_and_say_what_was_given(pools: Pools) -> None:
    first, *others = pools(2).run(refused_on_rank)
    assert others == [first]
    assert all(said.startswith("ValueError") for said in first)
    lengths, dim, no_dim, no_dim_to_gather, missing_dim, nothing, to_shard, to_gather, float_, negative, *rest = first
    assert "got ['DTensor']" in to_shard and "got ['DTensor']" in to_gather
    assert float_.endswith("tokens >= 0, got 8.0") and negative.endswith("tokens >= 0, got -8")
    assert "dim must be an integer" in no_dim and no_dim == no_dim_to_gather and no_dim.endswith("got '1'")
    assert "[1, 4], [1, 5]" in lengths and "dim 2" in dim and "[4]" in missing_dim and "one length" in nothing
    for said in rest[:3]:
        assert "('dp', 'cp')" in said and "mesh['cp']" in said
    for said in rest[3:6]:
        assert "got str" in said
    for said in rest[6:]:
        assert "'ring'" in said and "'contiguous'" in said


# next_token_labels


def test_labels_are_the_next_tokens_and_none_for_the_last() -> None:
    tokens = torch.tensor([[10, 11, 12, 13], [20, 21, 22, 23]])
    assert next_token_labels(tokens).tolist() == [[11, 12, 13, -100], [21, 22, 23, -100]]
    assert tokens.tolist() == [[10, 11, 12, 13], [20, 21, 22, 23]]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_last_token_of_each_document_has_no_label(dtype: torch.dtype) -> None:
    labels = next_token_labels(torch.arange(8)[None], torch.tensor([0, 3, 8], dtype=dtype))
    assert labels.tolist() == [[1, 2, -100, 4, 5, 6, 7, -100]]


def test_an_empty_document_takes_no_label_away() -> None:
    assert next_token_labels(torch.arange(6), torch.tensor([0, 0, 3, 3, 6])).tolist() == [1, 2, -100, 4, 5, -100]


def test_ignore_index_is_the_callers() -> None:
    assert next_token_labels(torch.arange(3), torch.tensor([0, 1, 3]), ignore_index=-1).tolist() == [-1, 2, -1]


def test_labels_of_a_single_token_and_of_none() -> None:
    assert next_token_labels(torch.tensor([5])).tolist() == [-100]
    assert next_token_labels(torch.empty(2, 0, dtype=torch.long), torch.tensor([0, 0])).shape == (2, 0)


@pytest.mark.parametrize("form", [torch.tensor, list, Documents])
def test_boundaries_of_each_row(form: Callable[[list[list[int]]], Any]) -> None:
    tokens = torch.arange(16).view(2, 8)
    labels = next_token_labels(tokens, form([[0, 3, 8, 8], [0, 1, 7, 8]]))
    assert labels.tolist() == [[1, 2, -100, 4, 5, 6, 7, -100], [-100, 10, 11, 12, 13, 14, -100, -100]]


def test_documents_label_as_their_boundaries_do() -> None:
    tokens = torch.tensor([[5, 6, 0, 7, 8], [0, 5, 6, 7, 0]])
    want = [[6, 0, -100, 8, -100], [-100, 6, 7, 0, -100]]
    assert next_token_labels(tokens, documents_from_eos(tokens, 0)).tolist() == want
    shared = [[6, 0, -100, 8, -100], [5, 6, -100, 0, -100]]
    assert next_token_labels(tokens, Documents([0, 3, 5])).tolist() == shared
    assert next_token_labels(tokens[0], Documents([0, 3, 5])).tolist() == shared[0]


@pytest.mark.parametrize(
    ("boundaries", "words"),
    [
        ([0, 9], r"end at the 8 tokens .* got cu_seqlens\[-1\] = 9"),
        ([0, 7], r"end at the 8 tokens .* got cu_seqlens\[-1\] = 7"),
        ([-1, 8], r"start at 0 .* cu_seqlens\[0\] = -1"),
        ([0, 5, 4, 8], r"cu_seqlens\[2\] = 4 after 5"),
        ([[0, 8]] * 3, r"\[3, 2\] for 2 rows"),
    ],
)
def test_boundaries_that_do_not_fit_the_tokens_raise(boundaries: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        next_token_labels(torch.arange(16).view(2, 8), torch.tensor(boundaries))


def test_boundaries_of_rows_need_rows() -> None:
    with pytest.raises(ValueError, match=r"need tokens \[B, S\], got \[1, 2\] for \[8\]"):
        next_token_labels(torch.arange(8), torch.tensor([[0, 8]]))


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (torch.tensor(3), r"a sequence of tokens, \[\.\.\., S\]"),
        (torch.zeros(4, dtype=torch.complex64), "integers, got torch.complex64"),
    ],
)
def test_what_is_no_sequence_of_tokens_has_no_labels(tokens: torch.Tensor, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        next_token_labels(tokens)


def labels_on_rank(boundaries: list[int]) -> list[int]:
    labels = next_token_labels(torch.arange(8)[None], Documents(boundaries, cp_mesh()))
    return shard_sequence(cp_mesh(), labels)[0].tolist()


@pytest.mark.parametrize(
    ("boundaries", "first", "second"),
    [
        # The label of a shard's last token is the next shard's first, unless a document ends there.
        ([0, 3, 8], [1, 2, -100, 4], [5, 6, 7, -100]),
        ([0, 4, 8], [1, 2, 3, -100], [5, 6, 7, -100]),
        ([0, 5, 8], [1, 2, 3, 4], [-100, 6, 7, -100]),
        ([0, 7, 8], [1, 2, 3, 4], [5, 6, -100, -100]),
    ],
)
def test_labels_at_cuts_and_document_ends(
    pools: Pools, boundaries: list[int], first: list[int], second: list[int]
) -> None:
    assert pools(2).run(labels_on_rank, boundaries) == [first, second]


# token_mean


def losses_on_rank(counts: tuple[int, ...], gradients: Literal["mean", "sum"], shape: tuple[int, ...]) -> list[float]:
    """The value, its gradient joined over the ranks, and both in one process."""
    rank, ranks = dist.get_rank(), len(counts)
    x = torch.randn(sum(counts), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    start = sum(counts[:rank])

    def losses(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (rows * weight - 1).square()

    weight = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    mesh = mesh_of(shape, ("dp", "cp")) if len(shape) == 2 else cp_mesh()
    value = token_mean(losses(x[start : start + counts[rank]], weight).sum(), counts[rank], mesh, gradients=gradients)
    (grad,) = torch.autograd.grad(value, weight)
    dist.all_reduce(grad)
    if gradients == "mean":
        grad /= ranks
    alone = losses(x, weight).mean()
    return [value.item(), grad.item(), alone.item(), torch.autograd.grad(alone, weight)[0].item()]


@pytest.mark.parametrize("gradients", ["mean", "sum"])
@pytest.mark.parametrize(
    ("counts", "shape"), [((5,), (1,)), ((5, 1), (2,)), ((0, 7), (2,)), ((1, 2, 9), (3,)), ((3, 0, 1, 6), (2, 2))]
)
def test_token_mean_equals_one_process(
    pools: Pools, counts: tuple[int, ...], shape: tuple[int, ...], gradients: str
) -> None:
    for value, grad, mean, mean_grad in pools(len(counts)).run(losses_on_rank, counts, gradients, shape):
        assert value == pytest.approx(mean, rel=1e-12) and grad == pytest.approx(mean_grad, rel=1e-12)


def packed_losses_on_rank(boundaries: list[int]) -> tuple[float, float, int, bool]:
    """Distance of mean and gradient from one process, this rank's tokens that count, and whether all is finite."""
    logits = torch.randn(1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    labels = next_token_labels(torch.arange(8)[None], torch.tensor(boundaries))
    mine, mine_labels = shard_sequence(cp_mesh(), logits, labels)

    def loss_sum(x: torch.Tensor, y: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy((x + bias).flatten(0, 1), y.flatten(), reduction="sum")

    bias = torch.zeros(8, dtype=torch.float64, requires_grad=True)
    count = (mine_labels != -100).sum()
    value = token_mean(loss_sum(mine, mine_labels, bias), count, cp_mesh(), gradients="sum")
    (grad,) = torch.autograd.grad(value, bias)
    finite = bool(torch.isfinite(grad).all())
    dist.all_reduce(grad)
    alone = loss_sum(logits, labels, bias) / (8 - sum(b > a for a, b in pairwise(boundaries)))
    (alone_grad,) = torch.autograd.grad(alone, bias)
    return abs(float(value - alone)), float((grad - alone_grad).abs().max()), int(count), finite


@pytest.mark.parametrize(
    ("boundaries", "counts"),
    [
        ([0, 7, 8], [4, 2]),
        ([0, 3, 8], [3, 3]),
        # All of the second rank is padding: documents of one token.
        ([0, 4, 5, 6, 7, 8], [3, 0]),
    ],
)
def test_every_token_of_packed_documents_counts_once(pools: Pools, boundaries: list[int], counts: list[int]) -> None:
    found = pools(2).run(packed_losses_on_rank, boundaries)
    assert [count for _, _, count, _ in found] == counts
    for value_error, grad_error, _, finite in found:
        assert finite and value_error < 1e-12 and grad_error < 1e-12


def float32_means(cases: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(dist.get_rank())
    sums, counts = 1000 * torch.rand(cases, generator=generator), torch.randint(1, 300, (cases,), generator=generator)
    return torch.stack([token_mean(s, n, cp_mesh()) for s, n in zip(sums, counts, strict=True)])


def test_token_mean_is_bitwise_the_same_on_every_rank(pools: Pools) -> None:
    first, *others = pools(3).run(float32_means, 50)
    assert all(torch.equal(first, other) for other in others)


def mean_of_nothing() -> tuple[float, float]:
    weight = torch.ones(4, requires_grad=True)
    value = token_mean(weight[:0].sum(), 0, cp_mesh())
    value.backward()
    assert weight.grad is not None
    return value.item(), weight.grad.abs().sum().item()


def test_token_mean_without_tokens_is_zero_with_zero_gradients(pools: Pools) -> None:
    assert pools(2).run(mean_of_nothing) == [(0.0, 0.0)] * 2


def test_token_mean_without_a_mesh_is_the_mean() -> None:
    losses = torch.tensor([1.0, 2.0, 6.0], requires_grad=True)
    value = token_mean(losses.sum(), torch.tensor(3), None)
    value.backward()
    assert value.item() == 3.0 and losses.grad is not None
    assert torch.allclose(losses.grad, torch.full((3,), 1 / 3))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gradients": "average"}, "'mean' or 'sum', got 'average'"),
        ({"mesh": "cp"}, "mesh must be a DeviceMesh, a ProcessGroup or None, got str"),
        ({"loss_sum": torch.ones(3)}, r"loss_sum must be a scalar, got a tensor of shape \[3\]; pass the sum"),
        ({"loss_sum": 6.0}, r"loss_sum must be a scalar tensor, got 6\.0"),
        # Its mean, 1.67, would come back as 1.
        ({"loss_sum": torch.tensor(5)}, "loss_sum must be a real float tensor, got torch.int64; pass the sum"),
        ({"loss_sum": torch.tensor(5j)}, "loss_sum must be a real float tensor, got torch.complex64"),
        ({"count": torch.tensor(3j)}, "count must be a real tensor, got torch.complex64; pass the number"),
        ({"count": torch.ones(3)}, r"count must be a scalar, got a tensor of shape \[3\]; pass the number"),
        ({"count": [1, 2]}, r"count must be a scalar, got \[1, 2\]; pass the number"),
    ],
)
def test_token_mean_refuses_what_it_would_misread(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        token_mean(**{"loss_sum": torch.tensor(6.0), "count": 3, "mesh": None} | arguments)


def mean_of_a_dtensor() -> str:
    loss = DTensor.from_local(torch.tensor(6.0), cp_mesh(), [Partial()])
    return refusal(token_mean, loss, 3, cp_mesh())


def test_token_mean_takes_what_is_on_this_rank(pools: Pools) -> None:
    for said in pools(2).run(mean_of_a_dtensor):
        assert said.startswith("ValueError: loss_sum must be this rank's own, a plain tensor, got a DTensor (Partial")


@pytest.mark.parametrize("layout", ["striped", "zigzag"])
def test_a_sequence_that_is_whole_lies_in_its_own_order_at_any_length(layout: str) -> None:
    x = torch.randn(1, 5, 2, 4)
    assert positions(None, 5, layout).tolist() == [0, 1, 2, 3, 4]
    assert torch.equal(ring_attention(x, x, x, layout=layout), ring_attention(x, x, x))
