"""Integers on the device, without waiting for it."""

from __future__ import annotations

from typing import Any

import torch


def to_device(numbers: list[Any], device: torch.device) -> torch.Tensor:
    """An int32 tensor; to a GPU from pinned memory, so that the copy does not wait for what is queued there."""
    host = torch.tensor(numbers, dtype=torch.int32)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def stream_of(device: torch.device) -> int:
    """A key for what is made on the device and kept: what was queued on one stream must not be read on another."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
