"""The device: integers on it without waiting for it, and work beside what the caller queues."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_T = TypeVar("_T")


def to_device(numbers: list[Any], device: torch.device) -> torch.Tensor:
    """An int32 tensor; to a GPU from pinned memory, so that the copy does not wait for what is queued there."""
    host = torch.tensor(numbers, dtype=torch.int32)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def kept(entries: int) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Keep what a function of hashable arguments, the last a device, makes there, for the last ``entries`` arguments.

    Each stream has its own: what was queued on one must not be read on another. Only while a CUDA graph is captured
    is what a warm-up made on another stream taken, and then never freed, since each replay will read it: what is
    made under capture holds nothing yet, and its numbers on the host would be gone at the replay.
    """

    def keeping(make: Callable[_P, _T]) -> Callable[_P, _T]:
        by_stream: Callable[..., dict[int, _T]] = lru_cache(maxsize=entries)(lambda *_: {})
        captured: dict[tuple[Any, ...], _T] = {}

        @wraps(make)
        def made(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            device = args[-1]
            assert isinstance(device, torch.device)
            on_gpu = device.type == "cuda"
            if on_gpu and torch.cuda.is_current_stream_capturing():
                if args not in captured:
                    captured[args] = _of_warm_up(by_stream(*args))
                return captured[args]
            found = by_stream(*args)
            stream = torch.accelerator.current_stream(device).stream_id if on_gpu else 0
            if stream not in found:
                found[stream] = make(*args, **kwargs)
            return found[stream]

        return made

    return keeping


def _of_warm_up(made: dict[int, _T]) -> _T:
    if not made:
        raise RuntimeError(
            "a CUDA graph is being captured around a call that has not run before: run it once, forward and backward, "
            "with the same shapes, window and documents, then capture"
        )
    return next(iter(made.values()))


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
