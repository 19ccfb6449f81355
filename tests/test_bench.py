from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dtensor_ring_swa.bench import cli, options, simulate
from dtensor_ring_swa.bench.check import errors
from dtensor_ring_swa.bench.options import BASELINES
from dtensor_ring_swa.bench.report import case_table, plot
from dtensor_ring_swa.bench.shapes import SHAPES
from dtensor_ring_swa.plan import _make_plan, make_plan
from dtensor_ring_swa.window import Window

BENCH = ["-m", "dtensor_ring_swa.bench"]
TINY = ["--device", "cpu", "--heads", "4", "--kv-heads", "2", "--head-dim", "16", "--repeats", "2"]
DIRECTIONS = ("forward", "backward")


def _run(args: list[str], ranks: int = 0) -> subprocess.CompletedProcess[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    return subprocess.run(
        [sys.executable, *launcher, *args],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def _measure(path: Path, ranks: int, *args: str) -> dict[str, Any]:
    done = _run([*BENCH, *TINY, "--check", "--json", str(path), *args], ranks)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ring-dtensor" in done.stdout
    return json.loads(path.read_text())


def _methods(case: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {method["name"]: method for method in case["methods"]}


def _assert_complete(record: dict[str, Any], ranks: int) -> None:
    assert record["ranks"] == ranks
    assert record["device"] == "cpu"
    assert record["versions"]["torch"] == str(torch.__version__)
    assert {"cuda", "triton", "flash-attn-4", "python"} <= record["versions"].keys()
    for case in record["cases"]:
        methods = _methods(case)
        assert case["kernel"] == "reference"
        assert case["failures"] == []
        assert set(methods) == {"ring", "ring-dtensor", *BASELINES}
        assert methods["ring_swa"]["skipped"].startswith("it ")
        assert "no backward on CPU" in methods["torch-cp"]["backward_skipped"]
        for name in ("ring", "ring-dtensor", "ideal", "allgather", "merge-ring"):
            _assert_measured(methods[name])
        assert set(methods["torch-cp"]["errors"]) == {"out"}
        assert methods["ideal"]["forward"]["ratio_to_ideal"] == 1.0


def _assert_measured(method: dict[str, Any]) -> None:
    assert set(method["errors"]) == {"out", "dq", "dk", "dv"}
    for direction in DIRECTIONS:
        numbers = method[direction]
        assert numbers["ms"] > 0 and numbers["tflops"] > 0 and numbers["ratio_to_ideal"] > 0
        assert numbers["bytes_as_predicted"] is True
        assert numbers["received_counted"] == numbers["received_predicted"]


def test_two_ranks_agree_and_bytes_are_counted(tmp_path: Path) -> None:
    shapes = ["--shape", "modernbert-base", "--shape", "gpt-oss", "--softcap", "3", "--rows", "160"]
    record = _measure(tmp_path / "bench.json", 2, *shapes)
    _assert_complete(record, 2)
    assert [case["shape"]["window"] for case in record["cases"]] == [
        {"left": 64, "right": 64},
        {"left": 127, "right": 0},
    ]
    row = 2 * (16 + 16) * 4
    for case, halo in zip(record["cases"], (64, 127), strict=True):
        methods = _methods(case)
        received = {name: [methods[name][d]["received_counted"] for d in DIRECTIONS] for name in methods if name in
                    ("ring", "ring-dtensor", "ideal", "allgather")}  # fmt: skip
        assert received["ring"] == received["ring-dtensor"] == [halo * row, halo * row]
        assert received["ideal"] == [0, 0]
        assert received["allgather"] == [160 * row, 160 * row]


def test_window_over_several_ranks_batch_and_dv(tmp_path: Path) -> None:
    args = ["--window", "150", "70", "--rows", "64", "--batch", "2", "--v-head-dim", "8", "--dtype", "float64"]
    record = _measure(tmp_path / "bench.json", 3, *args)
    _assert_complete(record, 3)
    # Rank 1 has a chunk on either side; the ring turns two hops left and two right.
    row = 2 * 2 * (16 + 8) * 8
    assert _methods(record["cases"][0])["ring"]["forward"]["received_counted"] == 128 * row
    assert _methods(record["cases"][0])["merge-ring"]["forward"]["received_counted"] == 4 * 64 * row


def test_alone(tmp_path: Path) -> None:
    record = _measure(tmp_path / "bench.json", 0, "--window", "30", "--rows", "96", "--dtype", "bfloat16")
    _assert_complete(record, 1)
    assert "ring" in case_table(record["cases"][0])
    pytest.importorskip("matplotlib")
    plot(tmp_path / "bench.png", record)
    assert (tmp_path / "bench.png").stat().st_size > 10_000


def test_check_finds_wrong_numbers_and_bytes() -> None:
    sabotage = (
        "import sys\n"
        "from dtensor_ring_swa.bench import cli\n"
        "from dtensor_ring_swa.bench.allgather import AllGather\n"
        "from dtensor_ring_swa.bench.ours import Ring\n"
        "AllGather.output = lambda self, state: state[0][0] * 1.001\n"
        "Ring.predicted_bytes = lambda self: (1, 0)\n"
        "sys.exit(cli.main(sys.argv[1:]))\n"
    )
    done = _run(["-c", sabotage, *TINY, "--window", "9", "--rows", "32", "--check", "--baselines", "ideal,allgather"])
    assert done.returncode == 1, done.stdout + done.stderr
    failures = [line for line in done.stdout.splitlines() if line.startswith("CHECK FAILED")]
    assert [line.split()[2] for line in failures] == ["ring:", "ring-dtensor:", "allgather:"]
    assert "torch-cp" not in done.stdout


def test_check_never_passes_nan_or_a_wrong_shape() -> None:
    want = {"out": torch.ones(2), "dq": torch.ones(2)}
    found = {"out": torch.tensor([1.0, math.nan]), "dq": torch.ones(3)}
    assert errors(want, found) == {"out": math.inf, "dq": math.inf}
    assert errors(want, {"out": torch.ones(2)}) == {"out": 0.0}


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--shape", "nonesuch"], "unknown shape 'nonesuch'; choose from mistral-7b"),
        (["--kernel", "nonesuch"], "unknown kernel 'nonesuch'"),
        (["--device", "cpu", "--shape", "gemma-2-2b", "--kernel", "aten"], "gemma-2-2b: .*needs an NVIDIA GPU"),
        (["--baselines", "ideal,nonesuch"], "unknown baselines .'nonesuch'.; choose from ideal"),
        (["--heads", "6", "--kv-heads", "4", "--head-dim", "8", "--window", "1"], "6 query heads are not a multiple"),
        (["--heads", "6"], "also needs --head-dim, --window"),
        (["--heads", "4", "--head-dim", "0", "--window", "1"], "must be at least 1"),
        (["--shape", "gpt-oss", "--window", "-5"], "window left must be >= 0"),
        (["--window", "1", "2", "3"], "LEFT or LEFT RIGHT"),
        (["--shape", "gpt-oss", "--softcap", "-1"], "softcap must be >= 0"),
        (["--rows", "0"], "--rows must be at least 1"),
        (["--simulate-ranks", "0"], "--simulate-ranks must be at least 1"),
        (["--tokens", "8"], "--tokens is for --simulate-ranks"),
        (["--link-gb-s", "0"], "--link-gb-s must be positive"),
        (["--json", "no/such/folder/x.json"], "no folder"),
        (["--simulate-ranks", "2", "--plot", "x.png"], "--plot draws measured times"),
    ],
)
def test_bad_input_exits_2_before_the_ranks_meet(
    args: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "distributed", lambda device: pytest.fail("the ranks met"))
    assert cli.main(args) == 2
    problem = capsys.readouterr().err
    assert problem.startswith("bench: ") and problem.count("\n") == 1
    assert re.search(said, problem), problem


def test_missing_devices_and_packages_exit_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options.importlib.util, "find_spec", lambda name: None)
    assert cli.main(["--plot", "x.png"]) == 2
    assert "pip install 'dtensor-ring-swa[bench]'" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["--device", "cuda"]) == 2
    assert "no CUDA device" in capsys.readouterr().err


def test_bad_input_under_torchrun() -> None:
    done = _run([*BENCH, *TINY, "--window", "5", "--kernel", "aten"], ranks=2)
    assert done.returncode != 0
    assert "bench: custom: 4/2 heads of 16, window (5, 0): kernel 'aten' cannot do this" in done.stderr
    assert "exitcode  : 2" in done.stderr
    assert "dtensor_ring_swa/bench/" not in done.stderr, "a traceback of ours"


def test_list_names_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--list", "--device", "cpu"]) == 0
    listing = capsys.readouterr().out
    assert all(name in listing for name in (*SHAPES, *BASELINES, "ring-dtensor", "reference: runs"))


@pytest.mark.parametrize(("name", "megabytes"), [("mistral-7b", 16.8), ("gemma-3-4b", 4.2), ("gpt-oss", 0.26)])
def test_shapes_have_the_published_halo(name: str, megabytes: float) -> None:
    shape = SHAPES[name]
    plan = make_plan(1 << 17, 8, 3, shape.window)
    received = plan.bytes(kv_heads=shape.kv_heads, head_dim=shape.head_dim, v_head_dim=shape.v_head_dim)
    assert received / 1e6 == pytest.approx(megabytes, rel=0.02)


def test_simulation_of_every_shape_takes_under_a_second(tmp_path: Path) -> None:
    _make_plan.cache_clear()
    path = tmp_path / "simulated.json"
    named = [arg for name in SHAPES for arg in ("--shape", name)]
    assert cli.main(["--simulate-ranks", "4096", "--json", str(path), *named]) == 0
    record = json.loads(path.read_text())
    assert record["seconds"] < 1
    for case in record["cases"]:
        assert [p["ranks"] for p in case["predictions"]] == [1 << i for i in range(13)]
        last = case["predictions"][-1]
        assert last["tokens"] == 1 << 26
        assert all(0.3 < last[f"{direction}_efficiency"] <= 1 for direction in DIRECTIONS)
        assert last["received_forward"] == case["predictions"][-2]["received_forward"]
        assert case["predictions"][0]["forward_efficiency"] == 1


def test_simulation_predicts_what_it_should(capsys: pytest.CaptureFixture[str]) -> None:
    def predicted(ranks: int, tokens: int, link: float = simulate.NVLINK_GB_S) -> simulate.Prediction:
        return simulate.predict(SHAPES["mistral-7b"], ranks, tokens, 1, torch.bfloat16, link)

    slow, fast = predicted(8, 8 << 15, link=0.1), predicted(8, 8 << 15)
    assert slow.forward_ms == pytest.approx(4095 * 8 * 256 * 2 / 0.1e6 + fast.forward_ms * 0.14, rel=0.1)
    # 3.221 ms against 3.163, and 9.523 against 9.286, are the measurements that the model is made of.
    assert 1 / predicted(2, 2 << 15).forward_efficiency == pytest.approx(3.221 / 3.163, abs=0.005)
    assert 1 / predicted(2, 2 << 15).backward_efficiency == pytest.approx(9.523 / 9.286, abs=0.01)
    # Shards as short as the window leave nothing to hide the exchange behind.
    assert predicted(64, 64 * 1024).interior == 0 and predicted(64, 64 * 1024).hiding_gb_s is None
    assert cli.main(["--simulate-ranks", "5", "--tokens", "3"]) == 0
    assert "\n5 " in capsys.readouterr().out


@pytest.mark.parametrize("window", [Window(4095, 0), Window(64, 64), Window(40000, 0)])
def test_cost_of_a_plan_does_not_grow_with_ranks(window: Window) -> None:
    def calls(ranks: int) -> int:
        counted = 0

        def count(frame: object, event: str, arg: object) -> None:
            nonlocal counted
            counted += event == "call"

        sys.setprofile(count)
        try:
            _make_plan.__wrapped__(16384 * ranks, ranks, ranks // 2, window, (0, 16384 * ranks), 0)
        finally:
            sys.setprofile(None)
        return counted

    assert calls(16) == calls(256) == calls(4096)
