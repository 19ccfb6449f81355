"""Documents packed into one sequence: where they begin, read once a step and reused by every layer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple
from zlib import crc32

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from dtensor_ring_swa.cu_seqlens import on_host
from dtensor_ring_swa.device import cached_per_stream, to_device
from dtensor_ring_swa.groups import group_of
from dtensor_ring_swa.packing import Boundaries, check_boundaries, documents_within
from dtensor_ring_swa.planning import make_plan
from dtensor_ring_swa.window import Window


class LocalDocuments(NamedTuple):
    """One rank's part of packed documents, as variable-length attention kernels take it.

    Attributes:
        cu_seqlens_q: Where each document's queries begin among the shard's rows: int32 ``[n + 1]``.
        cu_seqlens_k: Where its keys begin among left halo, shard and right halo: int32 ``[n + 1]``.
        max_seqlen_q: Most queries of a document here.
        max_seqlen_k: Most keys of a document here.
    """

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int


class Documents:
    """Boundaries of the documents of a packed sequence, checked and copied to the host once.

    Build it once a step and pass it as ``cu_seqlens`` to every layer: no layer then waits for the GPU.

    Args:
        cu_seqlens: Global boundaries from 0 to the tokens of the whole sequence: int32 or int64
            ``[N + 1]``, or ``[B, N + 1]`` or a list of B such, for each batch row its own (shorter
            rows end in repeats of their last entry). Repeated entries are empty documents.
        mesh: The context-parallel axis: a 1-D DeviceMesh or a ProcessGroup; None for one device.

    Attributes:
        cu_seqlens: The boundaries on the CPU, int64, as they were shaped.
        seq_len: Tokens of the whole sequence.

    Raises:
        ValueError: If boundaries do not start at 0, decrease, or rows end at different lengths, or what is
            passed as ``mesh`` is no mesh, has several axes, or is one that this rank is not in.
    """

    def __init__(
        self,
        cu_seqlens: torch.Tensor | Sequence[int] | Sequence[torch.Tensor] | Sequence[Sequence[int]],
        mesh: DeviceMesh | ProcessGroup | None = None,
    ) -> None:
        if mesh is not None:
            group_of(mesh)
        self.mesh = mesh
        self._device = cu_seqlens.device if isinstance(cu_seqlens, torch.Tensor) else torch.device("cpu")
        if isinstance(mesh, DeviceMesh):
            self._device = torch.device(mesh.device_type)
        self.cu_seqlens = on_host(cu_seqlens)
        self._rows: list[Boundaries] = [tuple(row) for row in torch.atleast_2d(self.cu_seqlens).tolist()]
        self.seq_len = self._rows[0][-1]
        for number, row in enumerate(self._rows):
            check_boundaries(row, name="cu_seqlens" if self.cu_seqlens.ndim == 1 else f"cu_seqlens[{number}]")
        ends = [row[-1] for row in self._rows]
        if len(set(ends)) > 1:
            raise ValueError(
                f"the rows of cu_seqlens must all end at the tokens of the whole sequence, got the ends {ends}; make "
                "padding a document of its own"
            )
        self.fingerprint = crc32(repr(self._rows).encode())

    def local(self, window: Window | tuple[int | None, int | None] = (-1, 0), row: int = 0) -> LocalDocuments:
        """This rank's part for one window, on the device, prepared at the first call.

        Args:
            window: Neighbours visible, in tokens.
            row: The batch row, where rows have documents of their own.
        """
        ranks, rank = 1, 0
        if self.mesh is not None:
            group = group_of(self.mesh)
            ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        return _local(self._rows[row], ranks, rank, Window.of(window), self._device)

    @property
    def cu_seqlens_q(self) -> torch.Tensor:
        """``local().cu_seqlens_q``: the same for every window."""
        return self.local().cu_seqlens_q

    @property
    def cu_seqlens_k(self) -> torch.Tensor:
        """``local().cu_seqlens_k``: for a causal window without limit."""
        return self.local().cu_seqlens_k

    @property
    def max_seqlen_q(self) -> int:
        """``local().max_seqlen_q``."""
        return self.local().max_seqlen_q

    @property
    def max_seqlen_k(self) -> int:
        """``local().max_seqlen_k``: for a causal window without limit."""
        return self.local().max_seqlen_k

    def __repr__(self) -> str:
        return f"Documents({[len(row) - 1 for row in self._rows]} documents in {self.seq_len} tokens)"


@cached_per_stream(64)
def _local(boundaries: Boundaries, ranks: int, rank: int, window: Window, device: torch.device) -> LocalDocuments:
    plan = make_plan(boundaries[-1], ranks, rank, window, boundaries)
    keys = plan.start - plan.left, plan.stop + plan.right
    spans = list(documents_within(boundaries, (plan.start, plan.stop)))
    queries = [plan.start, *(min(stop, plan.stop) for _, stop in spans)]
    key_edges = [keys[0], *(min(stop, keys[1]) for _, stop in spans)]

    def ready(edges: list[int]) -> tuple[torch.Tensor, int]:
        longest = max((stop - start for start, stop in pairwise(edges)), default=0)
        return to_device([edge - edges[0] for edge in edges], device), longest

    (q, longest_q), (k, longest_k) = ready(queries), ready(key_edges)
    return LocalDocuments(q, k, longest_q, longest_k)
