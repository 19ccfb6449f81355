"""``python -m dtensor_ring_swa.kernels``: what the kernels can do on this machine."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from torch.distributed.distributed_c10d import get_node_local_rank

from dtensor_ring_swa.kernels import KERNELS, Request

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_OPTIONS = {"plain": {}, "softcap": {"softcap": 50.0}, "deterministic": {"deterministic": True}}


def main(argv: Sequence[str] | None = None) -> None:
    """Print a line for each kernel, dtype and option; with the reason where the answer is no. Once a host.

    Raises:
        SystemExit: With code 2, for flags that it cannot read.
    """
    parser = argparse.ArgumentParser(
        prog="python -m dtensor_ring_swa.kernels", description="Print what each kernel can do here, or why it cannot."
    )
    parser.add_argument("--head-dim", type=int, default=128, metavar="D", help="width of q and k (default: 128)")
    parser.add_argument("--v-head-dim", type=int, metavar="D", help="width of v (default: as q)")
    given = parser.parse_args(argv)
    width = given.head_dim, given.head_dim if given.v_head_dim is None else given.v_head_dim
    if min(width) < 1:
        parser.error(f"head dims must be at least 1, got {width[0]} and {width[1]}")
    if get_node_local_rank(fallback_rank=0):
        return
    devices = ["cpu"] + [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    for device in map(torch.device, devices):
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        widths = f"{width[0]}" if width[0] == width[1] else f"{width[0]}, of v {width[1]}"
        print(f"{device} ({name}), torch {torch.__version__}, head dim {widths}")
        for kernel in KERNELS.values():
            for dtype in _DTYPES:
                for option, values in _OPTIONS.items():
                    reason = kernel.supports(Request(device, dtype, *width, 1.0, **values))
                    label = f"  {kernel.NAME:<10} {str(dtype).removeprefix('torch.'):<9} {option:<14}"
                    print(f"{label}{'yes' if reason is None else 'no: ' + reason}")


if __name__ == "__main__":
    main()
