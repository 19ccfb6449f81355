"""Messages between ranks, posted together: no rank waits for one of them before it posts the next."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

# From or to which rank of the group, and the tensor.
Message = tuple[int, torch.Tensor]


def post(group: ProcessGroup, sends: Sequence[Message], receives: Sequence[Message]) -> list[dist.Work]:
    """Post contiguous tensors of one device as one batch; at least one.

    Returns:
        What to wait for.
    """
    device = (*sends, *receives)[0][1].device
    # dist.batch_isend_irecv asks the same.
    if type(group) is ProcessGroup and group._get_backend(device).supports_coalescing:
        work = coalesce(group, device, sends, receives)
        # It may be None, which is not waited for.
        return [work] if work else []
    return dist.batch_isend_irecv(
        [
            dist.P2POp(op, message, group=group, group_peer=peer)
            for op, messages in ((dist.isend, sends), (dist.irecv, receives))
            for peer, message in messages
        ]
    )


def coalesce(
    group: ProcessGroup, device: torch.device, sends: Sequence[Message], receives: Sequence[Message]
) -> dist.Work:
    """What ``batch_isend_irecv`` does on NCCL, without its layers of Python.

    Private, as torch has no other public function for it. That one takes an H200's host 59 us within a forward call,
    this one 39. Seen on torch 2.11 and 2.13.
    """
    group._start_coalescing(device)
    for peer, message in sends:
        group.send([message], peer, 0)
    for peer, message in receives:
        group.recv([message], peer, 0)
    return group._end_coalescing(device)
