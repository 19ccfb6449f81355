"""Documents found in the tokens or positions of a packed sequence: where each of them begins."""

from __future__ import annotations

from operator import index

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dtensor_ring_swa.documents import Documents


def documents_from_position_ids(position_ids: torch.Tensor, mesh: DeviceMesh | ProcessGroup | None = None) -> Documents:
    """Documents from positions that count up within each and start again at the next.

    Args:
        position_ids: Of the whole sequence, integers ``[S]`` or ``[B, S]``: a new document begins
            wherever a position is not its predecessor plus one.
        mesh: See ``Documents``.

    Raises:
        ValueError: For another number of dims, or what holds no integers.
    """
    starts = _all_start(position_ids)
    # As int64, in which no position wraps around.
    starts[..., 1:] = position_ids.long().diff() != 1
    return Documents(_boundaries(starts), mesh)


def documents_from_eos(tokens: torch.Tensor, eos_id: int, mesh: DeviceMesh | ProcessGroup | None = None) -> Documents:
    """Documents that each end with an end-of-sequence token, the last one with or without.

    Args:
        tokens: The whole sequence, integers ``[S]`` or ``[B, S]``.
        eos_id: The token that ends a document and belongs to it: one integer.
        mesh: See ``Documents``.

    Raises:
        ValueError: For another number of dims, what holds no integers, or an ``eos_id`` that is no integer.
    """
    try:
        # None, or a list of several, would equal no token: all documents would be one.
        end = index(eos_id)
    except TypeError:
        raise ValueError(
            f"eos_id must be one token, an integer, got {eos_id!r}; where several tokens end documents, replace them "
            "by one before the call: torch.where(torch.isin(tokens, several), one, tokens)"
        ) from None
    starts = _all_start(tokens)
    starts[..., 1:] = tokens[..., :-1] == end
    return Documents(_boundaries(starts), mesh)


def check_tokens(tokens: object) -> None:
    """Raise ValueError unless it is a plain tensor of integers, as tokens and positions of a whole sequence are."""
    if isinstance(tokens, DTensor):
        raise ValueError("tokens and positions are taken whole and plain, got a DTensor; pass its full_tensor()")
    if (
        not isinstance(tokens, torch.Tensor)
        or tokens.dtype == torch.bool
        or tokens.is_floating_point()
        or tokens.is_complex()
    ):
        found = tokens.dtype if isinstance(tokens, torch.Tensor) else type(tokens).__name__
        raise ValueError(f"tokens and positions must be a tensor of integers, got {found}")


def _all_start(tokens: torch.Tensor) -> torch.Tensor:
    check_tokens(tokens)
    if tokens.ndim not in (1, 2):
        raise ValueError(f"documents are found in [S] or [B, S], got {list(tokens.shape)}")
    return torch.ones_like(tokens, dtype=torch.bool)


def _boundaries(starts: torch.Tensor) -> list[torch.Tensor] | torch.Tensor:
    """Boundaries from where documents begin; on the host, with one copy."""
    starts, length = starts.cpu(), torch.tensor([starts.shape[-1]])
    # An empty sequence is one empty document.
    starts = starts if starts.shape[-1] else starts.new_ones(*starts.shape[:-1], 1)
    rows = [torch.cat((row.nonzero().flatten(), length)) for row in torch.atleast_2d(starts)]
    return rows if starts.ndim > 1 else rows[0]
