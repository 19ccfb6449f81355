"""Work beside what the caller queues on the device."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from types import TracebackType
from typing import TypeVar

import torch

_T = TypeVar("_T")


class Beside:
    """Work beside what the current stream is given next: on CUDA on a stream of high priority, on CPU in turn.

    What is queued ``with beside:`` starts when all is done that was queued before ``beside`` was made, and fills
    the gaps of what is queued after: where the last blocks of one kernel leave room. What it reads must be
    held until ``join``, after which the stream that is then current waits for it.

    Each stream has its own beside it, so that what was allocated on that one and freed is not written anew
    before its readers here are done.
    """

    def __init__(self, device: torch.device, needed: bool = True) -> None:
        self._device = device
        self._stream: torch.Stream | None = None
        self._ready: torch.Event | None = None
        if device.type == "cuda" and needed:
            # Of torch itself, not of torch.cuda, whose streams and events take the host several times as long.
            caller = torch.accelerator.current_stream(device)
            which, self._ready = _stream_beside(caller), caller.record_event()
            # An object of our own: entering one keeps in it what to go back to, and threads may be in at a time.
            self._stream = torch.Stream(which.stream_id, which.device_index, which.device_type)

    def __enter__(self) -> None:
        if self._stream is not None:
            self._stream.__enter__()
            if self._ready is not None:
                # Only now: what others queue on this stream before must not wait for it.
                self._stream.wait_event(self._ready)
                self._ready = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._stream is not None:
            self._stream.__exit__(kind, error, trace)

    def finish(self, work: Callable[[], _T]) -> _T:
        """Queue this last, and join."""
        with self:
            result = work()
        self.join()
        return result

    def join(self) -> None:
        """Let the current stream wait for what was queued here."""
        if self._stream is not None:
            torch.accelerator.current_stream(self._device).wait_stream(self._stream)


@lru_cache
def _stream_beside(caller: torch.Stream) -> torch.Stream:
    return torch.Stream(caller.device, priority=-1)
