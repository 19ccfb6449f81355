"""A pool of ranks: processes on this machine, gloo or NCCL, kept alive between cases.

Starting processes costs seconds, a case milliseconds. When a case fails or hangs, every rank is
killed, since the state of its collectives is unknown, and the next case starts new ones.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# What most ranks will import.
_PRELOADED = ("dtensor_ring_swa", "torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict")


class RankFailure(AssertionError):
    """A case raised, died or hung on some rank; the message is the first rank's traceback."""


class RankPool:
    """``ranks`` processes in one process group.

    Args:
        ranks: How many.
        backend: ``"gloo"``, or one with ``"nccl"`` in it. Where there are fewer GPUs than ranks, ranks share them:
            for tests of what is right, not of how fast.
        timeout: Seconds after which a case counts as hung.

    Example:
        ``pool.run(function, *arguments)`` calls a module-level function on every rank.
    """

    def __init__(self, ranks: int, backend: str = "gloo", timeout: float = 60.0) -> None:
        self.ranks = ranks
        self.backend = backend
        self.timeout = timeout
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        atexit.register(self.close)

    def run(self, function: Callable[..., Any], *args: Any, timeout: float | None = None) -> list[Any]:
        """Call ``function(*args)`` on every rank and return what each returned, by rank.

        Raises:
            RankFailure: If a rank raised, died, or did not answer in time.
        """
        message = pickle.dumps((function, args))
        try:
            if not self._processes:
                self._start()
            self._send(message)
            return self._collect(time.monotonic() + (timeout or self.timeout))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Kill all ranks."""
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        if self._folder is not None:
            self._folder.cleanup()
        self._processes, self._pipes, self._folder = [], [], None

    def _start(self) -> None:
        # Importing torch takes a process some seconds, so one process does it and each rank is forked from that.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(_PRELOADED))
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        for rank in range(self.ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.ranks, self.backend, store, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _send(self, message: bytes) -> None:
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send_bytes(message)
            except OSError:
                raise RankFailure(f"rank {rank} of {self.ranks} died") from None

    def _collect(self, deadline: float) -> list[Any]:
        results: dict[int, Any] = {}
        while len(results) < self.ranks:
            waiting = [rank for rank in range(self.ranks) if rank not in results]
            ready = wait([self._pipes[rank] for rank in waiting], timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise RankFailure(f"ranks {waiting} hung; ranks {sorted(results)} had finished")
            for rank in (rank for rank in waiting if self._pipes[rank] in ready):
                results[rank] = self._receive(rank)
        return [results[rank] for rank in range(self.ranks)]

    def _receive(self, rank: int) -> Any:
        """The answer of one rank. The first to raise is the cause; its peers only wait for it in vain."""
        try:
            sound, value = pickle.loads(self._pipes[rank].recv_bytes())
        except EOFError:
            raise RankFailure(f"rank {rank} of {self.ranks} died") from None
        if sound:
            return value
        dead = [other for other, process in enumerate(self._processes) if not process.is_alive()]
        if dead:
            raise RankFailure(f"rank {dead[0]} of {self.ranks} died; rank {rank} then said:\n{value}")
        raise RankFailure(f"rank {rank} of {self.ranks} raised:\n{value}")


def _serve(rank: int, ranks: int, backend: str, store: str, pipe: Connection) -> None:
    """One rank: answer cases until the pipe closes."""
    torch.set_num_threads(1)
    if "nccl" in backend:
        _take_gpu(rank, ranks)
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=20)
    )
    while True:
        try:
            function, args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            answer = pickle.dumps((True, function(*args)))
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
        pipe.send_bytes(answer)


def _take_gpu(rank: int, ranks: int) -> None:
    """Let this process use its GPU, which it may share."""
    gpus = torch.cuda.device_count()
    torch.cuda.set_device(rank % gpus)
    if ranks > gpus:
        # NCCL refuses two ranks of one host on one GPU, and this is the name it knows a host by: each GPU has one
        # rank of each of several hosts. Seen on NCCL 2.28.
        os.putenv("NCCL_HOSTID", f"host {rank // gpus}")
