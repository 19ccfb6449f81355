"""What a call asks for besides its tensors, checked and read once for all calls alike."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from dtensor_ring_swa.kernels import check_name
from dtensor_ring_swa.once import once
from dtensor_ring_swa.option_checks import check_options
from dtensor_ring_swa.window import Window


class Names(NamedTuple):
    """What a caller asks for by name, as one argument of the ops.

    ``assumed`` says that the length of the sequence was taken from equal shards, which the ranks have yet to compare;
    ``in_graph`` that a graph is being traced, which a cache may serve to other ranks, or which is for other lengths as
    well: then no size may be of this rank alone.

    They are one string since the dispatcher converts each argument of an op, and autograd wraps it, which takes time.
    """

    kernel: str
    layout: str
    load_balance: str
    exchange: str
    deterministic: bool
    assumed: bool = False
    in_graph: bool = False

    @property
    def text(self) -> str:
        """The names as one string, which the ops take."""
        gradients = "deterministic" if self.deterministic else "any"
        length = "assumed" if self.assumed else "known"
        return " ".join((*self[:4], gradients, length, "graph" if self.in_graph else "eager"))

    @staticmethod
    @lru_cache(maxsize=256)
    def of(text: str) -> Names:
        """The names that a string was made of."""
        kernel, layout, load_balance, exchange, gradients, length, place = text.split()
        return Names(
            kernel, layout, load_balance, exchange, gradients == "deterministic", length == "assumed", place == "graph"
        )


class Options(NamedTuple):
    """The options of a call.

    Attributes:
        window: Its window.
        names: What it asks for by name.
        text: The same, as the ops take it in eager mode.
    """

    window: Window
    names: Names
    text: str


@once
def read_options(
    left: int | None,
    right: int | None,
    kernel: str,
    layout: str,
    load_balance: str,
    exchange: str,
    deterministic: bool,
    sink_tokens: int,
    softcap: float,
    scale: float | None,
) -> Options:
    """Read the options of a call; ``left`` and ``right`` are its window's sides, None for unlimited.

    Raises:
        ValueError: For an option that does not exist, or options that exclude each other.
    """
    window = Window.of_sides(left, right)
    check_name(kernel)
    check_options(layout, load_balance, exchange, sink_tokens, softcap, scale)
    names = Names(kernel, layout, load_balance, exchange, deterministic)
    return Options(window, names, names.text)
