"""The ring of whole chunks with merges, on the same kernel as ours."""

from __future__ import annotations

import torch
import torch.distributed as dist

from dtensor_ring_swa.band import Band
from dtensor_ring_swa.bench.methods import Given, Gradients, Method, attend, attend_backward

Partial = tuple[torch.Tensor, torch.Tensor]


class MergeRing(Method):
    """The whole-chunk ring: K and V go from rank to rank, partial results merge by log-sum-exp.

    As the known open implementations do it: whole chunks travel round the ring on the ordinary
    group, as many hops as the window spans, while the chunk at hand is computed; out, dq, and the
    dk and dv that travel are accumulated in float32. A window to the right turns the other way; where
    both ways would bring more chunks than there are, all come one way.
    """

    name = "merge-ring"

    @property
    def _turns(self) -> list[tuple[int, int]]:
        """(direction, hops): +1 brings the chunks of earlier ranks."""
        others = self.case.environment.ranks - 1
        left, right = (min(-(-reach // self.case.rows), others) for reach in self.case.reach)
        if left + right > others:
            return [(1, others)]
        return [(1, left), (-1, right)] if right else [(1, left)]

    def forward(self, given: Given) -> Partial:
        """Compute each chunk while the next one arrives, and merge."""
        own = _pack(given.k, given.v)
        pending = [self._pass(own, direction) if hops else (own, []) for direction, hops in self._turns]
        out, lse = attend(self.case, given.q, given.k, given.v, self._band_to(0))
        out = out.to(self.case.wide_dtype)
        for (direction, hops), (chunk, works) in zip(self._turns, pending, strict=True):
            for hop in range(1, hops + 1):
                _wait(works)
                arriving, works = self._pass(chunk, direction) if hop < hops else (chunk, [])
                if (band := self._band(direction * hop)) is not None:
                    k, v = _unpack(chunk, given)
                    _merge(out, lse, *attend(self.case, given.q, k, v, band))
                chunk = arriving
        return out.to(given.q.dtype), lse

    def backward(self, given: Given, state: Partial) -> Gradients:
        """Each chunk goes round again, and its dk and dv follow it, then go home."""
        case, wide = self.case, self.case.wide_dtype
        own = _pack(given.k, given.v)
        pending = [self._pass(own, direction) if hops else (own, []) for direction, hops in self._turns]
        dq, dk, dv = attend_backward(case, given, state, self._band_to(0))
        dq, dkv = dq.to(wide), _pack(dk, dv).to(wide)
        for (direction, hops), (chunk, works) in zip(self._turns, pending, strict=True):
            travelling, grad_works = torch.zeros_like(own, dtype=wide), []
            for hop in range(1, hops + 1):
                _wait(works)
                arriving, works = self._pass(chunk, direction) if hop < hops else (chunk, [])
                share = None
                if (band := self._band(direction * hop)) is not None:
                    keys = Given(given.q, *_unpack(chunk, given), given.dout)
                    dq_share, dk, dv = attend_backward(case, keys, state, band)
                    dq += dq_share
                    share = _pack(dk, dv)
                _wait(grad_works)
                if share is not None:
                    travelling += share
                # After the last hop, home; before it, after the chunk.
                travelling, grad_works = self._pass(travelling, direction if hop < hops else -direction * hops)
                chunk = arriving
            if hops:
                _wait(grad_works)
                dkv += travelling
        dk, dv = _unpack(dkv, given)
        return dq.to(given.q.dtype), dk.to(given.k.dtype), dv.to(given.v.dtype)

    def output(self, state: Partial) -> torch.Tensor:
        """The output."""
        return state[0]

    def predicted_bytes(self) -> tuple[int, int]:
        """A chunk a hop; backward also its gradients, in float32."""
        case = self.case
        numel = sum(hops for _, hops in self._turns) * case.rows * case.row_numel
        itemsize = case.request.dtype.itemsize
        return numel * itemsize, numel * (itemsize + case.wide_dtype.itemsize)

    def _band_to(self, distance: int) -> Band:
        """The band between the own rows and the chunk of the rank ``distance`` before."""
        rows = self.case.rows
        left, right = self.case.reach
        return Band(distance * rows - left, distance * rows + right).clip(rows, rows)

    def _band(self, hops: int) -> Band | None:
        """The band to the chunk that ``hops`` brought, or None if it shows nothing of it.

        A chunk that came round the end of the sequence is wanted only where all come one way.
        """
        environment = self.case.environment
        distance = environment.rank - (environment.rank - hops) % environment.ranks
        if distance != hops and len(self._turns) > 1:
            return None
        band = self._band_to(distance)
        return band if band.pairs(self.case.rows, self.case.rows) else None

    def _pass(self, chunk: torch.Tensor, distance: int) -> tuple[torch.Tensor, list[dist.Work]]:
        """Start to send a chunk ``distance`` ranks on, and to receive one from as far back."""
        environment = self.case.environment
        arriving = torch.empty_like(chunk)
        ahead, behind = ((environment.rank + step) % environment.ranks for step in (distance, -distance))
        ops = [
            dist.P2POp(dist.isend, chunk, group=environment.group, group_peer=ahead),
            dist.P2POp(dist.irecv, arriving, group=environment.group, group_peer=behind),
        ]
        return arriving, dist.batch_isend_irecv(ops)


def _pack(k_BNGD: torch.Tensor, v_BNGE: torch.Tensor) -> torch.Tensor:
    """One message of K and V, or of their gradients."""
    return torch.cat((k_BNGD.flatten(), v_BNGE.flatten()))


def _unpack(message: torch.Tensor, given: Given) -> Partial:
    """The two tensors of a message, as views."""
    k, v = message.split([given.k.numel(), given.v.numel()])
    return k.view(given.k.shape), v.view(given.v.shape)


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()


def _merge(out_BMHE: torch.Tensor, lse_BHM: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Fold one more partial result in. Two that see nothing merge to one that sees nothing."""
    total = torch.logaddexp(lse_BHM, lse)
    share = (lse - total).exp().nan_to_num(nan=0.0)
    out_BMHE.lerp_(out.to(out_BMHE.dtype), share.transpose(1, 2).unsqueeze(-1))
    lse_BHM.copy_(total)
