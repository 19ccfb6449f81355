"""The halo exchange and, beside it, its transpose.

Forward fetches the halo: shard rows go out, halo rows come in, one message a neighbour. Backward
returns the halo's gradients: the same transfers with send and receive swapped, added where forward
copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from dtensor_ring_swa.cut import cut
from dtensor_ring_swa.messages import Message, post
from dtensor_ring_swa.plan import Plan
from dtensor_ring_swa.wire import pack


class Exchange:
    """The messages of one exchange, posted together.

    On CPU they are posted at once. On CUDA posting takes the host longer than launching a kernel, so
    it is put off until ``wait``, unless the caller says ``post``: it launches what does not need the
    messages first, and waits ``Beside`` that.
    """

    def __init__(
        self,
        group: ProcessGroup | None,
        sends: Sequence[Message],
        receives: Sequence[Message],
    ) -> None:
        self._group, self._sends, self._receives = group, sends, receives
        self._works: list[dist.Work] = []
        # All ranks agree on emptiness: a row has elements on all of them or on none.
        filled = [message for _, message in (*self._sends, *self._receives) if message.numel()]
        self._posted = group is None or not filled
        if filled and not filled[0].is_cuda:
            self.post()

    @property
    def is_pending(self) -> bool:
        """Whether there are messages that are yet to be posted."""
        return not self._posted

    def post(self) -> None:
        """Post the messages, unless they have been. On CUDA they leave when the current stream gets here."""
        if self._posted:
            return
        assert self._group is not None
        self._works, self._posted = post(self._group, self._sends, self._receives), True

    def wait(self) -> list[torch.Tensor]:
        """The received messages. On CUDA the current stream waits, not the host."""
        self.post()
        for work in self._works:
            work.wait()
        # Sent buffers may be freed from here on: the current stream has waited for the last use.
        self._sends, self._works = [], []
        return [message for _, message in self._receives]


def fetch_halo(
    plan: Plan,
    group: ProcessGroup | None,
    k_BSGD: torch.Tensor,
    v_BSGE: torch.Tensor,
    receives: Sequence[Message],
) -> Exchange:
    """Send the neighbours the rows that they reach, and receive those that we reach.

    Args:
        plan: This rank's plan.
        group: The group to exchange on, of the context-parallel ranks; None on one device.
        k_BSGD: This rank's keys.
        v_BSGE: This rank's values.
        receives: Room for each neighbour's rows, in the order of ``plan.receives``.
    """
    sends = [(t.peer, pack(cut(k_BSGD, t.rows), cut(v_BSGE, t.rows))) for t in plan.sends]
    return Exchange(group, sends, receives)


def return_halo(
    plan: Plan,
    group: ProcessGroup | None,
    grads: Sequence[Message],
    new_message: Callable[[int], torch.Tensor],
) -> Exchange:
    """The transpose of ``fetch_halo``: the halo's gradients go to its owners, ours come home.

    Args:
        plan: This rank's plan, the same as forward's.
        group: The group to exchange on, of the context-parallel ranks; None on one device.
        grads: Gradients of each neighbour's rows, packed, in the order of ``plan.receives``.
        new_message: Makes an empty message for a number of rows.

    Returns:
        The exchange; its messages are gradients of the shard's rows, in the order of ``plan.sends``.
    """
    homecoming = [(t.peer, new_message(len(t))) for t in plan.sends]
    return Exchange(group, grads, homecoming)
