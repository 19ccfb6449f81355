"""examples/train.py: the same losses on every mesh, also from a checkpoint, and what its command line refuses."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from itertools import accumulate, pairwise
from pathlib import Path
from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from dtensor_ring_swa import Documents
from dtensor_ring_swa.testing import RankPool

import train
from data import Packed, pack, packed_batch_of
from model import Decoder, ModelConfig

Pools = Callable[[int], RankPool]

ROOT = Path(__file__).parents[1]
SMALL = ("--seq-len=130", "--window=48", "--layers=2", "--dim=32", "--batch=2")
TEXT = b"the quick brown fox jumps over the lazy dog. " * 40
# Some documents of one token, some longer than a sequence; 65 is a cut of 130 tokens, and 130 where a sequence begins.
SIZES = (1, 64, 1, 64, 45, 300, 7, 1, 90, 33, 200, 500, 2, 180, 312)
assert sum(SIZES) == len(TEXT)


def source(args: argparse.Namespace) -> torch.Tensor | Packed:
    text = torch.frombuffer(bytearray(TEXT), dtype=torch.uint8)
    return Packed(text, tuple(accumulate(SIZES))) if args.pack else text


def steps(*flags: str, device: str = "cpu") -> list[dict[str, float]]:
    """The metrics of a run on all ranks of this pool."""
    args = train.arguments([*SMALL, *flags], dist.get_world_size())
    return list(train.train(args, source(args), torch.device(device)))


def on_mesh(pools: Pools, dp: int, cp: int, *flags: str, tp: int = 1) -> list[dict[str, float]]:
    """The metrics, which every rank reports alike."""
    first, *others = pools(dp * cp * tp).run(steps, f"--dp={dp}", f"--cp={cp}", f"--tp={tp}", *flags)
    for other in others:
        assert [x["loss"] for x in other] == [x["loss"] for x in first]
    return first


def assert_same(alone: list[dict[str, float]], other: list[dict[str, float]], loss: float, norm: float) -> None:
    for one, two in zip(alone, other, strict=True):
        assert one["step"] == two["step"]
        assert abs(one["loss"] - two["loss"]) < loss, f"step {one['step']}"
        assert abs(one["grad_norm"] / two["grad_norm"] - 1) < norm, f"step {one['step']}"


@pytest.mark.parametrize(
    ("flags", "loss", "norm"),
    [
        # 130 tokens do not divide by 4 ranks: the last shard is shorter.
        (("--dtype=float32", "--steps=20"), 1e-5, 1e-4),
        # 128 tokens divide by 2 x 4: the global layer is dealt to the zigzag layout and back.
        (("--dtype=float64", "--seq-len=128", "--global-every=2", "--steps=8"), 1e-9, 1e-9),
    ],
)
def test_every_mesh_gives_the_same_losses(pools: Pools, flags: tuple[str, ...], loss: float, norm: float) -> None:
    alone = on_mesh(pools, 1, 1, *flags)
    assert [line["step"] for line in alone] == list(range(len(alone)))
    assert alone[-1]["loss"] < alone[0]["loss"] - 1
    for dp, cp in ((1, 2), (2, 2), (1, 4)):
        assert_same(alone, on_mesh(pools, dp, cp, *flags), loss, norm)


def test_packed_documents_and_sinks_on_every_mesh(pools: Pools) -> None:
    flags = ("--pack", "--sinks", "--global-every=2", "--steps=20")
    alone = on_mesh(pools, 1, 1, *flags)
    for dp, cp in ((2, 2), (1, 4)):
        assert_same(alone, on_mesh(pools, dp, cp, *flags), 1e-5, 1e-5)


@pytest.mark.parametrize("flag", ["--pack", "--sinks"])
def test_either_alone(pools: Pools, flag: str) -> None:
    alone, together = (on_mesh(pools, dp, cp, flag, "--steps=3", "--dtype=float64") for dp, cp in ((1, 1), (2, 2)))
    assert_same(alone, together, 1e-9, 1e-9)


def gradients(*flags: str) -> dict[str, torch.Tensor]:
    """All parameters' gradients in the second step, when the sinks are no longer all 0."""
    args = train.arguments([*SMALL, "--dtype=float64", "--global-every=2", *flags], dist.get_world_size())
    mesh = train.init_device_mesh("cpu", (args.dp, args.cp, args.tp), mesh_dim_names=("dp_shard", "cp", "tp"))
    model = train.build(args, torch.device("cpu"), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=30)
    train.loss_of(args, model, mesh, source(args), 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    train.loss_of(args, model, mesh, source(args), 1).backward()
    return {name: cast(DTensor, p.grad).full_tensor() for name, p in model.named_parameters()}


@pytest.mark.parametrize("mesh", [(2, 2, 1), (1, 2, 2)])
def test_every_gradient_is_that_of_one_process(pools: Pools, mesh: tuple[int, int, int]) -> None:
    flags = ("--pack", "--sinks", "--seq-len=128")
    alone = pools(1).run(gradients, *flags)[0]
    assert min(float(alone[f"layers.{layer}.attention.sinks.logits"].abs().min()) for layer in (0, 1)) > 1e-5
    for grads in pools(4).run(gradients, *flags, *map("--{}={}".format, ("dp", "cp", "tp"), mesh)):
        assert grads.keys() == alone.keys()
        assert max(float((grads[name] - grad).abs().max()) for name, grad in alone.items()) < 1e-12


def test_sinks_on_three_axes_and_going_on_alone(pools: Pools, tmp_path: Path) -> None:
    """Two sinks a tensor-parallel rank over four of FSDP: some ranks have none, in the checkpoint too."""
    flags = ("--pack", "--sinks", "--seq-len=64", "--dtype=float64")
    alone = on_mesh(pools, 1, 1, "--steps=3", *flags)
    pools(8).run(dist.get_rank, timeout=120)  # so that none waits while others still start
    saved = on_mesh(pools, 2, 2, "--steps=2", f"--save={tmp_path}", *flags, tp=2)
    assert_same(alone, [*saved, *on_mesh(pools, 1, 1, "--steps=1", f"--resume={tmp_path}", *flags)], 1e-9, 1e-9)


def test_a_checkpoint_goes_on_on_any_mesh(pools: Pools, tmp_path: Path) -> None:
    flags = ("--dtype=float64", "--global-every=2")
    alone = on_mesh(pools, 1, 1, "--steps=6", *flags)
    saved = on_mesh(pools, 2, 2, "--steps=3", f"--save={tmp_path}", *flags)
    assert_same(alone[:3], saved, 1e-9, 1e-9)
    for dp, cp in ((1, 4), (2, 2), (1, 1)):
        assert_same(alone[3:], on_mesh(pools, dp, cp, "--steps=3", f"--resume={tmp_path}", *flags), 1e-9, 1e-9)


def test_every_option_of_attention_matters(pools: Pools) -> None:
    options = (["--window=1"], ["--window=48"], ["--window=1", "--global-every=2"], ["--sinks"], ["--pack"],
               ["--pack", "--sinks"])  # fmt: skip
    losses = {on_mesh(pools, 1, 1, "--steps=1", *flags)[0]["loss"] for flags in options}
    assert len(losses) == len(options)


def test_the_command_line_as_users_start_it(tmp_path: Path) -> None:
    text, metrics = tmp_path / "text.txt", tmp_path / "new" / "metrics.jsonl"
    text.write_bytes(TEXT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    flags = [
        "--cp=2",
        "--steps=2",
        "--sinks",
        f"--text={text}",
        f"--metrics={metrics}",
        f"--save={tmp_path / 'saved'}",
        *SMALL,
    ]
    # One process needs no launcher, and goes on from what two have saved, here with packed documents.
    alone = [
        "--steps=1",
        "--sinks",
        "--pack",
        f"--text={text}",
        f"--metrics={metrics}.alone",
        f"--resume={tmp_path / 'saved'}",
        *SMALL,
    ]
    for command in ([*torchrun, "examples/train.py", *flags], [sys.executable, "examples/train.py", *alone]):
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT)
        assert done.returncode == 0, done.stderr[-2000:]
        assert "own entropy is" in done.stdout
    lines = [json.loads(line) for path in (metrics, f"{metrics}.alone") for line in Path(path).read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert all(set(line) == {"step", "loss", "grad_norm", "tokens_per_s"} for line in lines)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--dp=2", "--cp=3"], "--dp 2 x --cp 3 x --tp 1 needs 6 processes, not 1"),
        (["--text=/nowhere"], "--text /nowhere does not exist"),
        (["--resume=/nowhere"], "--resume /nowhere is no folder"),
        (["--global-every=-1"], "--global-every must be 0 or more, got -1"),
        (["--window=0"], "--window must be at least 1, got 0"),
        (["--kv-heads=0"], "--kv-heads must be at least 1, got 0"),
        (["--dp=-1", "--cp=-1"], "--dp must be at least 1, got -1"),
        (["--seq-len=1"], "--seq-len must be at least 2"),
        (["--kernel=fast"], "invalid choice: 'fast'"),
        (["--heads=4", "--kv-heads=3"], "no multiple"),
    ],
)
def test_bad_arguments(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    refused(flags, 1, message, capsys)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tp=8"], "--kv-heads 2 does not divide by --tp 8"),
        (["--cp=4", "--tp=2", "--seq-len=1020"], "--seq-len 1020 does not divide by --cp 4 x --tp 2"),
        (["--dp=8"], "--batch 4 does not divide by --dp 8"),
    ],
)
def test_bad_meshes(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    refused(flags, 8, message, capsys)


def refused(flags: list[str], world: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        train.arguments(flags, world)
    assert stopped.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize("flags", [(), ("--pack",)])
def test_a_text_shorter_than_a_sequence(
    flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--seq-len=2000000000", f"--text={__file__}", *flags])
    with pytest.raises(SystemExit) as stopped:
        train.main()
    assert stopped.value.code == 2 and "too few for --seq-len" in capsys.readouterr().err


def near_and_far() -> float:
    """How far the logits of far positions are from those of near ones, in bfloat16, of their size."""
    args = train.arguments(["--dtype=bfloat16", "--seq-len=64", "--window=64", "--layers=1", "--dim=32"], 1)
    mesh = train.init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=("dp_shard", "cp", "tp"))
    model = train.build(args, torch.device("cpu"), mesh)
    tokens = torch.randint(256, (1, 64))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("attention.q.weight", "attention.k.weight")):
                weight.mul_(5)  # sharp attention, so that a wrong angle shows
        near, far = (model(tokens, torch.arange(64) + start).float() for start in (0, 1001))
    return float((near - far).norm() / near.norm())


def test_bfloat16_keeps_rotary_angles_exact(pools: Pools) -> None:
    """Attention sees distances only, so far positions give the logits of near ones, up to bfloat16's rounding."""
    assert pools(1).run(near_and_far)[0] < 0.1  # with angles in bfloat16 0.7


def test_sequences_follow_each_other_without_padding() -> None:
    text = torch.arange(sum(SIZES)).remainder(251).to(torch.uint8)
    packed, starts = Packed(text, tuple(accumulate(SIZES))), {0, *accumulate(SIZES[:-1])}
    batch, seq_len = 3, 77
    at = 0
    for step in range(2 * sum(SIZES) // (batch * seq_len)):  # twice through all documents
        tokens, boundaries = packed_batch_of(packed, batch, seq_len, step)
        assert tokens.dtype == torch.long and len(boundaries) == batch
        for row, edges in zip(tokens, boundaries, strict=True):
            where = [(at + i) % len(text) for i in range(seq_len)]
            assert row.tolist() == text[where].tolist()
            assert edges == [0, *(i for i in range(1, seq_len) if where[i] in starts), seq_len]
            at += seq_len


def test_documents_are_files(tmp_path: Path) -> None:
    files = {"a.txt": b"first", "b/c.txt": b"second one", "b/empty": b"", "d": b"3"}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(text)
    orders = set()
    for seed in range(20):
        text, ends = pack(str(tmp_path), seed)
        orders.add(tuple(bytes(text[start:stop].tolist()) for start, stop in pairwise((0, *ends))))
    assert len(orders) > 1 and {tuple(sorted(order)) for order in orders} == {(b"3", b"first", b"second one")}
    assert pack(str(tmp_path / "d"), 0).ends == (1,)
    with pytest.raises(ValueError, match="no text at"):
        pack(str(tmp_path / "b/empty"), 0)


def test_this_repository_is_the_text() -> None:
    text, ends = pack(None, 0)
    documents = {bytes(text[start:stop].tolist()) for start, stop in pairwise((0, *ends))}
    assert {(ROOT / name).read_bytes() for name in ("README.md", "examples/train.py", "tests/cases.py")} <= documents


def loss_of_single_tokens() -> float:
    args = train.arguments([*SMALL, "--pack"], 1)
    mesh = train.init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=("dp_shard", "cp", "tp"))
    text = torch.frombuffer(bytearray(TEXT), dtype=torch.uint8)
    model = train.build(args, torch.device("cpu"), mesh)
    return train.loss_of(args, model, mesh, Packed(text, tuple(range(1, len(TEXT) + 1))), 0).item()


def test_the_last_token_of_a_document_predicts_nothing(pools: Pools) -> None:
    assert pools(1).run(loss_of_single_tokens) == [0.0]


@pytest.mark.parametrize("sinks", [False, True])
def test_a_packed_document_is_as_if_alone(sinks: bool) -> None:
    """Global positions serve packed documents: a document's own differ from them by a constant."""
    torch.manual_seed(0)
    model = Decoder(ModelConfig(layers=2, dim=32, window=24, global_every=2, sinks=sinks)).double()
    for sink in (p for name, p in model.named_parameters() if "sinks" in name):
        torch.nn.init.normal_(sink)
    packed = Packed(torch.frombuffer(bytearray(TEXT), dtype=torch.uint8), tuple(accumulate(SIZES)))
    tokens, boundaries = packed_batch_of(packed, 1, 300, 0)
    with torch.no_grad():
        together = model(tokens, torch.arange(300), Documents(boundaries))
        alone = [model(tokens[:, a:b], torch.arange(b - a)) for a, b in pairwise(boundaries[0])]
    assert len(alone) == 6 and float((together - torch.cat(alone, 1)).abs().max()) < 1e-12
