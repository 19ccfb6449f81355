"""Which neighbours a query sees, as two distances in tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

UNLIMITED = -1
# The ops take 64-bit integers.
MOST_TOKENS = 2**63 - 1


@dataclass(frozen=True)
class Window:
    """The query at position ``p`` sees the keys at ``[p - left, p + right]``, itself included.

    Every convention of other libraries is converted here and nowhere else.

    Attributes:
        left: Earlier tokens visible, not counting the query's own; ``-1`` is unlimited.
        right: Later tokens visible, not counting the query's own; ``-1`` is unlimited.

    Raises:
        ValueError: If a side is not an integer, or is below ``-1``.
    """

    left: int
    right: int

    def __post_init__(self) -> None:
        for side, value in (("left", self.left), ("right", self.right)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(
                    f"window {side} must be an integer number of tokens, got {value!r}; "
                    "use -1 or None for an unlimited side"
                )
            if value < UNLIMITED:
                raise ValueError(f"window {side} must be >= 0 tokens, or -1 (or None) for unlimited, got {value}")
            if value > MOST_TOKENS:
                raise ValueError(f"window {side} must be at most {MOST_TOKENS}, got {value}; use -1 for unlimited")

    def __iter__(self) -> Iterator[int]:
        return iter((self.left, self.right))

    @classmethod
    def of(cls, window: WindowLike) -> Window:
        """Read ``window=`` as users write it: a pair whose ``None`` means unlimited, or a Window.

        Raises:
            ValueError: If it is anything else, a bare integer included: whether ``w`` counts the
                query itself differs between libraries, so the caller has to say.
        """
        return window if isinstance(window, cls) else cls.of_sides(*sides_of(window))

    @classmethod
    def of_sides(cls, left: int | None, right: int | None) -> Window:
        """Read two sides, of which None is unlimited, too."""
        return cls(UNLIMITED if left is None else left, UNLIMITED if right is None else right)

    @classmethod
    def causal(cls) -> Window:
        """Every earlier key and the query's own."""
        return cls(UNLIMITED, 0)

    @classmethod
    def full(cls) -> Window:
        """Every key."""
        return cls(UNLIMITED, UNLIMITED)

    @classmethod
    def tokens(cls, n: int) -> Window:
        """Causal, ``n`` keys visible with the query's own: Hugging Face's ``sliding_window``.

        Raises:
            ValueError: If ``n`` is not a positive integer.
        """
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise ValueError(
                f"Window.tokens(n) needs n >= 1 keys (the query's own counts), got {n!r}; no limit is Window.causal()"
            )
        return cls(n - 1, 0)

    @classmethod
    def flash(cls, window_size: tuple[int, int], causal: bool = False) -> Window:
        """FlashAttention's ``window_size``, which leaves the query's own key uncounted as we do.

        Args:
            window_size: ``(left, right)`` in tokens, ``-1`` unlimited; ``(w, 0)`` shows w + 1 keys.
            causal: FlashAttention's flag: nothing to the right, whatever ``window_size`` says.

        Raises:
            ValueError: If ``window_size`` is not such a pair.
        """
        window = cls.of(window_size)
        return cls(window.left, 0) if causal else window

    @property
    def sides(self) -> tuple[int | None, int | None]:
        """The two distances in tokens, None where unlimited."""
        return (
            None if self.left == UNLIMITED else self.left,
            None if self.right == UNLIMITED else self.right,
        )

    @property
    def neighbours(self) -> int | None:
        """Tokens visible besides the query's own; None if a side is unlimited."""
        left, right = self.sides
        return None if left is None or right is None else left + right

    def reach(self, seq_len: int) -> tuple[int, int]:
        """The two distances in tokens, cut to what a sequence of ``seq_len`` tokens can hold."""
        return (
            seq_len if self.left == UNLIMITED else min(self.left, seq_len),
            seq_len if self.right == UNLIMITED else min(self.right, seq_len),
        )


WindowLike = Window | tuple[int | None, int | None] | list[int | None]


def sides_of(window: WindowLike) -> tuple[int | None, int | None]:
    """The two sides of what users write as ``window=``, not looked at yet.

    Raises:
        ValueError: If it is neither a pair nor a Window.
    """
    if isinstance(window, Window):
        return window.left, window.right
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise ValueError(
            f"window must be a pair (left, right) of tokens or a Window, got {window!r}; for a "
            "causal window of n keys, the query's own included, use Window.tokens(n)"
        )
    return window[0], window[1]
