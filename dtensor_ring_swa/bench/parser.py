"""The flags."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from dtensor_ring_swa.bench.contest import METHODS
from dtensor_ring_swa.bench.contest import OURS as OUR_METHODS
from dtensor_ring_swa.bench.extras import MIXTURE

DTYPES = {
    "bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64,
}  # fmt: skip
OURS = tuple(kind.name for kind in OUR_METHODS)
BASELINES = tuple(dict.fromkeys(kind.name for kind in METHODS if kind.name not in OURS))


def make_parser() -> argparse.ArgumentParser:
    """Read with ``options.parse``, which also checks what was read."""
    parser = argparse.ArgumentParser(
        prog="python -m dtensor_ring_swa.bench",
        description="Time ring_attention beside what else computes the same; alone or under torchrun.",
    )
    add = parser.add_argument
    add("--shape", action="append", metavar="NAME", help="a model's layer, or both of a hybrid, see --list; repeatable")
    add("--heads", type=int, help="query heads; with --shape this and the next five change it")
    add("--kv-heads", type=int, help="key/value heads (default: as many)")
    add("--head-dim", type=int, help="width of q and k")
    add("--v-head-dim", type=int, help="width of v (default: as q)")
    add("--window", nargs="+", metavar="N", help="causal, full, or LEFT [RIGHT] tokens, the own not counted; -1: all")
    add("--softcap", type=float, help="bound on the scores, 0 for none")
    lengths = " ".join(map(str, MIXTURE))
    add(
        "--pack",
        type=int,
        nargs="*",
        metavar="N",
        help=f"pack documents of these lengths at random (default: {lengths})",
    )
    add("--sinks", action="store_true", help="a learned sink logit for each query head")
    add("--sink-tokens", type=int, default=0, metavar="N", help="first tokens of each document, visible to all of it")
    add("--rows", type=int, help="tokens a rank (default: 32768 on CUDA, 512 on CPU, 16384 simulated)")
    add("--batch", type=int, default=1, help="sequences (default: 1)")
    add("--dtype", choices=DTYPES, help="default: bfloat16 on CUDA, float32 on CPU")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: CUDA where there is one")
    add("--kernel", default="auto", help="a kernel's name, or auto (default)")
    add("--ours", default=",".join(OURS), metavar="A,B", help="default: those of %(default)s that suit the window")
    add("--baselines", default=",".join(BASELINES), metavar="A,B", help="likewise; default: %(default)s; '' for none")
    add("--repeats", type=int, default=20, help="timed samples a method and direction (default: 20)")
    add("--check", action="store_true", help="compare every method with float64, and bytes; exit 1 if one is off")
    add("--simulate-ranks", type=int, metavar="N", help="predict 1, 2, 4, ... N ranks; runs nothing")
    add("--tokens", type=int, help="simulated: tokens of the whole sequence on any number of ranks")
    add("--link-gb-s", type=float, help="simulated: rate of a link in GB/s (default: the measured NVLink's)")
    add("--tflops", type=float, nargs=2, metavar="F", help="simulated: one device's rates, forward and backward")
    add("--json", type=Path, metavar="PATH", help="write all numbers")
    add("--plot", type=Path, metavar="PATH", help="draw a bar chart")
    add("--from", type=Path, dest="recorded", metavar="PATH", help="for --plot: draw what --json wrote, run nothing")
    add("--list", action="store_true", help="list shapes, methods, and the kernels that run here")
    return parser
