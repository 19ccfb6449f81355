"""Who takes part in which case."""

from __future__ import annotations

from dtensor_ring_swa.bench.allgather import AllGather, AllGatherZigzag
from dtensor_ring_swa.bench.case import Case
from dtensor_ring_swa.bench.external import RingSwaPackage, TorchContextParallel
from dtensor_ring_swa.bench.extras import Extras
from dtensor_ring_swa.bench.ideal import Ideal, OneDevice
from dtensor_ring_swa.bench.merge_ring import MergeRing
from dtensor_ring_swa.bench.methods import Method
from dtensor_ring_swa.bench.ours import Ring, RingDTensor, RingStriped, RingUnbalanced, RingZigzag
from dtensor_ring_swa.bench.shapes import Shape
from dtensor_ring_swa.bench.torch_ring import (
    TorchCudnnAllGather,
    TorchCudnnAllToAll,
    TorchFlashAllGather,
    TorchFlashAllToAll,
)

OURS: tuple[type[Method], ...] = (Ring, RingDTensor, RingUnbalanced, RingZigzag, RingStriped)
# Of two methods of one name only one suits any case.
METHODS: tuple[type[Method], ...] = (
    *OURS, Ideal, OneDevice, AllGather, AllGatherZigzag, MergeRing, TorchContextParallel, TorchFlashAllGather,
    TorchFlashAllToAll, TorchCudnnAllGather, TorchCudnnAllToAll, RingSwaPackage,
)  # fmt: skip


def kinds_for(shape: Shape, extras: Extras, names: tuple[str, ...]) -> list[type[Method]]:
    """The methods of these names that suit a layer."""
    return [kind for kind in METHODS if kind.name in names and kind.suits(shape, extras)]


def gap_of(kind: type[Method], case: Case) -> str | None:
    """Why a method cannot run a case, or None; the same on every rank, and nothing is sent."""
    if case.extras.given and not kind.takes_extras:
        return f"the benchmark knows no {case.extras.asked} for it"
    return kind.gap(case)
