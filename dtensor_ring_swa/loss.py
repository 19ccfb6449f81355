"""Labels of a sequence, and the mean loss over its tokens, however the ranks share them."""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dtensor_ring_swa.call_checks import CuSeqlens
from dtensor_ring_swa.checks import check_documents
from dtensor_ring_swa.document_starts import check_tokens
from dtensor_ring_swa.documents import Documents
from dtensor_ring_swa.groups import refuse_outsider

IGNORE_INDEX = -100


def next_token_labels(
    tokens: torch.Tensor, cu_seqlens: CuSeqlens | None = None, ignore_index: int = IGNORE_INDEX
) -> torch.Tensor:
    """Labels for next-token prediction, shifted while the sequence is whole.

    Shift before sharding: a shard does not hold the label of its last token.

    Args:
        tokens: Integer tokens ``[..., S]``.
        cu_seqlens: Boundaries of packed documents, from 0 to S: ``[N + 1]``, or ``[B, N + 1]`` for tokens
            ``[B, S]`` with documents of their own in each row, or ``Documents``. A document's last
            token has no label.
        ignore_index: The label of tokens with nothing to predict; ``F.cross_entropy``'s default.

    Returns:
        int64 labels of tokens' shape.

    Raises:
        ValueError: If tokens are no sequence of integers, or the boundaries do not fit them; see ``ring_attention``.
    """
    check_tokens(tokens)
    if not tokens.ndim:
        raise ValueError("labels are made of a sequence of tokens, [..., S], got a tensor without dims")
    labels = torch.full(tokens.shape, ignore_index, dtype=torch.long, device=tokens.device)
    labels[..., :-1] = tokens[..., 1:]
    if cu_seqlens is None:
        return labels
    documents = cu_seqlens if isinstance(cu_seqlens, Documents) else Documents(cu_seqlens)
    ends = documents.cu_seqlens
    if ends.ndim == 2 and tokens.ndim != 2:
        raise ValueError(f"cu_seqlens [B, N + 1] need tokens [B, S], got {list(ends.shape)} for {list(tokens.shape)}")
    check_documents(documents, tokens.shape[0] if tokens.ndim == 2 else 1, tokens.shape[-1])
    if ends.ndim == 1:
        labels[..., ends[ends > 0].to(tokens.device) - 1] = ignore_index
    else:
        row, document = (ends > 0).nonzero(as_tuple=True)
        labels[row.to(tokens.device), (ends[row, document] - 1).to(tokens.device)] = ignore_index
    return labels


def token_mean(
    loss_sum: torch.Tensor,
    count: torch.Tensor | int,
    mesh: DeviceMesh | ProcessGroup | None,
    gradients: Literal["mean", "sum"] = "mean",
) -> torch.Tensor:
    """The mean loss over all tokens of all ranks, weighted by tokens. Collective.

    A mean of the ranks' means is wrong as soon as ranks hold different numbers of valid tokens.

    Args:
        loss_sum: Sum of this rank's token losses, a scalar.
        count: Valid tokens on this rank.
        mesh: All ranks that share the batch and the sequence, data- and context-parallel; None if
            this is the only one.
        gradients: What joins the ranks' parameter gradients: their ``"mean"`` (FSDP2 and DDP over
            the same ranks) or their ``"sum"``.

    Returns:
        A scalar with the same value on every rank, whose gradients join to those of that value.
        If no rank has a valid token it is 0, with zero gradients.

    Raises:
        ValueError: If ``gradients`` is neither, ``mesh`` is no mesh or one that this rank is not in, or
            ``loss_sum`` or ``count`` is not a single number, plain and on this rank; ``loss_sum`` a float.
    """
    if gradients not in ("mean", "sum"):
        raise ValueError(f"gradients must be 'mean' or 'sum', got {gradients!r}")
    refuse_outsider(mesh)
    if mesh is not None and not isinstance(mesh, (DeviceMesh, ProcessGroup)):
        raise ValueError(f"mesh must be a DeviceMesh, a ProcessGroup or None, got {type(mesh).__name__}")
    _check_scalar("loss_sum", loss_sum, "pass the sum over this rank's tokens: losses.sum()")
    _check_scalar("count", count, "pass the number of this rank's valid tokens: (labels != -100).sum()")
    totals = torch.stack(
        (loss_sum.detach().double(), torch.as_tensor(count, dtype=torch.double, device=loss_sum.device))
    )
    ranks = 1
    if mesh is not None:
        axes = [mesh] if isinstance(mesh, ProcessGroup) else mesh.get_all_groups()
        for group in axes:
            dist.all_reduce(totals, group=group)
            ranks *= dist.get_world_size(group)
    tokens = totals[1].clamp(min=1)
    share = loss_sum * ((ranks if gradients == "mean" else 1) / tokens).to(loss_sum.dtype)
    # The share's value cancels exactly and leaves its gradient.
    return (totals[0] / tokens).to(loss_sum.dtype) + (share - share.detach())


def _check_scalar(name: str, x: object, advice: str) -> None:
    """Raise ValueError unless it is one number: a tensor without dims or, for a count, a plain number."""
    if isinstance(x, DTensor):
        raise ValueError(f"{name} must be this rank's own, a plain tensor, got a DTensor {x.placements}; {advice}")
    if isinstance(x, torch.Tensor):
        if x.ndim:
            raise ValueError(f"{name} must be a scalar, got a tensor of shape {list(x.shape)}; {advice}")
        # The mean of an integer loss would be cut to an integer.
        if x.is_complex() or (name != "count" and not x.is_floating_point()):
            raise ValueError(f"{name} must be a real{' float' * (name != 'count')} tensor, got {x.dtype}; {advice}")
    elif name != "count" or not (isinstance(x, (int, float)) or hasattr(x, "__float__")):
        raise ValueError(f"{name} must be a scalar{' tensor' * (name != 'count')}, got {x!r}; {advice}")
