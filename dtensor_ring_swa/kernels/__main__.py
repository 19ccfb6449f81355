"""``python -m dtensor_ring_swa.kernels``: what the kernels can do on this machine."""

from __future__ import annotations

import torch

from dtensor_ring_swa.kernels import KERNELS, Request

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_OPTIONS = {"plain": {}, "softcap": {"softcap": 50.0}, "deterministic": {"deterministic": True}}


def main() -> None:
    """Print a line for each kernel, dtype and option; with the reason where the answer is no."""
    devices = ["cpu"] + [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    for device in map(torch.device, devices):
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        print(f"{device} ({name}), torch {torch.__version__}, head dim 128")
        for kernel in KERNELS.values():
            for dtype in _DTYPES:
                for option, values in _OPTIONS.items():
                    reason = kernel.supports(Request(device, dtype, 128, 128, 1.0, **values))
                    label = f"  {kernel.NAME:<10} {str(dtype).removeprefix('torch.'):<9} {option:<14}"
                    print(f"{label}{'yes' if reason is None else 'no: ' + reason}")


if __name__ == "__main__":
    main()
