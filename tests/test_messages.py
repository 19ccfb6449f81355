"""Posting messages: as one batch, whatever the backend has for it."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from dtensor_ring_swa import messages

CPU = torch.device("cpu")


def some(*peers: int) -> list[messages.Message]:
    return [(peer, torch.full((2,), float(peer))) for peer in peers]


class Group:
    """A group that writes down what it is told."""

    supports_coalescing = True

    def __init__(self, work: str | None = "work") -> None:
        self.told: list[tuple[Any, ...]] = []
        self.work = work

    def _get_backend(self, device: torch.device) -> Group:
        return self

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        self.told.append(("send", tensors, peer, tag))

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        self.told.append(("recv", tensors, peer, tag))

    def _start_coalescing(self, device: torch.device) -> None:
        self.told.append(("start", device))

    def _end_coalescing(self, device: torch.device) -> str | None:
        self.told.append(("end", device))
        return self.work


def test_a_batch_is_opened_and_closed_around_all_messages() -> None:
    group: Any = Group()
    sends, receives = some(3, 1), some(2)
    assert messages.coalesce(group, CPU, sends, receives) == "work"
    assert group.told == [
        ("start", CPU), ("send", [sends[0][1]], 3, 0), ("send", [sends[1][1]], 1, 0), ("recv", [receives[0][1]], 2, 0),
        ("end", CPU),
    ]  # fmt: skip


@pytest.mark.parametrize(("work", "works"), [("work", ["work"]), (None, [])])
def test_a_batch_is_waited_for_if_there_is_anything_to_wait_for(work: str | None, works: list[str]) -> None:
    group: Any = Group(work)
    with mock.patch.object(messages, "ProcessGroup", Group):
        assert messages.post(group, some(1), []) == works


def test_a_group_of_another_kind_is_posted_to_by_the_public_function() -> None:
    group: Any = Group()
    sends, receives = some(3), some(2, 0)
    with (
        mock.patch.object(dist, "batch_isend_irecv", lambda ops: ops),
        mock.patch.object(dist, "P2POp", lambda op, tensor, group, group_peer: (op, tensor, group, group_peer)),
    ):
        ops = messages.post(group, sends, receives)
    assert ops == [
        (dist.isend, sends[0][1], group, 3), (dist.irecv, receives[0][1], group, 2),
        (dist.irecv, receives[1][1], group, 0),
    ]  # fmt: skip
    assert not group.told
