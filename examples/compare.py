"""Say by how much two runs of train.py differ: ``compare.py A.jsonl B.jsonl``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

# Rounding differs between meshes, and training amplifies it step by step.
EARLY, LOSS_EARLY, NORM_EARLY, LOSS_LATE = 20, 1e-5, 1e-4, 1e-3


def main() -> None:
    """Print the differences; exit with 1 if they are more than rounding."""
    runs = [[json.loads(line) for line in Path(path).read_text().splitlines()] for path in sys.argv[1:3]]
    steps = list(zip(*runs, strict=True))
    losses = [abs(a["loss"] - b["loss"]) for a, b in steps]
    norms = [abs(a["grad_norm"] - b["grad_norm"]) / b["grad_norm"] for a, b in steps]
    early = min(EARLY, len(steps))
    # Each step by itself: max() passes over a NaN.
    same = all(
        loss <= LOSS_EARLY and norm <= NORM_EARLY for loss, norm in zip(losses[:early], norms[:early], strict=True)
    ) and all(loss <= LOSS_LATE for loss in losses)
    print(
        f"The two runs give {'the same losses' if same else 'DIFFERENT losses'}: "
        f"they differ by at most {max(losses[:early]):.1e} in the first {early} steps and {max(losses):.1e} in all "
        f"{len(steps)}; gradient norms by {max(norms[:early]):.1e} of their size in the first {early}."
    )
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
