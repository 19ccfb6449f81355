"""What the adapters share: the group that None means, and FlashAttention's arguments."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from dtensor_ring_swa.attention import ring_attention
from dtensor_ring_swa.checks import FACTS
from dtensor_ring_swa.groups import agree, group_of
from dtensor_ring_swa.window import Window


def default_group(group: ProcessGroup | None) -> ProcessGroup | None:
    """The group itself; for None the default group, or None (one device) where there is none."""
    return dist.group.WORLD if group is None else group_of(group)


@contextmanager
def refusing_together(group: ProcessGroup | None) -> Iterator[None]:
    """An error raised inside is raised on every rank, also where peers wait in ``ring_attention``."""
    try:
        yield
    except (ValueError, NotImplementedError) as error:
        if group is not None and dist.get_world_size(group) > 1 and not torch.compiler.is_compiling():
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
    window: Window,
    scale: float | None,
    deterministic: bool,
    layout: str,
    load_balance: str,
    group: ProcessGroup | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's out ``[B, S_local, Hq, Dv]`` and lse ``[B, Hq, S_local]``."""
    return ring_attention(
        q_BSHD, k_BSGD, v_BSGE, window=window, scale=scale, deterministic=deterministic, layout=layout,
        load_balance=load_balance, mesh=group, return_lse=True,
    )  # fmt: skip
