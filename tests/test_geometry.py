"""The integers, without a tensor: bands, shards and plans against enumeration, and who may import whom."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from time import perf_counter

import pytest
import torch

import dtensor_ring_swa
from dtensor_ring_swa import Plan, Window, make_plan
from dtensor_ring_swa.band import Band
from dtensor_ring_swa.block import Block
from dtensor_ring_swa.choice import choose_exchange
from dtensor_ring_swa.kernels import KERNELS
from dtensor_ring_swa.layout import Run, chunk_length, shard
from dtensor_ring_swa.plan import Transfer
from dtensor_ring_swa.planning import _make_plan
from dtensor_ring_swa.ring import balanced_layout

PACKAGE = Path(dtensor_ring_swa.__file__).parent

# Every import points to the left. A new module takes its place here.
ORDER = (
    "window", "layout", "band", "packing", "block", "visible", "choice", "plan", "planning", "ring", "groups",
    "agreement", "cut", "messages", "wire", "exchange", "beside", "device", "deal", "geometry", "keys", "merge_triton",
    "merge", "kernels.request", "kernels.pieces", "kernels.blocks", "kernels.layers", "kernels.reference",
    "kernels.flash_band", "kernels.flash_groups", "kernels.flash_launch", "kernels.flash_package", "kernels.aten",
    "kernels.flash_calls", "kernels.flash", "kernels.intervals", "kernels.few_keys", "kernels.split_keys",
    "kernels.triton_tiles", "kernels.triton_launch", "kernels.triton_kernels", "kernels.triton_package",
    "kernels.triton", "kernels", "kernels.__main__", "once", "option_checks", "options", "halo", "rotate", "schedule",
    "prepare", "autocast", "on_shard", "library", "ops", "sharding", "heads", "learned_sinks", "dtensor", "cu_seqlens",
    "documents", "document_starts", "facts", "checks", "call_checks", "attention", "sequence", "loss", "module",
    "parallel.inputs", "parallel.joint", "parallel.lengths", "parallel.hooks", "parallel.style", "parallel.plans",
    "parallel", "",
)  # fmt: skip
# Stand on the whole package; nothing in it imports them.
ON_TOP = ("testing", "bench", "compat", "integrations")

# (rows, keys, lower, upper): 5,460 bands, hence 5,460 blocks.
BANDS = tuple(product(range(5), range(6), range(-6, 7), range(-7, 7)))

# (tokens, ranks, (left, right)): 3,060 sequences, 9,180 plans.
SEQUENCES = tuple(product(range(17), range(1, 6), product((0, 1, 2, 3, 5, -1), (0, 1, 2, 4, 7, -1))))


@cache
def plans(seq_len: int, ranks: int, window: tuple[int, int]) -> tuple[Plan, ...]:
    return tuple(make_plan(seq_len, ranks, rank, Window(*window)) for rank in range(ranks))


def all_plans() -> Iterator[Plan]:
    for sequence in SEQUENCES:
        yield from plans(*sequence)


def reach(plan: Plan) -> tuple[int, int]:
    left, right = (plan.seq_len if side == -1 else side for side in plan.window)
    return left, right


def shown(band: Band, q_len: int, k_len: int) -> set[tuple[int, int]]:
    return {(i, j) for i in range(q_len) for j in range(k_len) if band.lower <= j - i <= band.upper}


def in_shard(plan: Plan, transfer: Transfer) -> range:
    """The global rows of a send."""
    return range(plan.start + transfer.start, plan.start + transfer.stop)


def in_halo(plan: Plan, transfer: Transfer) -> range:
    """The global rows of a receive: the halo is what lies left of the shard, then what lies right."""
    rows = [*range(plan.start - plan.left, plan.start), *range(plan.stop, plan.stop + plan.right)]
    received = rows[transfer.start : transfer.stop]
    assert received == list(range(received[0], received[-1] + 1)), (plan, transfer)
    return range(received[0], received[-1] + 1)


# Bands


def test_band_pairs_counts_what_is_shown() -> None:
    for q_len, k_len, lower, upper in BANDS:
        band = Band(lower, upper)
        assert band.pairs(q_len, k_len) == len(shown(band, q_len, k_len)), (band, q_len, k_len)


def test_band_clip_shows_the_same_with_bounds_no_wider_than_the_block() -> None:
    for q_len, k_len, lower, upper in BANDS:
        clipped = Band(lower, upper).clip(q_len, k_len)
        assert shown(clipped, q_len, k_len) == shown(Band(lower, upper), q_len, k_len), (lower, upper, q_len, k_len)
        assert clipped.lower >= -q_len and clipped.upper <= k_len, (lower, upper, q_len, k_len)


def test_band_trim_keeps_exactly_the_rows_that_see_and_the_keys_that_are_seen() -> None:
    for q_len, k_len, lower, upper in BANDS:
        pairs = shown(Band(lower, upper), q_len, k_len)
        rows, keys, trimmed = Band(lower, upper).trim(q_len, k_len)
        case = (lower, upper, q_len, k_len)
        assert set(rows) == {i for i, _ in pairs} and set(keys) == {j for _, j in pairs}, case
        assert {(rows[i], keys[j]) for i, j in shown(trimmed, len(rows), len(keys))} == pairs, case


def test_flash_window_of_a_trimmed_band_shows_the_same_from_the_bottom_right() -> None:
    for q_len, k_len, lower, upper in BANDS:
        rows, keys, trimmed = Band(lower, upper).trim(q_len, k_len)
        if not rows:
            continue
        left, right = trimmed.flash_window(len(rows), len(keys))
        assert left >= 0 and right >= 0, (lower, upper, q_len, k_len)
        last = len(keys) - len(rows)  # what lines up the last row with the last key
        flash = {(i, j) for i, j in product(range(len(rows)), range(len(keys))) if -left <= j - (i + last) <= right}
        assert flash == shown(trimmed, len(rows), len(keys)), (lower, upper, q_len, k_len)


# Shards


def test_shards_are_those_of_torch_chunk() -> None:
    for seq_len, ranks in product(range(30), range(1, 9)):
        chunks = [x.tolist() for x in torch.arange(seq_len).chunk(ranks)] if seq_len else []
        chunks += [[]] * (ranks - len(chunks))
        shards = [shard(seq_len, ranks, rank) for rank in range(ranks)]
        assert [list(x.positions) for x in shards] == chunks, (seq_len, ranks)
        assert [len(x) for x in shards] == [len(x) for x in chunks], (seq_len, ranks)
        assert chunk_length(seq_len, ranks) == len(chunks[0]), (seq_len, ranks)


def test_run_counts_by_its_step() -> None:
    assert list(Run(1, 8, 3).positions) == [1, 4, 7] and len(Run(1, 8, 3)) == 3


# Plans


def test_blocks_show_each_row_its_window_and_nothing_else() -> None:
    for plan in all_plans():
        left, right = reach(plan)
        seen: dict[int, set[int]] = {}
        for block in plan.blocks:
            assert block.q_start < block.q_stop and 0 <= block.k_start < block.k_stop, plan
            assert block.k_stop <= plan.left + plan.rows + plan.right, plan
            q_len, k_len = block.q_stop - block.q_start, block.k_stop - block.k_start
            rows = range(plan.start + block.q_start, plan.start + block.q_stop)
            assert seen.keys().isdisjoint(rows), plan
            seen |= {p: set() for p in rows}
            first_key = plan.start - plan.left + block.k_start
            for i, j in shown(block.band, q_len, k_len):
                seen[rows[i]].add(first_key + j)
        assert seen == {
            p: {j for j in range(plan.seq_len) if p - left <= j <= p + right} for p in range(plan.start, plan.stop)
        }, plan


def test_received_rows_are_those_the_window_reaches_beyond_the_shard() -> None:
    for plan in all_plans():
        left, right = reach(plan)
        before, after = (plan.start, plan.seq_len - plan.stop) if plan.rows else (0, 0)
        assert (plan.left, plan.right) == (min(left, before), min(right, after)), plan
        assert sum(map(len, plan.receives)) == plan.left + plan.right, plan


def test_received_rows_fill_the_halo_in_order() -> None:
    for plan in all_plans():
        filled = [row for t in plan.receives for row in range(t.start, t.stop)]
        assert filled == list(range(plan.left + plan.right)), plan


def test_received_rows_come_from_their_owners() -> None:
    for sequence in SEQUENCES:
        every = plans(*sequence)
        for plan in every:
            for t in plan.receives:
                rows, owner = in_halo(plan, t), every[t.peer]
                assert t.peer != plan.rank and owner.start <= rows.start and rows.stop <= owner.stop, plan


def test_no_more_neighbours_than_the_window_spans_shards() -> None:
    for plan in all_plans():
        left, right = reach(plan)
        chunk = max(1, chunk_length(plan.seq_len, plan.ranks))
        assert sum(t.peer < plan.rank for t in plan.receives) <= -(-left // chunk), plan
        assert sum(t.peer > plan.rank for t in plan.receives) <= -(-right // chunk), plan


def test_each_send_is_the_peers_receive() -> None:
    for sequence in SEQUENCES:
        every = plans(*sequence)
        sent = {(p.rank, t.peer): in_shard(p, t) for p in every for t in p.sends}
        received = {(t.peer, p.rank): in_halo(p, t) for p in every for t in p.receives}
        assert sent == received, sequence
        # One message from rank to rank at most, so that none can overtake another.
        assert len(sent) == sum(len(p.sends) for p in every) == sum(len(p.receives) for p in every), sequence


def test_no_message_is_empty_or_touches_an_empty_rank() -> None:
    for sequence in SEQUENCES:
        every = plans(*sequence)
        for plan in every:
            for t in (*plan.sends, *plan.receives):
                assert len(t) > 0 and plan.rows and every[t.peer].rows, plan


def test_interior_is_every_row_whose_window_lies_inside_the_shard() -> None:
    for plan in all_plans():
        left, right = reach(plan)
        inside = {
            p - plan.start
            for p in range(plan.start, plan.stop)
            if max(0, p - left) >= plan.start and min(plan.seq_len - 1, p + right) < plan.stop
        }
        assert {row for block in plan.interior for row in range(block.q_start, block.q_stop)} == inside, plan


def test_joint_calls_show_what_the_blocks_show_in_one_band_where_a_shard_has_an_interior() -> None:
    for plan in all_plans():
        if not plan.boundary:
            continue
        (call,) = plan.joint_calls
        seen = [
            (i + call.q_start + b.q_start, j + call.k_start + b.k_start)
            for b in call.blocks
            for i, j in shown(b.band, b.q_len, b.k_len)
        ]
        want = {(i + b.q_start, j + b.k_start) for b in plan.blocks for i, j in shown(b.band, b.q_len, b.k_len)}
        assert len(seen) == len(want) and set(seen) == want, plan
        assert len(call.blocks) == 1, plan


def test_interior_blocks_touch_no_halo_row() -> None:
    for plan in all_plans():
        for block in plan.interior:
            assert plan.left <= block.k_start and block.k_stop <= plan.left + plan.rows, plan


def test_pairs_are_the_windows_pairs() -> None:
    for sequence in SEQUENCES:
        seq_len, _, (left, right) = sequence
        left, right = (seq_len if side == -1 else side for side in (left, right))
        want = sum(p - left <= j <= p + right for p in range(seq_len) for j in range(seq_len))
        assert sum(plan.pairs for plan in plans(*sequence)) == want, sequence


def test_plan_of_the_readme() -> None:
    plan = make_plan(16, 4, 1, Window(2, 0))
    assert (plan.start, plan.stop, plan.left, plan.right) == (4, 8, 2, 0)
    assert plan.receives == (Transfer(0, 0, 2),) and plan.sends == (Transfer(2, 2, 4),)
    assert plan.interior == (Block(2, 4, 2, 6, Band(0, 2)),)
    assert plan.boundary == (Block(0, 2, 0, 4, Band(0, 2)),)


def test_bytes_count_received_keys_and_values() -> None:
    plan = make_plan(64, 4, 1, Window(5, 3))
    assert plan.bytes(kv_heads=2, head_dim=8) == (5 + 3) * 2 * (8 + 8) * 2
    assert plan.bytes(kv_heads=2, head_dim=8, v_head_dim=4, batch=3, itemsize=4) == (5 + 3) * 3 * 2 * (8 + 4) * 4


def test_flops_count_two_products_over_the_visible_pairs() -> None:
    plan = make_plan(64, 4, 1, Window(5, 3))
    pairs = 16 * (5 + 1 + 3)
    assert plan.flops(q_heads=2, head_dim=8) == pairs * 2 * (2 * 8 + 2 * 8)
    assert plan.flops(q_heads=2, head_dim=8, v_head_dim=4, batch=3) == pairs * 3 * 2 * (2 * 8 + 2 * 4)


def test_describe_says_what_lies_where_and_what_travels() -> None:
    assert make_plan(16, 4, 1, Window(5, 1)).describe().splitlines() == [
        "rank 1 of 4: tokens [4, 8) of 16, window (5, 1)",
        "halo: 4 rows from rank 0, 1 rows from rank 2",
        "rows: 0 interior, 4 boundary; 27 (query, key) pairs",
        "exchange='auto' takes the halo: it holds at most 6 rows, no more than 8 shards of 4",
    ]
    assert "nothing to receive" in make_plan(16, 4, 0, Window(2, 0)).describe()


@pytest.mark.parametrize("window", [(-1, 0), (0, -1), (-1, -1), (5, 0), (40, 40)])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("seq_len", [15, 16])
@pytest.mark.parametrize("boundaries", [None, (0, 16), (0, 3, 16)])
def test_describe_says_what_auto_takes(
    window: tuple[int, int], ranks: int, seq_len: int, boundaries: tuple[int, ...] | None
) -> None:
    edges = boundaries and (*boundaries[:-1], seq_len)
    layout = balanced_layout("auto", seq_len, ranks, Window(*window), edges)
    choice = choose_exchange("auto", layout, seq_len, ranks, Window(*window), edges is not None)
    said = make_plan(seq_len, ranks, 0, window, edges).describe().splitlines()[-1]
    assert said.startswith(f"exchange='auto' takes the {choice.exchange}: ")
    assert ("'zigzag'" in said) == (edges is None and layout == "zigzag")


@pytest.mark.parametrize(("seq_len", "ranks", "rank"), [(8, 0, 0), (8, 2, 2), (8, 2, -1), (-1, 2, 0)])
def test_impossible_plans_raise_and_name_the_values(seq_len: int, ranks: int, rank: int) -> None:
    with pytest.raises(ValueError, match=f"seq_len={seq_len}, rank={rank}, ranks={ranks}"):
        make_plan(seq_len, ranks, rank, Window(3, 0))


def test_a_plan_has_no_negative_sink_tokens() -> None:
    with pytest.raises(ValueError, match="sink_tokens=-1"):
        make_plan(8, 2, 0, Window(3, 0), sink_tokens=-1)


def test_plans_are_hashable_and_shared() -> None:
    plan = make_plan(64, 4, 1, Window(5, 3))
    assert (
        make_plan(64, 4, 1, Window(5, 3)) is plan
        and {plan: 1}[_make_plan.__wrapped__(64, 4, 1, Window(5, 3), (0, 64), 0)]
    )


def test_cost_of_a_plan_does_not_grow_with_tokens_or_ranks() -> None:
    def plan_and_seconds() -> tuple[Plan, float]:
        start = perf_counter()
        return _make_plan.__wrapped__(
            64 * 2**20, 4096, 2048, Window(4095, 0), (0, 64 * 2**20), 0
        ), perf_counter() - start

    plans, seconds = zip(*(plan_and_seconds() for _ in range(5)), strict=True)
    assert len(plans[0].sends) == len(plans[0].receives) == 1
    assert min(seconds) < 5e-3


# Imports


@cache
def modules() -> dict[str, ast.Module]:
    """Every module by its name inside the package; the package itself is ""."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = ast.parse(path.read_text("utf-8"))
    return found


def below() -> dict[str, ast.Module]:
    return {name: tree for name, tree in modules().items() if name.split(".")[0] not in ON_TOP}


def imported(tree: ast.Module) -> set[str]:
    """Full names of the modules that a module imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module is not None, "imports are absolute"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                names.add(inner if inner.removeprefix("dtensor_ring_swa.") in modules() else node.module)
    return names


def imported_here(tree: ast.Module) -> set[str]:
    """Names inside the package of the modules of it that a module imports."""
    own = {name for name in imported(tree) if name.split(".")[0] == "dtensor_ring_swa"}
    return {name.removeprefix("dtensor_ring_swa").removeprefix(".") for name in own}


@pytest.mark.parametrize("name", ["window", "layout", "band", "packing", "block", "visible", "choice", "plan", "ring"])
def test_geometry_imports_no_torch(name: str) -> None:
    waiting, reached, outside = [name], set(), set()
    while waiting:
        reached.add(module := waiting.pop())
        outside |= {x.split(".")[0] for x in imported(modules()[module])} - {"dtensor_ring_swa"}
        waiting += imported_here(modules()[module]) - reached
    assert outside <= {"__future__", "bisect", "collections", "dataclasses", "functools", "itertools", "math", "typing"}


def test_imports_run_downward_only() -> None:
    assert set(ORDER) == set(below()), "name every module in ORDER"
    for name, tree in below().items():
        higher = set(ORDER[ORDER.index(name) :])
        assert higher.isdisjoint(imported_here(tree)), f"{name or 'the package'} imports upward"


def test_kernels_do_not_import_each_other() -> None:
    kernels = {f"kernels.{name}" for name in KERNELS}
    assert {"kernels.reference", "kernels.aten"} <= kernels <= modules().keys()
    for name in kernels:
        assert imported_here(modules()[name]).isdisjoint(kernels | {"kernels"}), name


def test_nothing_imports_what_stands_on_top() -> None:
    for name, tree in below().items():
        assert {other.split(".")[0] for other in imported_here(tree)}.isdisjoint(ON_TOP), name
