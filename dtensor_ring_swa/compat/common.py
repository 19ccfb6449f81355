"""What the adapters share: the group that None means, FlashAttention's arguments, boundaries on one rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from operator import index
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from dtensor_ring_swa.agreement import agree
from dtensor_ring_swa.attention import ring_attention
from dtensor_ring_swa.checks import check_tensors
from dtensor_ring_swa.documents import Documents
from dtensor_ring_swa.facts import FACTS, facts_of
from dtensor_ring_swa.groups import group_of
from dtensor_ring_swa.option_checks import check_factors
from dtensor_ring_swa.window import Window


class CallOptions(NamedTuple):
    """What a call says apart from its tensors, read as ``ring_attention`` reads it."""

    window: Window
    scale: float | None
    deterministic: bool
    group: ProcessGroup | None


def default_group(group: ProcessGroup | None) -> ProcessGroup | None:
    """The group itself; for None the default group, or None (one device) where there is none."""
    return dist.group.WORLD if group is None else group_of(group)


def ranks_of(group: ProcessGroup | None) -> int:
    """How many ranks share the sequence."""
    return 1 if group is None else dist.get_world_size(group)


@contextmanager
def refusing_together(group: ProcessGroup | None) -> Iterator[None]:
    """An error raised inside is raised on every rank, also where peers wait in ``ring_attention``."""
    try:
        yield
    except Exception as error:
        if group is not None and ranks_of(group) > 1 and not torch.compiler.is_compiling():
            agree(group, FACTS, (), error)
        raise


def flash_window(
    window_size: tuple[int, int], causal: bool, dropout_p: float, alibi_slopes: torch.Tensor | None
) -> Window:
    """The window that FlashAttention's arguments mean, once nothing is left that cannot be honoured.

    Raises:
        NotImplementedError: For dropout and ALiBi.
        ValueError: If ``window_size`` is not a pair.
    """
    if dropout_p:
        raise NotImplementedError(
            f"dropout of attention weights is not supported, got {dropout_p}; pass 0.0, and use dropout after the "
            "output projection if the model needs some"
        )
    if alibi_slopes is not None:
        raise NotImplementedError(
            "alibi_slopes are not supported; pass None, and give positions by rotary embeddings, with "
            "dtensor_ring_swa.positions(mesh, seq_len, layout)"
        )
    return Window.flash(window_size, causal)


def attend(
    q_BSHD: torch.Tensor,
    k_BSGD: torch.Tensor,
    v_BSGE: torch.Tensor,
    options: CallOptions,
    *,
    layout: str = "contiguous",
    load_balance: str = "auto",
    seq_len: int | None = None,
    cu_seqlens: Documents | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's out ``[B, S_local, Hq, Dv]`` and lse ``[B, Hq, S_local]``; without B for packed tensors."""
    window, scale, deterministic, group = options
    return ring_attention(
        q_BSHD, k_BSGD, v_BSGE, window=window, scale=scale, deterministic=deterministic, layout=layout,
        load_balance=load_balance, mesh=group, seq_len=seq_len, cu_seqlens=cu_seqlens, return_lse=True,
    )  # fmt: skip


def local_boundaries(cu_seqlens: torch.Tensor, name: str, **tensors: torch.Tensor) -> Documents:
    """Boundaries that cut one rank's tokens, checked against its tensors ``[T_local, H, D]``.

    Raises:
        ValueError: If they do not start at 0, decrease, or end elsewhere than the tensors.
    """
    documents = Documents(cu_seqlens)
    if documents.cu_seqlens.ndim != 1:
        raise ValueError(f"{name} must be [N + 1], got sizes {list(documents.cu_seqlens.shape)}")
    for which, x in tensors.items():
        if not isinstance(x, torch.Tensor) or x.ndim != 3 or len(x) != documents.seq_len:
            raise ValueError(
                f"{which} must be [tokens, heads, head_dim] with {name}[-1] = {documents.seq_len} tokens, "
                f"got {sizes_of(x)}"
            )
    return documents


def sizes_of(x: object) -> str:
    """What to say of a tensor, or of what should be one, in errors."""
    return f"sizes {list(x.shape)}" if isinstance(x, torch.Tensor) else f"a {type(x).__name__}"


def check_longest(name: str, said: int | None, longest: int, what: str) -> None:
    """Raise ValueError unless ``said`` is at least ``longest``, the tokens of the longest ``what``, or None."""
    if said is None:
        return
    try:
        enough = index(said) >= longest
    except TypeError:
        raise ValueError(f"{name} must be an integer or None, got {said!r}") from None
    if not enough:
        raise ValueError(f"{name}={said} is less than the {longest} tokens of {what}")


def agree_on_call(options: CallOptions, documents: Documents | None, *tensors: torch.Tensor) -> int:
    """Let the ranks compare their q, k, v ``[T_local, H, D]``, options and boundaries.

    Calls of ``ring_attention`` with a ``seq_len`` then need not.

    Returns:
        Tokens of all ranks.

    Raises:
        ValueError: On every rank, if the arguments do not fit together.
    """
    window, scale, deterministic, group = options
    with refusing_together(group):
        q, k, v = (x.unsqueeze(0) for x in tensors)
        check_tensors(q, k, v)
        check_factors(0.0, scale)
        facts = facts_of(q, k, v, None, documents, window, 0, scale, deterministic)
    return len(tensors[0]) if group is None or ranks_of(group) == 1 else agree(group, FACTS, facts)
