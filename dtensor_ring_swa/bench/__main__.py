"""``python -m dtensor_ring_swa.bench``."""

import sys

from dtensor_ring_swa.bench.cli import main

if __name__ == "__main__":
    sys.exit(main())
