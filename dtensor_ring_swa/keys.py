"""The keys that a block sees, and the transpose: where its share of their gradients goes.

Key rows count in the plan's order: sinks, left halo, shard, right halo. A call's keys are one run of them,
gathered from the shard and from the messages that hold the rest; its dk and dv are split at the same
edges and go back to where the keys came from.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

import torch

from dtensor_ring_swa.block import Call
from dtensor_ring_swa.cut import cut
from dtensor_ring_swa.messages import Message
from dtensor_ring_swa.plan import Plan
from dtensor_ring_swa.wire import RowShape, pack

# K and V of some rows, or dk and dv.
Pair = tuple[torch.Tensor, torch.Tensor]


class KeyRows:
    """K and V of a shard with what came from other ranks, in pieces: one a message, and the shard itself.

    Attributes:
        plan: Which rows are where.
        local: K and V of the shard.
        shape: The shape of a row of K and V.
        messages: What comes from other ranks, in the order of ``plan.receives``.
    """

    def __init__(self, plan: Plan, k_BSGD: torch.Tensor, v_BSGE: torch.Tensor, halo: torch.Tensor) -> None:
        self.plan, self.local, self.shape = plan, (k_BSGD, v_BSGE), RowShape.of(k_BSGD, v_BSGE)
        self.messages = self.shape.messages(halo, plan.receives)

    def of(self, call: Call) -> Pair:
        """K and V for one call: views if they lie in one piece."""
        parts = [self._rows(piece, rows) for piece, rows in self.overlaps(call)]
        if len(parts) == 1:
            return parts[0]
        ks, vs = zip(*parts, strict=True)
        if self.shape.head_dim == self.shape.v_head_dim:
            # One copy in place of two: where calls are short, starting it takes a host longer than the copy a device.
            k, v = torch.cat((*ks, *vs), dim=1).chunk(2, dim=1)
            return k, v
        return torch.cat(ks, dim=1), torch.cat(vs, dim=1)

    def _rows(self, piece: int, rows: slice) -> Pair:
        shard = self.plan.shard_piece
        if piece == shard:
            k, v = self.local
        else:
            index = piece - (piece > shard)
            _, message = self.messages[index]
            k, v = self.shape.unpack(message, len(self.plan.receives[index]))
        return cut(k, rows), cut(v, rows)

    def overlaps(self, call: Call) -> tuple[tuple[int, slice], ...]:
        """The pieces that a call's keys lie in, and which rows of each."""
        return _overlaps(self.plan.key_edges, call.k_start, call.k_stop)


@lru_cache(maxsize=1024)
def _overlaps(edges: tuple[int, ...], start: int, stop: int) -> tuple[tuple[int, slice], ...]:
    """The pieces between edges that ``start:stop`` lies in, and which rows of each."""
    spans = ((piece, first, max(first, start), min(last, stop)) for piece, (first, last) in enumerate(pairwise(edges)))
    return tuple((piece, slice(low - first, high - first)) for piece, first, low, high in spans if low < high)


class KeyGradients:
    """Collects the calls' shares of dk and dv; the transpose of ``KeyRows``.

    A call whose keys are just the shard writes into the final tensors, so that without neighbours
    nothing is copied.
    """

    def __init__(self, keys: KeyRows, partial_dtype: torch.dtype) -> None:
        self._keys = keys
        self._partial_dtype = partial_dtype
        dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in keys.local)
        self._totals = dk, dv
        self._shares: list[tuple[int, Pair]] = []
        self._messages: dict[int, torch.Tensor] = {}
        self._whole_shard = ((keys.plan.shard_piece, slice(0, keys.plan.rows)),)

    def buffers(self, call: Call) -> Pair:
        """The tensors that a kernel has to fill with one call's dk and dv."""
        in_place = self._partial_dtype == self._totals[0].dtype
        if in_place and self._keys.overlaps(call) == self._whole_shard:
            return self._totals
        rows = call.k_len
        dk, dv = (x.new_empty(x.shape[0], rows, *x.shape[2:], dtype=self._partial_dtype) for x in self._totals)
        return dk, dv

    def add(self, call: Call, grads: Pair) -> None:
        """Take the filled buffers of a call, and split them where its keys came from."""
        start = 0
        for piece, rows in self._keys.overlaps(call):
            stop = start + rows.stop - rows.start
            dk, dv = (cut(x, slice(start, stop)) for x in grads)
            if piece == self._keys.plan.shard_piece:
                self._shares.append((rows.start, (dk, dv)))
            else:
                self._messages[piece] = pack(dk, dv)
            start = stop

    def messages(self) -> list[Message]:
        """The halo's gradients, one message a neighbour, in the order of ``plan.receives``."""
        pieces = zip(self._keys.plan.receives, sorted(self._messages), strict=True)
        return [(transfer.peer, self._messages[piece]) for transfer, piece in pieces]

    def new_message(self, rows: int) -> torch.Tensor:
        """Room for a neighbour's gradients of ``rows`` of our rows."""
        return self._totals[0].new_empty(self._keys.shape.numel(rows), dtype=self._partial_dtype)

    def total(self, returned: list[torch.Tensor]) -> Pair:
        """Dk and dv of the shard, with the neighbours' messages in the order of ``plan.sends``."""
        for transfer, message in zip(self._keys.plan.sends, returned, strict=True):
            self._shares.append((transfer.start, self._keys.shape.unpack(message, len(transfer))))
        for index, total in enumerate(self._totals):
            _sum_rows(total, [(start, share[index]) for start, share in self._shares])
        return self._totals


def _sum_rows(total: torch.Tensor, shares: list[tuple[int, torch.Tensor]]) -> None:
    """Write into ``total`` the sum of the shares that cover each row, rounded once.

    A share may be ``total`` itself. Half-precision sums are taken in float32; for two terms that is
    what torch.add does inside.
    """
    spans = [(start, start + share.shape[1], share) for start, share in shares]
    added = [span for span in spans if span[2] is not total]
    if len(added) < len(spans) and _are_apart(added):
        # Each row is the sum of two terms at most, and one of them is in place.
        for start, stop, share in added:
            cut(total, slice(start, stop)).add_(share)
        return
    edges = sorted({0, total.shape[1], *(edge for start, stop, _ in spans for edge in (start, stop))})
    for first, last in pairwise(edges):
        target = cut(total, slice(first, last))
        terms = [
            cut(x, slice(first - start, last - start)) for start, stop, x in spans if start <= first and last <= stop
        ]
        if len(terms) == 1:
            if terms[0].data_ptr() != target.data_ptr():
                target.copy_(terms[0])
        elif len(terms) == 2:
            torch.add(*terms, out=target)
        else:
            wide = terms[0].to(torch.promote_types(total.dtype, torch.float32), copy=True)
            for term in terms[1:]:
                wide += term
            target.copy_(wide)


def _are_apart(spans: list[tuple[int, int, torch.Tensor]]) -> bool:
    ordered = sorted((start, stop) for start, stop, _ in spans)
    return all(first[1] <= second[0] for first, second in pairwise(ordered))
