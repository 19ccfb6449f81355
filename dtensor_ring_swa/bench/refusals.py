"""What the command line refuses: impossible numbers, flags without effect, files that cannot be written."""

from __future__ import annotations

import argparse
import importlib
import os
from math import isfinite
from pathlib import Path

from dtensor_ring_swa.window import MOST_TOKENS

PICTURES = (".png", ".pdf", ".svg")

_INTEGERS = ("rows", "tokens", "batch", "repeats", "simulate_ranks")
_SHAPE = {"shape", "heads", "kv_heads", "head_dim", "v_head_dim", "window", "softcap"}
_SIMULATED = {"tokens", "link_gb_s", "tflops"}
# What each way to use the command reads; a run reads all but what only a simulation does.
_READ = {
    "simulate_ranks": _SHAPE | _SIMULATED | {"rows", "batch", "dtype", "json"},
    "recorded": {"plot"},
    "list": {"device"},
}


def refuse_numbers(given: argparse.Namespace) -> None:
    """Raise ValueError for a number out of range."""
    for name in _INTEGERS:
        value = getattr(given, name)
        if value is not None and not 1 <= value <= MOST_TOKENS:
            raise ValueError(f"{_flag(name)} must be at least 1 and at most {MOST_TOKENS}, got {value}")
    for name in ("heads", "kv_heads", "head_dim", "v_head_dim"):
        value = getattr(given, name)
        if value is not None and value > MOST_TOKENS:
            raise ValueError(f"{_flag(name)} must be at most {MOST_TOKENS}, got {value}")
    if given.tokens is None and (given.rows or 0) * (given.simulate_ranks or 0) > MOST_TOKENS:
        raise ValueError(f"--rows times --simulate-ranks must be at most {MOST_TOKENS} tokens")
    if given.link_gb_s is not None and not (given.link_gb_s > 0 and isfinite(given.link_gb_s)):
        raise ValueError(f"--link-gb-s must be positive and finite, got {given.link_gb_s}")
    if given.tflops is not None and not all(rate > 0 and isfinite(rate) for rate in given.tflops):
        raise ValueError(f"--tflops takes two positive rates, got {given.tflops}")


def refuse_mixtures(given: argparse.Namespace, defaults: argparse.Namespace) -> None:
    """Raise ValueError for flags that would be without effect beside the others."""
    if given.recorded is not None and given.plot is None:
        raise ValueError("--from reads what --json wrote and draws it again; it needs --plot")
    used = {name for name, value in vars(given).items() if value != getattr(defaults, name)}
    if "simulate_ranks" in used and used & {"pack", "sinks", "sink_tokens"}:
        raise ValueError("--simulate-ranks predicts neither packed documents nor sinks; leave out --pack and --sink*")
    if {"simulate_ranks", "plot"} <= used:
        raise ValueError("--plot draws measured times; --simulate-ranks has none")
    for way, reads in _READ.items():
        idle = sorted(used - reads - {way})
        if way in used and idle:
            raise ValueError(f"{', '.join(map(_flag, idle))} would have no effect beside {_flag(way)}; leave it out")
    if "simulate_ranks" not in used and used & _SIMULATED:
        flags = ", ".join(map(_flag, sorted(used & _SIMULATED)))
        raise ValueError(f"{flags} is for --simulate-ranks; a run takes --rows, the tokens of one rank")
    if {"tokens", "rows"} <= used:
        raise ValueError("--tokens is the whole sequence on any number of ranks, --rows the part of each; pass one")


def refuse_files(given: argparse.Namespace) -> None:
    """Raise ValueError for a file that cannot be read or written, before there is anything to write."""
    for flag, path in (("--json", given.json), ("--plot", given.plot)):
        if path is not None:
            _refuse_path(flag, path)
    if given.json is not None and given.plot is not None and given.json.absolute() == given.plot.absolute():
        raise ValueError(f"--json and --plot name one file, {given.json}")
    if given.recorded is not None:
        _refuse_name("--from", given.recorded)
        if not given.recorded.is_file():
            raise ValueError(f"there is no file {given.recorded}")
    if given.plot is not None:
        if given.plot.suffix.lower() not in PICTURES:
            raise ValueError(f"--plot draws files that end in {', '.join(PICTURES)}, got {given.plot}")
        try:
            importlib.import_module("matplotlib")
        except ImportError as problem:
            raise ValueError(f"--plot needs matplotlib: pip install 'dtensor-ring-swa[bench]' ({problem})") from problem


def _refuse_name(flag: str, path: Path) -> None:
    """As for one that is too long, or behind links that go round."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as problem:
        raise ValueError(f"{flag} takes the name of a file, {str(path)!r} cannot be one: {problem}") from problem


def _refuse_path(flag: str, path: Path) -> None:
    _refuse_name(flag, path)
    folder = path.absolute().parent
    if path.is_dir():
        raise ValueError(f"{flag} takes the name of a file, {str(path)!r} is a folder")
    if not folder.is_dir():
        raise ValueError(f"there is no folder {path.parent} to write {path.name} in")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ValueError(f"{flag} {path}: no permission to write there")


def _flag(name: str) -> str:
    return "--from" if name == "recorded" else f"--{name.replace('_', '-')}"
