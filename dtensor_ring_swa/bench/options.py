"""The command line, read and checked without touching a device or a process group."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dtensor_ring_swa.bench.extras import MIXTURE, Extras
from dtensor_ring_swa.bench.parser import BASELINES, OURS, make_parser
from dtensor_ring_swa.bench.refusals import refuse_files, refuse_mixtures, refuse_numbers
from dtensor_ring_swa.bench.shapes import HYBRIDS, NO_SINKS, SHAPES, Shape, find
from dtensor_ring_swa.kernels import check_name
from dtensor_ring_swa.window import Window

WINDOWS = {"causal": Window.causal(), "full": Window.full()}


@dataclass(frozen=True)
class Options:
    """What to run. ``None`` leaves the choice to what fits the device."""

    shapes: tuple[Shape, ...]
    hybrids: tuple[str, ...]
    extras: Extras
    rows: int | None
    tokens: int | None
    batch: int
    dtype: str | None
    device: str
    kernel: str
    methods: tuple[str, ...]
    repeats: int
    check: bool
    simulate_ranks: int | None
    link_gb_s: float | None
    tflops: tuple[float, float] | None
    json: Path | None
    plot: Path | None
    recorded: Path | None
    list: bool


def parse(argv: Sequence[str] | None = None) -> Options:
    """Read the command line.

    Raises:
        ValueError: If the values do not fit together or name what does not exist.
        SystemExit: With code 2, from argparse, for flags it cannot read.
    """
    parser = make_parser()
    given = parser.parse_args(argv)
    refuse_numbers(given)
    refuse_mixtures(given, parser.parse_args([]))
    check_name(given.kernel)
    methods = (*_names("ours", given.ours, OURS), *_names("baselines", given.baselines, BASELINES))
    if not methods:
        raise ValueError("there is nothing to run: --ours and --baselines are both empty")
    refuse_files(given)
    shapes, hybrids = _shapes(given)
    if given.sinks:
        shapes = tuple(replace(shape, note="") if shape.note == NO_SINKS else shape for shape in shapes)
    return Options(
        shapes=shapes, hybrids=hybrids, extras=_extras(given), rows=given.rows, tokens=given.tokens,
        batch=given.batch, dtype=given.dtype, device=given.device, kernel=given.kernel, methods=methods,
        repeats=given.repeats, check=given.check, simulate_ranks=given.simulate_ranks, link_gb_s=given.link_gb_s,
        tflops=None if given.tflops is None else (given.tflops[0], given.tflops[1]), json=given.json, plot=given.plot,
        recorded=given.recorded, list=given.list,
    )  # fmt: skip


def _names(flag: str, given: str, known: Sequence[str]) -> tuple[str, ...]:
    names = tuple(name for name in given.split(",") if name)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"unknown {flag} {unknown}; choose from {','.join(known)}")
    return names


def _extras(given: argparse.Namespace) -> Extras:
    lengths = () if given.pack is None else tuple(given.pack) or MIXTURE
    extras = Extras(lengths, given.sinks, given.sink_tokens)
    if any(length < 1 for length in lengths):
        raise ValueError(f"--pack takes document lengths of at least 1 token, got {given.pack}")
    if given.sink_tokens < 0:
        raise ValueError(f"--sink-tokens must be at least 0, got {given.sink_tokens}")
    if lengths and given.batch != 1:
        raise ValueError(f"--pack packs one sequence, got --batch {given.batch}")
    return extras


def _shapes(given: argparse.Namespace) -> tuple[tuple[Shape, ...], tuple[str, ...]]:
    """The shapes asked for: named ones, changed by the custom flags, or one made of these alone; and the hybrids."""
    changes = {
        "q_heads": given.heads, "kv_heads": given.kv_heads, "head_dim": given.head_dim,
        "v_head_dim": given.v_head_dim, "window": _window(given.window), "softcap": given.softcap,
    }  # fmt: skip
    changes = {name: value for name, value in changes.items() if value is not None}
    if given.shape:
        shapes = [shape for name in given.shape for shape in find(name)]
        hybrids = tuple(name for name in given.shape if name in HYBRIDS)
        if hybrids and changes:
            raise ValueError(f"{hybrids[0]} is two kinds of layer of one model; change the shapes one by one")
        if changes:
            if "head_dim" in changes:
                changes.setdefault("v_head_dim", changes["head_dim"])
            shapes = [replace(shape, **changes, name=f"{shape.name}, changed") for shape in shapes]
        return tuple(shapes), hybrids
    if not changes:
        return (SHAPES["mistral-7b"],), ()
    missing = {"q_heads": "--heads", "head_dim": "--head-dim", "window": "--window"}
    flags = [flag for name, flag in missing.items() if name not in changes]
    if flags:
        raise ValueError(f"a shape of your own also needs {', '.join(flags)}; or start from one with --shape")
    changes.setdefault("kv_heads", changes["q_heads"])
    changes.setdefault("v_head_dim", changes["head_dim"])
    return (Shape(name="custom", **changes),), ()


def _window(given: list[str] | None) -> Window | None:
    if given is None:
        return None
    if len(given) == 1 and given[0] in WINDOWS:
        return WINDOWS[given[0]]
    try:
        sides = [int(side) for side in given]
    except ValueError:
        sides = []
    if not 1 <= len(sides) <= 2:
        raise ValueError(f"--window takes LEFT or LEFT RIGHT, or one of {', '.join(WINDOWS)}, got {' '.join(given)}")
    return Window(sides[0], sides[1] if len(sides) == 2 else 0)
