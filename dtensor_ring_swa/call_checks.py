"""What the tensors of a call say, once they are known to fit together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dtensor_ring_swa.checks import (
    check_boundary_lists,
    check_documents,
    check_even_shards,
    check_length,
    check_tensors,
    refuse_forward_mode,
)
from dtensor_ring_swa.cu_seqlens import on_host
from dtensor_ring_swa.documents import Documents
from dtensor_ring_swa.learned_sinks import check_sinks
from dtensor_ring_swa.sharding import check_dtensors, place_of

CuSeqlens = torch.Tensor | Documents | Sequence[Sequence[int]] | Sequence[torch.Tensor] | Sequence[int]


class Checked(NamedTuple):
    """What the tensors of a call say.

    Attributes:
        seq_len: Tokens of the whole sequence; None if the ranks have to compare their shards first.
        documents: The packed documents, if any; None while torch.compile traces.
        boundaries: Their boundaries, for the op.
        place: The name of a plain shard's group; while tracing on DTensors, this rank's place on the mesh.
        assumed: Whether the length is that of equal shards, and the ranks have yet to compare.
    """

    seq_len: int | None = None
    documents: Documents | None = None
    boundaries: torch.Tensor | None = None
    place: str = ""
    assumed: bool = False


def check_call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    cu_seqlens: CuSeqlens | None,
    mesh: DeviceMesh | ProcessGroup | None,
    group: ProcessGroup | None,
    seq_len: int | None,
) -> Checked:
    """Check the tensors of a call, by what this rank can see without asking the others.

    Raises:
        ValueError: If they do not fit together.
        NotImplementedError: For forward-mode derivatives.
    """
    compiling = torch.compiler.is_compiling()
    check_tensors(q, k, v)
    refuse_forward_mode(q, k, v, sinks)
    how, ranks, place, assumed = None, 1, "", False
    if isinstance(q, DTensor) and isinstance(k, DTensor) and isinstance(v, DTensor):
        # While torch.compile traces, the op's rule makes the same checks, out of Dynamo's sight.
        if mesh is not None or not compiling:
            how = check_dtensors(q, k, v, mesh)
        if compiling:
            place = place_of(q)
    if sinks is not None and (how is not None or not isinstance(q, DTensor)):
        check_sinks(sinks, q, how)
    if group is None:
        seq_len = check_length(q, seq_len)
    else:
        ranks, place = group.size(), group.group_name
    if compiling:
        check_even_shards(q, ranks, seq_len)
        # A graph is traced for shapes that all ranks share; whether they do is compared when it runs.
        if seq_len is None:
            seq_len, assumed = q.shape[1] * ranks, ranks > 1
    if cu_seqlens is None:
        return Checked(seq_len, None, None, place, assumed)
    if compiling:
        # There are no values yet; the op checks them.
        boundaries = cu_seqlens.cu_seqlens if isinstance(cu_seqlens, Documents) else on_host(cu_seqlens)
        check_boundary_lists(boundaries, q.shape[0])
        return Checked(seq_len, None, boundaries, place, assumed)
    documents = cu_seqlens if isinstance(cu_seqlens, Documents) else Documents(cu_seqlens)
    advice = "" if group is not None or isinstance(q, DTensor) else ", and pass mesh= if these are shards"
    check_documents(documents, q.shape[0], q.shape[1] if ranks == 1 else seq_len, advice)
    return Checked(seq_len, documents, documents.cu_seqlens, place, assumed)
