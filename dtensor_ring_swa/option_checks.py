"""Which options ring_attention refuses."""

from __future__ import annotations

import torch

from dtensor_ring_swa.choice import EXCHANGES
from dtensor_ring_swa.layout import LAYOUTS
from dtensor_ring_swa.window import MOST_TOKENS

# The least and the largest bound on scores. Beyond them, kernels that compute in float32 would multiply 0 and infinity.
_CAPS = 1e-30, 1e30
# Integers above it cannot become floats.
_LARGEST = torch.finfo(torch.float64).max


def check_options(
    layout: str, load_balance: str, exchange: str, sink_tokens: int, softcap: float, scale: float | None
) -> None:
    """Raise ValueError for an option that does not exist, or options that exclude each other."""
    check_layout(layout, load_balance, exchange)
    check_sink_tokens(sink_tokens)
    check_factors(softcap, scale)


def check_factors(softcap: float, scale: float | None) -> None:
    """Raise ValueError unless ``scale`` is a finite number, and ``softcap`` one that float32 can divide by, or 0.0."""
    least, most = _CAPS
    if not isinstance(softcap, (int, float)) or not (softcap == 0.0 or least <= softcap <= most):
        raise ValueError(
            f"softcap must be a positive number from {least:g} to {most:g}, or 0.0 for none, got {_number(softcap)}"
        )
    if scale is not None and not (isinstance(scale, (int, float)) and abs(scale) <= _LARGEST):
        raise ValueError(f"scale must be a finite number, or None for head_dim ** -0.5, got {_number(scale)}")


def _number(x: object) -> str:
    """A number as it was given, but for integers of hundreds of digits."""
    if isinstance(x, int) and abs(x) > _LARGEST:
        return f"an integer of {x.bit_length()} bits, more than a float's largest number {_LARGEST:.3g}"
    return repr(x)


def check_layout(layout: str, load_balance: str = "auto", exchange: str = "auto") -> None:
    """Raise ValueError for a name that does not exist, or names that exclude each other."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {LAYOUTS}, got {layout!r}")
    if load_balance not in ("auto", "none", "striped", "zigzag"):
        raise ValueError(f"load_balance must be 'auto', 'none', 'striped' or 'zigzag', got {load_balance!r}")
    if layout != "contiguous" and load_balance in ("striped", "zigzag"):
        raise ValueError(
            f"load_balance={load_balance!r} re-deals contiguous shards, got layout={layout!r}; leave it at 'auto'"
        )
    if exchange not in EXCHANGES:
        raise ValueError(f"exchange must be one of {EXCHANGES}, got {exchange!r}")
    if exchange == "halo" and (layout != "contiguous" or load_balance in ("striped", "zigzag")):
        raise ValueError(
            f"exchange='halo' needs contiguous shards, got layout={layout!r} and load_balance={load_balance!r}; "
            "leave exchange at 'auto'"
        )


def check_sink_tokens(sink_tokens: int) -> None:
    """Raise ValueError unless it is a number of tokens."""
    _check_tokens("sink_tokens", sink_tokens, (int,))


def check_seq_len(seq_len: int | None) -> None:
    """Raise ValueError unless it is a number of tokens, or None."""
    if seq_len is not None:
        _check_tokens("seq_len", seq_len, (int, torch.SymInt))


def _check_tokens(name: str, tokens: int, kinds: tuple[type, ...]) -> None:
    if isinstance(tokens, bool) or not isinstance(tokens, kinds) or tokens < 0:
        raise ValueError(f"{name} must be a number of tokens >= 0, got {tokens!r}")
    # What a symbol will be is not known yet.
    if isinstance(tokens, int) and tokens > MOST_TOKENS:
        raise ValueError(f"{name} must be at most {MOST_TOKENS}, got {tokens}")
