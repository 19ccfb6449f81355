from __future__ import annotations

import contextlib
import gc
import io
import json
import math
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from dtensor_ring_swa.bench import cli, options, torch_ring
from dtensor_ring_swa.bench.allgather import AllGather
from dtensor_ring_swa.bench.case import Case, Environment, distributed
from dtensor_ring_swa.bench.check import errors
from dtensor_ring_swa.bench.extras import MIXTURE, NO_EXTRAS, Extras
from dtensor_ring_swa.bench.files import plot, read_json, write_json
from dtensor_ring_swa.bench.job import jobs_of
from dtensor_ring_swa.bench.laps import make_laps
from dtensor_ring_swa.bench.ours import RingDTensor, RingZigzag
from dtensor_ring_swa.bench.parser import BASELINES, OURS
from dtensor_ring_swa.bench.predict import Prediction, predict
from dtensor_ring_swa.bench.rates import NVLINK_GB_S, RATES, rate_of
from dtensor_ring_swa.bench.report import case_table
from dtensor_ring_swa.bench.shapes import HYBRIDS, SHAPES, Shape
from dtensor_ring_swa.bench.torch_ring import TorchCudnnAllToAll, TorchFlashAllGather
from dtensor_ring_swa.bench.traffic import Sizes, Traffic
from dtensor_ring_swa.block import Call
from dtensor_ring_swa.kernels import __main__ as capabilities
from dtensor_ring_swa.options import Names
from dtensor_ring_swa.planning import _make_plan, make_plan
from dtensor_ring_swa.prepare import prepare
from dtensor_ring_swa.ring import imbalance, make_ring
from dtensor_ring_swa.testing import RankPool
from dtensor_ring_swa.window import Window

from cases import mesh_of

Pools = Callable[[int], RankPool]

BENCH = ["-m", "dtensor_ring_swa.bench"]
LAYER = ["--heads", "4", "--kv-heads", "2", "--head-dim", "16"]
TINY = ["--device", "cpu", "--repeats", "2", *LAYER]
DIRECTIONS = ("forward", "backward")
LIMITED = {"ring", "ring-dtensor", "ideal", "allgather", "merge-ring", "torch-cp", "ring_swa"}
TORCH_FLASH, TORCH_CUDNN = (
    {f"torch-{kernel}-{way}" for way in ("allgather", "alltoall")} for kernel in ("flash", "cudnn")
)
FULL = LIMITED | {"ring-zigzag", "ring-striped"} | TORCH_FLASH | TORCH_CUDNN
CAUSAL = FULL | {"ring-unbalanced", "allgather-zigzag"}


def _run(args: list[str], ranks: int = 0) -> subprocess.CompletedProcess[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    return subprocess.run(
        [sys.executable, *launcher, *args],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def _measure(path: Path, ranks: int, *args: str) -> dict[str, Any]:
    done = _run([*BENCH, *TINY, "--check", "--json", str(path), *args], ranks)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ring-dtensor" in done.stdout
    return json.loads(path.read_text())


def _bench(args: list[str]) -> tuple[int, str]:
    """The command's exit code and what it printed, on a rank of a pool."""
    given = options.parse(["--device", "cpu", "--repeats", "2", "--check", *args])
    device, mesh = torch.device("cpu"), mesh_of((dist.get_world_size(),), ("cp",))
    environment = Environment(device, mesh, mesh.get_group(), dist.get_rank(), dist.get_world_size())
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = cli.run_jobs(jobs_of(given, device), given, environment)
    return code, printed.getvalue()


def _in_pool(pool: RankPool, path: Path, *args: str) -> tuple[dict[str, Any], str]:
    answers = pool.run(_bench, ["--json", str(path), *args])
    assert [code for code, _ in answers] == [0] * pool.ranks, answers[0][1]
    assert not any(printed for _, printed in answers[1:])
    return json.loads(path.read_text()), answers[0][1]


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
        assert set(methods) == LIMITED
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


def test_window_over_several_ranks_batch_and_dv(pools: Pools, tmp_path: Path) -> None:
    args = ["--window", "150", "70", "--rows", "64", "--batch", "2", "--v-head-dim", "8", "--dtype", "float64"]
    record, _ = _in_pool(pools(3), tmp_path / "bench.json", *LAYER, *args)
    _assert_complete(record, 3)
    # Rank 1 has a chunk on either side; the ring brings each other chunk once.
    row = 2 * 2 * (16 + 8) * 8
    assert _methods(record["cases"][0])["ring"]["forward"]["received_counted"] == 128 * row
    assert _methods(record["cases"][0])["merge-ring"]["forward"]["received_counted"] == 2 * 64 * row


def test_alone(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    args = ["--shape", "gemma-3-4b-hybrid", "--rows", "16", "--dtype", "bfloat16", "--repeats", "2"]
    done = _run([*BENCH, "--device", "cpu", "--check", "--json", str(path), *args])
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(path.read_text())
    local, of_all = record["cases"]
    _assert_complete({**record, "cases": [local]}, 1)
    _assert_against_one_device(of_all, 1, CAUSAL, CAUSAL - {"torch-cp", "ring_swa"} - TORCH_CUDNN)
    assert "ring" in case_table(local)
    # A few million operations a millisecond are no 0.0 TFLOP/s.
    assert re.search(r"\d\.\de-\d\d", case_table(local))
    pytest.importorskip("matplotlib")
    plot(tmp_path / "bench.png", record)
    assert (tmp_path / "bench.png").stat().st_size > 10_000


def test_threads_that_hold_tensors_end_before_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo's do now and then: one that then waits for Python's lock aborts the process, and the exit code is -6."""
    all_reduce, holders = dist.all_reduce, list[threading.Thread]()

    def held(tensor: torch.Tensor, **options: Any) -> None:
        all_reduce(tensor, **options)
        holders.append(threading.Thread(target=lambda _: time.sleep(0.05), args=(tensor,)))
        holders[-1].start()

    monkeypatch.setattr(dist, "all_reduce", held)
    with distributed(torch.device("cpu")) as environment:
        assert environment.maximum([2.0]) == [2.0]
        assert holders[-1].is_alive()
    assert not holders[-1].is_alive()


def _assert_against_one_device(case: dict[str, Any], ranks: int, names: set[str], whole: set[str]) -> None:
    """Every method is there; those in ``whole`` ran in both directions, and what must be counted was."""
    methods = _methods(case)
    assert set(methods) == names and case["failures"] == []
    for name in whole:
        numbers = methods[name]
        assert set(numbers["errors"]) == {"out", "dq", "dk", "dv"}
        for direction in DIRECTIONS:
            half, ideal = numbers[direction], methods["ideal"][direction]["ms"]
            assert half["ratio_to_ideal"] == pytest.approx(half["ms"] / ideal)
            assert 1 <= half["imbalance_measured"] <= ranks
            assert half["bytes_as_predicted"] is (None if name.startswith("torch") else True)
    for direction in DIRECTIONS:
        ideal = methods["ideal"][direction]
        assert ideal["one_device_ms"] == pytest.approx(ranks * ideal["ms"])
        assert ideal["received_counted"] == 0
    predicted = {name: methods[name].get("imbalance_predicted") for name in methods}
    window = Window(**case["shape"]["window"])
    for name, layout in {"ring-zigzag": "zigzag", "ring-striped": "striped", "allgather": "contiguous"}.items():
        assert predicted[name] == imbalance(layout, case["seq_len"], ranks, window)
    assert predicted["ideal"] is None


def test_causal_window_without_limit(pools: Pools, tmp_path: Path) -> None:
    record, printed = _in_pool(pools(3), tmp_path / "bench.json", *LAYER, "--window", "causal", "--rows", "48")
    (case,) = record["cases"]
    ran = CAUSAL - {"torch-cp", "ring_swa"} - TORCH_CUDNN
    _assert_against_one_device(case, 3, CAUSAL, ran)
    methods = _methods(case)
    # What is not counted, and not exactly so: the last of three contiguous ranks has 5/3 of the mean work.
    assert methods["ring"]["imbalance_predicted"] == methods["torch-flash-alltoall"]["imbalance_predicted"] == 1.0
    assert methods["ring-unbalanced"]["imbalance_predicted"] == pytest.approx(5 / 3, abs=0.01)
    assert case["forward_flops_a_rank"] == 2 * (144 * 145 // 2) * 4 * 32 // 3
    shard = 48 * 2 * (16 + 16) * 4
    for name in ("ring-zigzag", "ring-striped", "allgather-zigzag", "torch-flash-allgather"):
        assert methods[name]["forward"]["received_predicted"] == 2 * shard, name
    # Dealt: a rank keeps at most one of its two slices.
    assert methods["ring"]["forward"]["received_counted"] > 2 * shard
    assert all(methods[name]["skipped"] == "cuDNN's attention needs CUDA" for name in TORCH_CUDNN)
    assert f"torch {torch.__version__}" in methods["torch-flash-allgather"]["note"]
    header = next(line for line in printed.splitlines() if line.startswith("method"))
    assert header.split()[-3:] == ["imbalance", "fwd", "bwd"]
    assert "ideal is one device's time for the whole sequence" in printed


def test_full_window(pools: Pools, tmp_path: Path) -> None:
    args = ["--window", "full", "--rows", "30", "--batch", "2", "--dtype", "bfloat16"]
    record, printed = _in_pool(pools(2), tmp_path / "bench.json", *LAYER, *args)
    (case,) = record["cases"]
    _assert_against_one_device(case, 2, FULL, FULL - {"torch-cp", "ring_swa"} - TORCH_CUDNN)
    assert all(m.get("imbalance_predicted", 1.0) == 1.0 for m in case["methods"])
    assert "no load balancer" in printed


def test_other_windows_without_limit(pools: Pools, tmp_path: Path) -> None:
    # An odd length, which no zigzag can deal out, and a window that SDPA has not.
    record, printed = _in_pool(pools(3), tmp_path / "bench.json", *LAYER, "--window", "-1", "20", "--rows", "33")
    (case,) = record["cases"]
    names = CAUSAL - TORCH_FLASH - TORCH_CUDNN
    methods = _methods(case)
    assert set(methods) == names and case["failures"] == []
    assert methods["ring"]["imbalance_predicted"] == methods["ring-unbalanced"]["imbalance_predicted"] > 1.2
    for name in ("ring-zigzag", "allgather-zigzag"):
        assert "needs a multiple of 6 tokens, got 99" in methods[name]["skipped"]
        assert f"{name} not run: layout='zigzag'" in printed


def test_hybrid_model_adds_up_its_layers(pools: Pools, tmp_path: Path) -> None:
    args = ["--shape", "gemma-3-4b-hybrid", "--rows", "12", "--ours", "ring,ring-zigzag"]
    args += ["--baselines", "ideal,allgather"]
    record, printed = _in_pool(pools(2), tmp_path / "bench.json", *args)
    local, of_all = (_methods(case) for case in record["cases"])
    assert [case["shape"]["layers"] for case in record["cases"]] == [29, 5]
    assert set(local) == {"ring", "ideal", "allgather"} and set(of_all) == {*local, "ring-zigzag"}
    (hybrid,) = record["hybrids"]
    added = {method["name"]: method for method in hybrid["methods"]}
    # The zigzag layout is of no use for the local layers, so there is nothing to add.
    assert set(added) == set(local) and hybrid["layers"] == {"gemma-3-4b": 29, "gemma-3-4b-global": 5}
    for name, direction in product(added, DIRECTIONS):
        total = 29 * local[name][direction]["ms"] + 5 * of_all[name][direction]["ms"]
        assert added[name][direction]["ms"] == pytest.approx(total)
    assert added["ideal"]["forward"]["ratio_to_ideal"] == 1.0
    assert "gemma-3-4b-hybrid, attention of all layers, added up: 29 x gemma-3-4b, 5 x gemma-3-4b-global" in printed


def test_hybrid_models_have_all_their_layers() -> None:
    counts = {name.removesuffix("-hybrid"): tuple(shape.layers for shape in kinds) for name, kinds in HYBRIDS.items()}
    assert counts == {
        "gemma-2-2b": (13, 13), "gemma-2-9b": (21, 21), "gemma-2-27b": (23, 23), "gemma-3-4b": (29, 5),
        "gemma-3-12b": (40, 8), "gemma-3-27b": (52, 10), "gpt-oss-20b": (12, 12), "gpt-oss-120b": (18, 18),
        "command-r7b": (24, 8), "olmo-3-7b": (24, 8), "cwm-32b": (48, 16), "exaone-4-32b": (48, 16),
        "modernbert-base": (14, 8),
    }  # fmt: skip
    for local, of_all in HYBRIDS.values():
        assert not local.unlimited and of_all.window == (Window.full() if "bert" in local.name else Window.causal())
        assert (local.q_heads, local.kv_heads, local.head_dim) == (of_all.q_heads, of_all.kv_heads, of_all.head_dim)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_kernel_is_asked_what_ring_attention_asks_it(shape: Shape) -> None:
    # Else "auto" would time another kernel than ring_attention takes, as it did for windows of 127.
    (job,) = jobs_of(options.parse(["--device", "cpu", "--shape", shape.name]), torch.device("cpu"))
    q, v = (torch.empty(1, 4, 1, width, dtype=job.request.dtype) for width in (shape.head_dim, shape.v_head_dim))
    names = Names("auto", "contiguous", "auto", "auto", False).text
    tokens = [*shape.window, 0, 4]
    assert prepare(q, v, False, tokens, [shape.head_dim**-0.5, shape.softcap], names, None).request == job.request


def test_torch_ring_says_why_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def case(window: Window, rows: int = 16, dtype: str = "float32", softcap: float = 0.0) -> Case:
        layer = ["--device", "cpu", *LAYER, "--window", *map(str, window)]
        given = options.parse([*layer, "--rows", str(rows), "--dtype", dtype, "--softcap", str(softcap)])
        (job,) = jobs_of(given, torch.device("cpu"))
        nowhere: Any = None
        return Case(
            job.shape, job.rows, 1, job.request, job.kernel, Environment(job.request.device, nowhere, nowhere, 0, 2)
        )

    causal, method = Window.causal(), TorchFlashAllGather
    suited = {window: method.suits(case(window).shape, NO_EXTRAS) for window in
              (causal, Window.full(), Window(-1, 3), Window(5, 0))}  # fmt: skip
    assert list(suited.values()) == [True, True, False, False]
    assert method.gap(case(causal)) is None and method.gap(case(Window.full(), rows=15)) is None
    reasons = {
        "multiples of 4 tokens, not 30": case(causal, rows=15),
        "it adds in float32": case(causal, dtype="float64"),
        "it has no softcap": case(causal, softcap=2.0),
    }
    for reason, refused in reasons.items():
        assert reason in (method.gap(refused) or "")
    assert TorchCudnnAllToAll.gap(case(causal)) == "cuDNN's attention needs CUDA"
    monkeypatch.setattr(torch_ring, "_api", lambda: math)
    assert "has no _ContextParallel, " in (method.gap(case(causal)) or "")

    def missing() -> None:
        raise ImportError("no such module")

    monkeypatch.setattr(torch_ring, "_api", missing)
    assert "has no such context parallel: no such module" in (method.gap(case(causal)) or "")


def test_a_record_of_any_window_is_drawn_again(
    pools: Pools, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    path, picture = tmp_path / "bench.json", tmp_path / "bench.png"
    _in_pool(pools(2), path, *LAYER, "--window", "causal", "--rows", "8", "--ours", "ring", "--baselines", "ideal")
    assert cli.main(["--from", str(path), "--plot", str(picture)]) == 0
    assert picture.stat().st_size > 10_000
    simulated = tmp_path / "simulated.json"
    assert cli.main(["--simulate-ranks", "2", "--json", str(simulated)]) == 0
    assert cli.main(["--from", str(simulated), "--plot", str(picture)]) == 2
    assert "has no measured cases" in capsys.readouterr().err


def test_pairs_of_packed_documents_with_sink_tokens_are_counted() -> None:
    cases = product((1, 23, 40), ((), (7,), (3, 1, 11)), (0, 2, 5), ((-1, 0), (2, 0), (0, 3), (-1, -1), (4, -1)))
    for seq_len, lengths, sinks, window in cases:
        extras = Extras(lengths, sink_tokens=sinks)
        documents = extras.documents(seq_len)
        assert sum(documents) == seq_len and set(documents[:-1]) <= set(lengths)
        left, right = Window(*window).reach(seq_len)
        wanted = sum(
            -left <= key - row <= right or (key < sinks and key <= row)
            for length in documents
            for row, key in product(range(length), repeat=2)
        )
        assert extras.pairs(seq_len, Window(*window)) == wanted, (seq_len, lengths, sinks, window)
    assert {137, 2041, 89} == set(MIXTURE) <= set(Extras(MIXTURE).documents(1 << 16))


def _sabotaged(args: list[str]) -> tuple[int, str]:
    """``_bench`` with wrong numbers, rows in the wrong order, and a wrong prediction."""
    with (
        mock.patch.object(AllGather, "output", lambda self, state: state[0] * 1.001),
        mock.patch.object(RingZigzag, "output", lambda self, state: state.detach().flip(1)),
        mock.patch.object(RingDTensor, "predicted_bytes", lambda self: (1, 0)),
    ):
        return _bench(args)


def test_check_finds_wrong_numbers_rows_and_bytes(pools: Pools) -> None:
    args = [*LAYER, "--window", "causal", "--rows", "32", "--baselines", "ideal,allgather"]
    answers = pools(2).run(_sabotaged, args)
    assert [code for code, _ in answers] == [1, 1]
    failures = [line for line in answers[0][1].splitlines() if line.startswith("CHECK FAILED")]
    wrong = {(line.split()[2], "bytes" if "bytes" in line else line.split()[3]) for line in failures}
    # Stripes inherit from zigzag.
    zigzag = {("ring-zigzag:", "out"), ("ring-striped:", "out")}
    assert wrong == {("ring-dtensor:", "bytes"), ("allgather:", "out"), *zigzag}
    assert "torch-cp" not in answers[0][1]


def test_check_never_passes_nan_or_a_wrong_shape() -> None:
    want = {"out": torch.ones(2), "dq": torch.ones(2)}
    found = {"out": torch.tensor([1.0, math.nan]), "dq": torch.ones(3)}
    assert errors(want, found) == {"out": math.inf, "dq": math.inf}
    assert errors(want, {"out": torch.ones(2)}) == {"out": 0.0}


def test_check_measures_gradients_that_cancel_against_the_other_tensors() -> None:
    # One visible key: dq and dk are zero, and the float64 reference has rounding there.
    want = {"out": torch.full((4,), 2.0).double(), "dq": torch.tensor([1e-17, 0.0]).double()}
    off = errors(want, {"dq": torch.tensor([1e-8, 0.0])})["dq"]
    assert off == pytest.approx(1e-8 / (2.0 * math.sqrt(2)), rel=1e-3)
    assert errors(want, {"dq": torch.tensor([0.1, 0.0])})["dq"] > 0.03
    # A small gradient is not one that cancels.
    assert errors({**want, "dq": torch.tensor([1e-9]).double()}, {"dq": torch.zeros(1)})["dq"] == 1.0


def test_gradients_that_cancel_pass_the_check(pools: Pools, tmp_path: Path) -> None:
    few_rows = ["--window", "7", "3", "--rows", "4", "--dtype", "bfloat16", "--softcap", "3", "--sinks"]
    # The last one: three ranks' rounded shares of a small sum, off by 1.2e-2 in bfloat16.
    for args in (
        ["--window", "0", "--rows", "4"],
        ["--window", "0", "-1", "--rows", "1"],
        [*few_rows, "--sink-tokens", "3"],
    ):
        _in_pool(pools(3), tmp_path / "bench.json", *LAYER, *args)


@pytest.mark.parametrize("extra", [["--sinks"], ["--sink-tokens", "3"], ["--pack", "5", "17"]], ids=str)
def test_bytes_of_documents_and_sinks_are_predicted(extra: list[str], pools: Pools, tmp_path: Path) -> None:
    few = [*LAYER, "--rows", "12", "--ours", "ring,ring-dtensor", "--baselines", "ideal", *extra]
    for window in (["9"], ["causal"], ["40", "2"]):
        record, _ = _in_pool(pools(3), tmp_path / "bench.json", "--window", *window, *few)
        for method, direction in product(record["cases"][0]["methods"], DIRECTIONS):
            assert method[direction]["bytes_as_predicted"] is True
            assert (method[direction]["received_predicted"] > 0) is (method["name"] != "ideal")


def test_what_cannot_be_written_after_all_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--simulate-ranks", "2", "--json", "/dev/full"]) == 2
    assert capsys.readouterr().err.startswith("bench: /dev/full could not be written; pass another path: ")


def test_what_cannot_be_written_after_all_ends_all_ranks_alike(pools: Pools) -> None:
    few = [*LAYER, "--window", "3", "--rows", "4", "--ours", "ring", "--baselines", "ideal"]
    with contextlib.redirect_stderr(io.StringIO()):
        answers = pools(2).run(_bench, [*few, "--json", "/dev/full"])
    assert [code for code, _ in answers] == [2, 2]
    assert "method" in answers[0][1]


def test_a_case_in_which_nothing_ran_ends_with_2(pools: Pools) -> None:
    few = [*LAYER, "--window", "causal", "--rows", "33", "--ours", "ring-zigzag", "--baselines", ""]
    answers = pools(2).run(_bench, few)
    assert [code for code, _ in answers] == [2, 2]
    assert "ring-zigzag not run: layout='zigzag'" in answers[0][1]


def test_json_has_no_infinity(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"a": [math.inf, {"b": math.nan}, 1.5], "c": None})
    assert json.loads(path.read_text()) == {"a": [None, {"b": None}, 1.5], "c": None}


NAMED_3 = {"shape": {"name": "x"}, "rows": 1, "methods": [{"name": 3}]}


@pytest.mark.parametrize(
    "text",
    [
        "x", "[]", '{"cases": [1]}', '{"cases": 5}', '{"cases": [{"methods": [{}]}]}', "{}",
        json.dumps({"ranks": 1, "device": "cpu", "versions": {"torch": "2"}, "cases": [NAMED_3]}),
        pytest.param("[" * 200_000, id="deep"),
    ],
)  # fmt: skip
def test_a_record_that_is_none_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"is no JSON|no measured cases"):
        read_json(path)


def test_learned_sinks_asked_for_are_not_said_to_be_left_out() -> None:
    for given, note in (([], "the model's learned sinks are left out"), (["--sinks"], "")):
        (shape,) = options.parse(["--shape", "gpt-oss", *given]).shapes
        assert shape.note == note


def test_only_the_first_process_of_a_host_speaks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    path = tmp_path / "x.json"
    assert cli.main(["--simulate-ranks", "2", "--json", str(path)]) == cli.main(["--list", "--device", "cpu"]) == 0
    capabilities.main([])
    assert capsys.readouterr().out == "" and not path.exists()


def test_capabilities_of_other_head_dims(capsys: pytest.CaptureFixture[str]) -> None:
    capabilities.main(["--head-dim", "192", "--v-head-dim", "512"])
    printed = capsys.readouterr().out
    assert "head dim 192, of v 512" in printed
    assert printed.count("reference ") == 12 * (1 + torch.cuda.device_count())
    for refused in (["--head-dim", "0"], ["--nonesuch"]):
        with pytest.raises(SystemExit, match="2"):
            capabilities.main(refused)


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
        (["--window", "1", "2", "3"], "LEFT or LEFT RIGHT, or one of causal, full"),
        (["--window", "causal", "0"], "LEFT or LEFT RIGHT, or one of causal, full"),
        (["--ours", "ring,allgather"], "unknown ours .'allgather'.; choose from ring,ring-dtensor"),
        (["--shape", "olmo-3-7b-hybrid", "--heads", "4"], "two kinds of layer"),
        (["--pack", "0"], "at least 1 token"),
        (["--pack", "5", "--batch", "2"], "--pack packs one sequence"),
        (["--sink-tokens", "-1"], "--sink-tokens must be at least 0"),
        (["--sinks", "--simulate-ranks", "2"], "predicts neither packed documents nor sinks"),
        (["--tflops", "1", "2"], "--tflops is for --simulate-ranks"),
        (["--simulate-ranks", "2", "--tflops", "1", "0"], "two positive rates"),
        (["--from", "x.json"], "it needs --plot"),
        (["--from", "no/such/file.json", "--plot", "x.png"], "there is no file"),
        (["--shape", "gpt-oss", "--softcap", "-1"], "softcap must be a positive number"),
        (["--rows", "0"], "--rows must be at least 1"),
        (["--simulate-ranks", "0"], "--simulate-ranks must be at least 1"),
        (["--tokens", "8"], "--tokens is for --simulate-ranks"),
        (["--link-gb-s", "0"], "--link-gb-s must be positive"),
        (["--link-gb-s", "3"], "--link-gb-s is for --simulate-ranks"),
        (["--simulate-ranks", "2", "--link-gb-s", "inf"], "--link-gb-s must be positive and finite"),
        (["--simulate-ranks", "2", "--tflops", "1", "nan"], "two positive rates"),
        (["--simulate-ranks", "2", "--tokens", str(1 << 63)], "--tokens must be at least 1 and at most"),
        (["--simulate-ranks", str(1 << 40), "--rows", str(1 << 40)], "--rows times --simulate-ranks must be at most"),
        (["--simulate-ranks", "2", "--tokens", "8", "--rows", "4"], "pass one"),
        (["--simulate-ranks", "2", "--check", "--kernel", "aten"], "--check, --kernel would have no effect"),
        (["--list", "--json", "x.json"], "--json would have no effect beside --list"),
        (["--from", "x.json", "--plot", "x.png", "--check"], "--check would have no effect beside --from"),
        (["--json", "no/such/folder/x.json"], "no folder"),
        (["--json", "no/such\nfolder/x.json"], "no folder no/such folder to write"),
        (["--json", "."], "'.' is a folder"),
        (["--json", "x" * 300], "--json takes the name of a file, 'x+' cannot be one: .*too long"),
        (["--from", "x" * 300, "--plot", "x.png"], "--from takes the name of a file, 'x+' cannot be one: .*too long"),
        (["--plot", "x.foo"], "end in .png, .pdf, .svg, got x.foo"),
        (["--json", "x.png", "--plot", "x.png"], "name one file"),
        (["--simulate-ranks", "2", "--plot", "x.png"], "--plot draws measured times"),
        (["--device", "cpu", "--rows", str(1 << 50)], "rows need at least .* GB, the device has"),
        (["--device", "cpu", "--heads", "9" * 13, "--head-dim", "64", "--window", "1", "--sinks"], "rows need"),
        (["--rows", "9" * 30], "--rows must be at least 1 and at most"),
        (["--heads", "9" * 400, "--head-dim", "1", "--window", "1"], "--heads must be at most"),
        (["--ours", "", "--baselines", ""], "nothing to run"),
        (["--device", "cpu", "--ours", "ring-zigzag", "--baselines", "torch-flash-allgather"], "none of .* suits such"),
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
    monkeypatch.setitem(sys.modules, "matplotlib", None)
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
    assert all(name in listing for name in (*SHAPES, *HYBRIDS, *OURS, *BASELINES, "reference: runs"))


@pytest.mark.parametrize(("name", "megabytes"), [("mistral-7b", 16.8), ("gemma-3-4b", 4.2), ("gpt-oss", 0.26)])
def test_shapes_have_the_published_halo(name: str, megabytes: float) -> None:
    shape = SHAPES[name]
    plan = make_plan(1 << 17, 8, 3, shape.window)
    received = plan.bytes(kv_heads=shape.kv_heads, head_dim=shape.head_dim, v_head_dim=shape.v_head_dim)
    assert received / 1e6 == pytest.approx(megabytes, rel=0.02)


# Query heads, key/value heads, head dim, width of v, Hugging Face's number of visible keys (None: every earlier one).
FIGURES = {
    "mistral-7b": (32, 8, 128, 128, 4096),
    "gemma-2-2b": (8, 4, 256, 256, 4096),
    "gemma-2-2b-global": (8, 4, 256, 256, None),
    "gemma-3-4b": (8, 4, 256, 256, 1024),
    "gpt-oss": (64, 8, 64, 64, 128),
    "gpt-oss-global": (64, 8, 64, 64, None),
    "phi-3-mini": (32, 32, 96, 96, 2047),
    "olmo-3-7b": (32, 32, 128, 128, 4096),
    "mimo-v2-flash": (64, 8, 192, 128, 128),
    "mimo-v2-flash-global": (64, 4, 192, 128, None),
}


@pytest.mark.parametrize("name", FIGURES)
def test_shapes_have_the_published_figures(name: str) -> None:
    shape, (*sizes, keys) = SHAPES[name], FIGURES[name]
    assert [shape.q_heads, shape.kv_heads, shape.head_dim, shape.v_head_dim] == sizes
    assert shape.window == (Window.causal() if keys is None else Window(keys - 1, 0))
    assert shape.softcap == (50.0 if name.startswith("gemma-2") else 0.0)
    assert SHAPES["modernbert-base"].window == Window(64, 64)


LIMITED_SHAPES, UNLIMITED_SHAPES = (
    [name for name, shape in SHAPES.items() if shape.unlimited is wanted and shape.window != Window.full()]
    for wanted in (False, True)
)


def _simulated_in_a_second(path: Path, names: list[str]) -> dict[str, Any]:
    """On up to 4096 ranks; a second of this process's own time, since others may keep it from the cores."""
    named = [arg for name in names for arg in ("--shape", name)]
    began = time.process_time()
    assert cli.main(["--simulate-ranks", "4096", "--json", str(path), *named]) == 0
    assert time.process_time() - began < 1
    return json.loads(path.read_text())


def test_simulation_of_every_limited_shape_takes_under_a_second(tmp_path: Path) -> None:
    _make_plan.cache_clear()
    record = _simulated_in_a_second(tmp_path / "simulated.json", LIMITED_SHAPES)
    assert record["seconds"] > 0
    for case in record["cases"]:
        assert [p["ranks"] for p in case["predictions"]] == [1 << i for i in range(13)]
        last = case["predictions"][-1]
        assert last["tokens"] == 1 << 26
        assert all(0.3 < last[f"{direction}_efficiency"] <= 1 for direction in DIRECTIONS)
        assert last["received_forward"] == case["predictions"][-2]["received_forward"]
        assert case["predictions"][0]["forward_efficiency"] == 1


def test_simulation_of_windows_without_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_laps.cache_clear()
    path = tmp_path / "simulated.json"
    record = _simulated_in_a_second(path, UNLIMITED_SHAPES)
    assert record["dtype"] == "bfloat16" and record["versions"]["torch"] == str(torch.__version__)
    cases = record["cases"]
    assert [case["load_balance"] for case in cases] == ["auto", "none"] * len(UNLIMITED_SHAPES)
    for case in cases:
        auto = case["load_balance"] == "auto"
        for prediction in case["predictions"]:
            ranks = prediction["ranks"]
            even = 1 if auto else 2 - 1 / ranks
            assert prediction["imbalance"] == pytest.approx(even, abs=1e-3)
            assert prediction["steps"] == (ranks if auto or ranks > 3 else 1)
            assert (prediction["dealt_forward"] > 0) is (auto and ranks > 1)
            assert all(0.7 < prediction[f"{direction}_efficiency"] * even <= 1.0001 for direction in DIRECTIONS)
    assert "as given" not in capsys.readouterr().out
    # A window that the first ranks' few tokens cut short has another rate there.
    assert cli.main(["--simulate-ranks", "8", "--shape", "mistral-7b", "--rows", "512", "--json", str(path)]) == 0
    (case,) = json.loads(path.read_text())["cases"]
    assert [p["forward_tflops"] for p in case["predictions"]] == [550.5, 550.5, 709.5, 709.5]
    assert "window 1023); 709.5 / 603.6 TFLOP/s (measured in bfloat16, head dim 128, window 4095), from 4 ranks on" in (
        capsys.readouterr().out
    )
    assert cli.main(["--simulate-ranks", "2", "--window", "full", "--shape", "gpt-oss", "--tflops", "100", "50"]) == 0
    assert "at 100 / 50 TFLOP/s (as given)" in capsys.readouterr().out


def test_laps_are_the_steps_of_the_ring() -> None:
    lengths = {"contiguous": (1, 3, 9, 13, 17, 35), "striped": (7, 21), "zigzag": (14, 42)}
    windows = ((-1, 0), (-1, -1), (0, -1), (3, 0), (9, 2), (0, 0), (11, -1), (40, 0))
    for (layout, tokens), window in product(lengths.items(), windows):
        for seq_len, rank in product(tokens, range(7)):
            ring = make_ring(layout, seq_len, 7, rank, Window(*window))
            laps = make_laps(layout, seq_len, 7, rank, Window(*window))
            found = [(lap.blocks, lap.source_rows, lap.target_rows) for lap in laps.others for _ in range(lap.count)]
            wanted = [(step.call, len(step.source or ()), len(step.target or ())) for step in ring.steps[1:]]
            assert [(Call.of(blocks) if blocks else None, *rows) for blocks, *rows in found] == wanted
            assert (laps.rows, laps.pairs, laps.received_rows) == (ring.rows, ring.pairs, ring.received_rows)
            assert laps.steps == sum(step.source is not None for step in ring.steps)
            assert sum(count for count, *_ in laps.places()) == len(wanted)


@pytest.mark.parametrize("load_balance", ["auto", "none"])
def test_simulation_predicts_the_busiest_rank_and_the_one_that_receives_most(load_balance: str) -> None:
    for window, ranks in product(((-1, 0), (0, -1), (-1, -1), (9, 2), (17, 10), (3, 0), (0, 5)), (1, 2, 4, 5, 7, 9)):
        layer = Shape("layer", 4, 2, 16, 8, Window(*window))
        # The last ones leave ranks with fewer tokens, or none.
        for tokens in (4 * ranks, 6 * ranks, 5 * ranks - 2, ranks + 1):
            found = predict(layer, ranks, tokens, 1, torch.bfloat16, NVLINK_GB_S, load_balance)
            calls = [Traffic(layer, 1, "contiguous", load_balance, tokens, ranks, rank) for rank in range(ranks)]
            received = [call.received(Sizes(2, 2, 4)) for call in calls]
            assert [found.received_forward, found.received_backward] == list(map(max, zip(*received, strict=True)))
            pairs = [make_ring(call.compute_layout, tokens, ranks, call.rank, layer.window).pairs for call in calls]
            assert found.forward_flops == 2 * max(pairs) * 4 * (16 + 8)


def test_simulation_of_a_ring_predicts_what_it_should() -> None:
    layer = Shape("layer", 32, 8, 128, 128, Window.causal())

    def predicted(ranks: int, tokens: int, link: float = NVLINK_GB_S, load_balance: str = "auto") -> Prediction:
        return predict(layer, ranks, tokens, 1, torch.bfloat16, link, load_balance)

    # The measurements that the model is made of: one GPU 210.8 / 582.0 ms, two 112.4 / 300.8.
    one, two = predicted(1, 1 << 17), predicted(2, 1 << 17)
    assert (one.forward_ms, one.backward_ms) == (pytest.approx(210.8, rel=1e-3), pytest.approx(582.0, rel=1e-3))
    assert (two.forward_ms, two.backward_ms) == (pytest.approx(112.37, rel=1e-3), pytest.approx(300.77, rel=1e-3))
    assert two.forward_efficiency == pytest.approx(0.5 * one.forward_ms / two.forward_ms)
    # Measured beside them, not fitted: 158.3 / 434.1.
    uneven = predicted(2, 1 << 17, load_balance="none")
    assert uneven.forward_ms == pytest.approx(158.3, rel=0.01) and uneven.backward_ms == pytest.approx(434.1, rel=0.01)
    # On a slow link a call takes as long as what it receives.
    slow = predicted(8, 1 << 17, link=0.01)
    assert slow.forward_ms == pytest.approx(slow.received_forward / 0.01 / 1e6, rel=0.02)
    assert slow.backward_ms == pytest.approx(slow.received_backward / 0.01 / 1e6, rel=0.02)
    # A link at the predicted limit still hides what travels in the steps, half of it does not.
    sizes = predicted(8, 1 << 20)
    assert sizes.hiding_gb_s is not None
    dealt = sizes.dealt_forward / 1e6
    free = predicted(8, 1 << 20, link=1e9).forward_ms
    for share, hidden in ((1.001, True), (0.5, False)):
        link = sizes.hiding_gb_s * share
        waited = predicted(8, 1 << 20, link=link).forward_ms - dealt / link - free
        assert (abs(waited) < 1e-3 * free) is hidden
    assert rate_of(Shape("x", 1, 1, 64, 64, Window.causal()), 1).kind == "causal"
    assert {rate.kind for rate in RATES} == {"limited", "causal", "full"}


def test_simulation_predicts_what_it_should(capsys: pytest.CaptureFixture[str]) -> None:
    def predicted(ranks: int, tokens: int, link: float = NVLINK_GB_S) -> Prediction:
        return predict(SHAPES["mistral-7b"], ranks, tokens, 1, torch.bfloat16, link)

    slow, fast = predicted(8, 8 << 15, link=0.1), predicted(8, 8 << 15)
    assert slow.forward_ms == pytest.approx(4095 * 8 * 256 * 2 / 0.1e6 + fast.forward_ms * 0.14, rel=0.1)
    # 3.138 ms against 3.099, and 9.267 against 9.108, are the measurements that the model is made of.
    assert 1 / predicted(2, 2 << 15).forward_efficiency == pytest.approx(3.138 / 3.099, abs=0.005)
    assert 1 / predicted(2, 2 << 15).backward_efficiency == pytest.approx(9.267 / 9.108, abs=0.01)
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

        # What a collection calls in passing, finalizers of other objects, is no part of a plan.
        gc.disable()
        sys.setprofile(count)
        try:
            _make_plan.__wrapped__(16384 * ranks, ranks, ranks // 2, window, (0, 16384 * ranks), 0)
        finally:
            sys.setprofile(None)
            gc.enable()
        return counted

    assert calls(16) == calls(256) == calls(4096)
