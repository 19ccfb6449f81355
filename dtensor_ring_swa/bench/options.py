"""The command line, read and checked without touching a device or a process group."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from dtensor_ring_swa.bench.shapes import SHAPES, Shape, find
from dtensor_ring_swa.kernels import check_name
from dtensor_ring_swa.window import Window

DTYPES = {
    "bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64,
}  # fmt: skip
BASELINES = ("ideal", "allgather", "merge-ring", "torch-cp", "ring_swa")


@dataclass(frozen=True)
class Options:
    """What to run. ``None`` leaves the choice to what fits the device."""

    shapes: tuple[Shape, ...]
    rows: int | None
    tokens: int | None
    batch: int
    dtype: str | None
    device: str
    kernel: str
    baselines: tuple[str, ...]
    repeats: int
    check: bool
    simulate_ranks: int | None
    link_gb_s: float | None
    json: Path | None
    plot: Path | None
    list: bool


def parse(argv: Sequence[str] | None = None) -> Options:
    """Read the command line.

    Raises:
        ValueError: If the values do not fit together or name what does not exist.
        SystemExit: With code 2, from argparse, for flags it cannot read.
    """
    given = _parser().parse_args(argv)
    check_name(given.kernel)
    baselines = tuple(name for name in given.baselines.split(",") if name)
    unknown = [name for name in baselines if name not in BASELINES]
    if unknown:
        raise ValueError(f"unknown baselines {unknown}; choose from {','.join(BASELINES)}")
    for flag in ("rows", "tokens", "batch", "repeats", "simulate_ranks"):
        value = getattr(given, flag)
        if value is not None and value < 1:
            raise ValueError(f"--{flag.replace('_', '-')} must be at least 1, got {value}")
    if given.tokens is not None and given.simulate_ranks is None:
        raise ValueError("--tokens is for --simulate-ranks; a run takes --rows, the tokens of one rank")
    if given.link_gb_s is not None and not given.link_gb_s > 0:
        raise ValueError(f"--link-gb-s must be positive, got {given.link_gb_s}")
    for path in (given.json, given.plot):
        if path is not None and not path.absolute().parent.is_dir():
            raise ValueError(f"there is no folder {path.parent} to write {path.name} in")
    if given.plot is not None:
        if given.simulate_ranks is not None:
            raise ValueError("--plot draws measured times; --simulate-ranks has none")
        if importlib.util.find_spec("matplotlib") is None:
            raise ValueError("--plot needs matplotlib: pip install 'dtensor-ring-swa[bench]'")
    return Options(
        _shapes(given), given.rows, given.tokens, given.batch, given.dtype, given.device, given.kernel, baselines,
        given.repeats, given.check, given.simulate_ranks, given.link_gb_s, given.json, given.plot, given.list,
    )  # fmt: skip


def _shapes(given: argparse.Namespace) -> tuple[Shape, ...]:
    """The shapes asked for: named ones, changed by the custom flags, or one made of these alone."""
    changes = {
        "q_heads": given.heads, "kv_heads": given.kv_heads, "head_dim": given.head_dim,
        "v_head_dim": given.v_head_dim, "window": _window(given.window), "softcap": given.softcap,
    }  # fmt: skip
    changes = {name: value for name, value in changes.items() if value is not None}
    if given.shape:
        shapes = [find(name) for name in given.shape]
        if changes:
            if "head_dim" in changes:
                changes.setdefault("v_head_dim", changes["head_dim"])
            shapes = [replace(shape, **changes, name=f"{shape.name}, changed") for shape in shapes]
        return tuple(shapes)
    if not changes:
        return (SHAPES["mistral-7b"],)
    missing = {"q_heads": "--heads", "head_dim": "--head-dim", "window": "--window"}
    flags = [flag for name, flag in missing.items() if name not in changes]
    if flags:
        raise ValueError(f"a shape of your own also needs {', '.join(flags)}; or start from one with --shape")
    changes.setdefault("kv_heads", changes["q_heads"])
    changes.setdefault("v_head_dim", changes["head_dim"])
    return (Shape(name="custom", **changes),)


def _window(given: list[int] | None) -> Window | None:
    if given is None:
        return None
    if len(given) > 2:
        raise ValueError(f"--window takes LEFT or LEFT RIGHT, got {given}")
    return Window(given[0], given[1] if len(given) == 2 else 0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dtensor_ring_swa.bench",
        description="Time ring_attention beside what else computes the same; alone or under torchrun.",
    )
    add = parser.add_argument
    add("--shape", action="append", metavar="NAME", help="a model's layer, see --list; repeatable")
    add("--heads", type=int, help="query heads; with --shape this and the next five change it")
    add("--kv-heads", type=int, help="key/value heads (default: as many)")
    add("--head-dim", type=int, help="width of q and k")
    add("--v-head-dim", type=int, help="width of v (default: as q)")
    add("--window", type=int, nargs="+", metavar="N", help="LEFT [RIGHT] tokens, the query's own not counted; -1: all")
    add("--softcap", type=float, help="bound on the scores, 0 for none")
    add("--rows", type=int, help="tokens a rank (default: 32768 on CUDA, 512 on CPU, 16384 simulated)")
    add("--batch", type=int, default=1, help="sequences (default: 1)")
    add("--dtype", choices=DTYPES, help="default: bfloat16 on CUDA, float32 on CPU")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: CUDA where there is one")
    add("--kernel", default="auto", help="a kernel's name, or auto (default)")
    add("--baselines", default=",".join(BASELINES), metavar="A,B", help="default: %(default)s; '' for none")
    add("--repeats", type=int, default=20, help="timed samples a method and direction (default: 20)")
    add("--check", action="store_true", help="compare every method with float64, and bytes; exit 1 if one is off")
    add("--simulate-ranks", type=int, metavar="N", help="predict 1, 2, 4, ... N ranks; runs nothing")
    add("--tokens", type=int, help="simulated: tokens of the whole sequence on any number of ranks")
    add("--link-gb-s", type=float, help="simulated: rate of a link in GB/s (default: the measured NVLink's)")
    add("--json", type=Path, metavar="PATH", help="write all numbers")
    add("--plot", type=Path, metavar="PATH", help="draw a bar chart")
    add("--list", action="store_true", help="list shapes, methods, and the kernels that run here")
    return parser
