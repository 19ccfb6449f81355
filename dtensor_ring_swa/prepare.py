"""What the integers of a call settle, once for all calls like it: its geometry, its kernel, its schedule.

A model calls with the same shapes, window and options in every layer of every step; a call looks up here what
the first one worked out, and the host is soon done with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch.distributed import ProcessGroup

from dtensor_ring_swa.geometry import Geometry
from dtensor_ring_swa.kernels import Kernel, Request, choose
from dtensor_ring_swa.options import Names
from dtensor_ring_swa.schedule import Schedule, schedule_of
from dtensor_ring_swa.window import Window


@dataclass(frozen=True)
class Prepared:
    """What is known of a call before its values are.

    Attributes:
        geometry: What its integers ask for on this rank.
        request: What is asked of the kernel.
        kernel: The kernel that serves it.
        kept_rows: Rows of K and V to keep for backward.
    """

    geometry: Geometry
    request: Request
    kernel: Kernel
    kept_rows: int

    @cached_property
    def _unpacked(self) -> list[tuple[None, Schedule]]:
        return [(None, schedule_of(self.geometry, None))]

    def sequences(self, cu_seqlens: torch.Tensor | None, batch: int) -> Sequence[tuple[slice | None, Schedule]]:
        """Batch rows, None for all of them, and the schedule they follow; where rows have own documents, one by one.

        A rank without batch rows, as an uneven split over data parallelism leaves, has nothing to do: its peers in
        the sequence hold the same rows.
        """
        if not batch:
            return []
        if cu_seqlens is None:
            return self._unpacked
        if cu_seqlens.ndim == 1:
            return [(None, schedule_of(self.geometry, tuple(cu_seqlens.tolist())))]
        return [
            (slice(row, row + 1), schedule_of(self.geometry, tuple(boundaries)))
            for row, boundaries in enumerate(cu_seqlens.tolist())
        ]


def prepare(
    q_BSHD: torch.Tensor,
    v_BSGE: torch.Tensor,
    packed: bool,
    tokens: Sequence[int],
    factors: Sequence[float],
    names: str,
    group: ProcessGroup | None,
) -> Prepared:
    """Settle a call, or look up how one like it was settled.

    Args:
        q_BSHD: This rank's queries ``[B, S_local, Hq, D]``.
        v_BSGE: This rank's values ``[B, S_local, Hkv, Dv]``.
        packed: Whether documents are given.
        tokens: See ``ops.attention``, as the other arguments.
        factors: Scale and softcap.
        names: See ``Names``.
        group: The ranks that share the sequence; None if this rank holds all of it.

    Raises:
        ValueError: If this rank does not hold the rows that its layout gives it.
        NotImplementedError: If the kernel that was asked for cannot serve the call.
    """
    _, rows, _, head_dim = q_BSHD.shape
    return _prepare(
        tuple(tokens), tuple(factors), names, *_place(group), packed, rows, q_BSHD.device, q_BSHD.dtype, head_dim,
        v_BSGE.shape[3],
    )  # fmt: skip


@lru_cache(maxsize=1024)
def _prepare(
    tokens: tuple[int, ...],
    factors: tuple[float, float],
    names: str,
    ranks: int,
    rank: int,
    packed: bool,
    rows: int,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    v_head_dim: int,
) -> Prepared:
    # Not by group: what holds one would keep it, and its name may be another's later.
    asked = Names.of(names)
    geometry = _geometry(tokens, asked, ranks, rank)
    geometry.check_rows(rows)
    request = Request(
        device, dtype, head_dim, v_head_dim, *factors, asked.deterministic, geometry.window.neighbours
    )  # fmt: skip
    return Prepared(geometry, request, choose(asked.kernel, request), geometry.kept_rows(packed, asked.in_graph))


def kept_rows(tokens: Sequence[int], names: str, packed: bool, group: ProcessGroup | None) -> int:
    """Rows of K and V to keep for backward; while torch.compile traces, some of the integers may be symbols."""
    asked = Names.of(names)
    return _geometry(tokens, asked, *_place(group)).kept_rows(packed, asked.in_graph)


def _geometry(tokens: Sequence[int], asked: Names, ranks: int, rank: int) -> Geometry:
    left, right, sink_tokens, seq_len = tokens
    # torch.compile(dynamic=True) makes these symbolic, too; a graph is for one window.
    window = Window(int(left), int(right))
    return Geometry(window, int(sink_tokens), asked.layout, asked.load_balance, asked.exchange, seq_len, ranks, rank)


def _place(group: ProcessGroup | None) -> tuple[int, int]:
    """How many ranks share the sequence, and which of them this one is."""
    return (1, 0) if group is None else (group.size(), group.rank())
