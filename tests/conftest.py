from __future__ import annotations

from collections.abc import Callable, Iterator

import hypothesis
import pytest
import torch

from dtensor_ring_swa.testing import RankPool

# The suite is the same on every run; `pytest --hypothesis-profile=explore` looks for new cases.
hypothesis.settings.register_profile("suite", derandomize=True, deadline=None, print_blob=True)
hypothesis.settings.register_profile("explore", deadline=None, print_blob=True, max_examples=2000)
hypothesis.settings.load_profile("suite")


@pytest.fixture(scope="session")
def pools() -> Iterator[Callable[[int], RankPool]]:
    """Pools of ranks by size, started when first used and kept for the whole session."""
    torch.set_num_threads(1)
    made: dict[int, RankPool] = {}

    def pool(ranks: int) -> RankPool:
        if ranks not in made:
            made[ranks] = RankPool(ranks)
        return made[ranks]

    yield pool
    for each in made.values():
        each.close()
