"""Bytes that this rank receives, counted as they are handed to torch.distributed.

The library has no hook of its own. So inside ``count_received`` the functions through which it and the baselines
exchange are wrapped, in this process only and outside the timed part: ``torch.distributed.batch_isend_irecv``, what
takes its place in ``messages.py`` on NCCL, and two collectives. They must be called as attributes of their modules.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from dtensor_ring_swa import messages

# torch 2.13 renames the two, and warns of the old names.
GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"


@dataclass
class Received:
    """A running count."""

    bytes: int = 0


@contextmanager
def count_received() -> Iterator[Received]:
    """Count until the block ends."""
    received = Received()
    real_batch, real_gather, real_scatter = (getattr(dist, name) for name in ("batch_isend_irecv", GATHER, SCATTER))
    real_coalesce = messages.coalesce

    def batch(ops: list[dist.P2POp]) -> Any:
        received.bytes += sum(op.tensor.nbytes for op in ops if op.op is dist.irecv)
        return real_batch(ops)

    def coalesce(
        group: dist.ProcessGroup,
        device: torch.device,
        sends: Sequence[messages.Message],
        receives: Sequence[messages.Message],
    ) -> dist.Work:
        received.bytes += sum(message.nbytes for _, message in receives)
        return real_coalesce(group, device, sends, receives)

    def gather(output: torch.Tensor, given: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        received.bytes += output.nbytes - given.nbytes
        return real_gather(output, given, *args, **kwargs)

    def scatter(output: torch.Tensor, given: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # A ring algorithm receives one partial sum of the output from each step.
        received.bytes += given.nbytes - output.nbytes
        return real_scatter(output, given, *args, **kwargs)

    with ExitStack() as patches:
        for name, counting in (("batch_isend_irecv", batch), (GATHER, gather), (SCATTER, scatter)):
            patches.enter_context(mock.patch.object(dist, name, counting))
        patches.enter_context(mock.patch.object(messages, "coalesce", coalesce))
        yield received
