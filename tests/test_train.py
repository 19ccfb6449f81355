"""examples/train.py: the same losses on every mesh, also from a checkpoint, and what its command line refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dtensor_ring_swa.testing import RankPool

import train

Pools = Callable[[int], RankPool]

ROOT = Path(__file__).parents[1]
SMALL = ("--seq-len=130", "--window=48", "--layers=2", "--dim=32", "--batch=2")
TEXT = b"the quick brown fox jumps over the lazy dog. " * 40


def steps(*flags: str) -> list[dict[str, float]]:
    """The metrics of a run on all ranks of this pool."""
    args = train.arguments([*SMALL, *flags], dist.get_world_size())
    text = torch.frombuffer(bytearray(TEXT), dtype=torch.uint8)
    return list(train.train(args, text, torch.device("cpu")))


def on_mesh(pools: Pools, dp: int, cp: int, *flags: str) -> list[dict[str, float]]:
    """The metrics, which every rank reports alike."""
    first, *others = pools(dp * cp).run(steps, f"--dp={dp}", f"--cp={cp}", *flags)
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


def test_a_checkpoint_goes_on_on_any_mesh(pools: Pools, tmp_path: Path) -> None:
    flags = ("--dtype=float64", "--global-every=2")
    alone = on_mesh(pools, 1, 1, "--steps=6", *flags)
    saved = on_mesh(pools, 2, 2, "--steps=3", f"--save={tmp_path}", *flags)
    assert_same(alone[:3], saved, 1e-9, 1e-9)
    for dp, cp in ((1, 4), (2, 2), (1, 1)):
        assert_same(alone[3:], on_mesh(pools, dp, cp, "--steps=3", f"--resume={tmp_path}", *flags), 1e-9, 1e-9)


def test_the_window_matters(pools: Pools) -> None:
    windows = (["--window=1"], ["--window=48"], ["--window=1", "--global-every=2"])
    losses = {on_mesh(pools, 1, 1, "--steps=1", *flags)[0]["loss"] for flags in windows}
    assert len(losses) == len(windows)


def test_the_command_line_as_users_start_it(tmp_path: Path) -> None:
    text, metrics = tmp_path / "text.txt", tmp_path / "new" / "metrics.jsonl"
    text.write_bytes(TEXT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    flags = ["--cp=2", "--steps=2", f"--text={text}", f"--metrics={metrics}", f"--save={tmp_path / 'saved'}", *SMALL]
    # One process needs no launcher, and goes on from what two have saved.
    alone = ["--steps=1", f"--text={text}", f"--metrics={metrics}.alone", f"--resume={tmp_path / 'saved'}", *SMALL]
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


def test_a_text_shorter_than_a_sequence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--seq-len=2000000000", f"--text={__file__}"])
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
