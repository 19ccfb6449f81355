"""The processes that train together: one each for torchrun's ranks, or one alone."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist


@contextmanager
def joined() -> Iterator[torch.device]:
    """Join the other processes, and leave them at the end; gives this process's device."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # pyright: ignore
    yield device
    dist.destroy_process_group()
    if backend == "gloo":
        # Its threads may still be letting go of the last collectives' tensors, which takes Python's lock, and a
        # thread that waits for the lock when Python ends aborts the process. Seen on torch 2.11 and 2.13.
        time.sleep(0.2)
