"""Real text that every machine has: the source of Python's own standard library, as bytes."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch


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
