"""Real text that every machine has, as bytes: the source of Python's standard library, and this repository's."""

from __future__ import annotations

import sysconfig
from bisect import bisect_left, bisect_right
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch

REPOSITORY = Path(__file__).parents[1]
# What was written by hand: a checkout may also hold environments and build outputs.
OWN = ("*.md", "docs/**/*.md", "dtensor_ring_swa/**/*.py", "examples/**/*.py", "tests/**/*.py")


def read_text(path: str | None) -> torch.Tensor:
    """Bytes of a file, of all files below a folder, or of the standard library's modules.

    Raises:
        ValueError: If there is nothing to read.
    """
    root = Path(path or sysconfig.get_paths()["stdlib"])
    files = [root] if root.is_file() else sorted(root.glob("*.py") if path is None else root.rglob("*"))
    text = b"\n".join(file.read_bytes() for file in files if file.is_file())
    if not text:
        raise ValueError(f"no text at {root}; --text takes a file or a folder")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def entropy(text: torch.Tensor) -> float:
    """Nats a byte that a model would need which knows only how often each byte occurs."""
    share = torch.bincount(text.int(), minlength=256).double() / len(text)
    return float(-(share * share.clamp(min=1e-300).log()).sum())


def batch_of(text: torch.Tensor, batch: int, seq_len: int, seed: int, step: int) -> torch.Tensor:
    """The tokens ``[batch, seq_len]`` of one step: the same whatever the mesh.

    Raises:
        ValueError: If the text is shorter than a sequence.
    """
    if len(text) < seq_len:
        raise ValueError(f"the text has {len(text)} bytes, too few for --seq-len {seq_len}")
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(text) - seq_len + 1, (batch,), generator=generator)
    return torch.stack([text[start : start + seq_len] for start in starts.tolist()]).long()


class Packed(NamedTuple):
    """Documents, end to end.

    Attributes:
        text: Their bytes, uint8.
        ends: Where each of them ends.
    """

    text: torch.Tensor
    ends: tuple[int, ...]


def pack(path: str | None, seed: int) -> Packed:
    """Files as documents, in an order that the seed tells: one file, all below a folder, or this repository's.

    Raises:
        ValueError: If there is nothing to read.
    """
    root = Path(path) if path else REPOSITORY
    found = (file for pattern in (["**/*"] if path else OWN) for file in root.glob(pattern))
    files = [root] if root.is_file() else sorted(found)
    documents = [text for file in files if file.is_file() and (text := file.read_bytes())]
    if not documents:
        raise ValueError(f"no text at {root}; --text takes a file or a folder")
    order = torch.randperm(len(documents), generator=torch.Generator().manual_seed(seed)).tolist()
    documents = [documents[index] for index in order]
    text = torch.frombuffer(bytearray(b"".join(documents)), dtype=torch.uint8)
    return Packed(text, tuple(accumulate(map(len, documents))))


def packed_batch_of(packed: Packed, batch: int, seq_len: int, step: int) -> tuple[torch.Tensor, list[list[int]]]:
    """The tokens ``[batch, seq_len]`` of one step, and for each row the boundaries of its documents, from 0 to seq_len.

    Sequences follow each other without padding, and after the last document comes the first again. A
    document that a sequence cuts goes on in the next one.

    Raises:
        ValueError: If the text is shorter than a sequence.
    """
    text, ends = packed
    if len(text) < seq_len:
        raise ValueError(f"the text has {len(text)} bytes, too few for --seq-len {seq_len}")
    ends = (*ends, *(end + len(text) for end in ends))
    rows, boundaries = [], []
    for row in range(step * batch, (step + 1) * batch):
        start = row * seq_len % len(text)
        stop = start + seq_len
        rows.append(torch.cat((text[start:stop], text[: max(0, stop - len(text))])))
        within = ends[bisect_right(ends, start) : bisect_left(ends, stop)]
        boundaries.append([0, *(end - start for end in within), seq_len])
    return torch.stack(rows).long(), boundaries
