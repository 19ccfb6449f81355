"""The shape of every attention block: two integers."""

from __future__ import annotations

from dataclasses import dataclass

from dtensor_ring_swa.layout import Run


@dataclass(frozen=True)
class Band:
    """Query row ``i`` of a block sees key row ``j`` iff ``lower <= j - i <= upper``.

    Full, causal and skipped blocks, and both corners of a window, are values of the two integers.
    """

    lower: int
    upper: int

    @classmethod
    def between(cls, queries: Run, keys: Run, left: int | None, right: int | None) -> Band:
        """The band between two runs of one step: keys up to ``left`` tokens before and ``right`` after.

        Query row i is at ``a + s * i`` and key row j at ``b + s * j``, so that the key is visible iff
        ``ceil((a - b - left) / s) <= j - i <= floor((a - b + right) / s)``. None is unlimited; a negative
        right side shows only keys before the query.
        """
        step, offset = queries.step, queries.start - keys.start
        lower = -len(queries) if left is None else -((left - offset) // step)
        upper = len(keys) if right is None else (offset + right) // step
        return cls(lower, upper).clip(len(queries), len(keys))

    def clip(self, q_len: int, k_len: int) -> Band:
        """The same band with bounds no wider than a block of this size can tell apart."""
        return Band(max(self.lower, -q_len), min(self.upper, k_len))

    def pairs(self, q_len: int, k_len: int) -> int:
        """How many (query, key) pairs the band shows in a block of this size."""
        if self.lower > self.upper:
            return 0
        return _pairs_up_to(self.upper, q_len, k_len) - _pairs_up_to(self.lower - 1, q_len, k_len)

    def trim(self, q_len: int, k_len: int) -> tuple[range, range, Band]:
        """Leave out the rows that see no key and the keys that no row sees.

        Returns:
            The query rows and key rows that remain, both empty if the band shows nothing, and the
            band between them.
        """
        q_start, q_stop = max(0, -self.upper), min(q_len, k_len - self.lower)
        k_start, k_stop = max(0, q_start + self.lower), min(k_len, q_stop + self.upper)
        if self.lower > self.upper or q_start >= q_stop or k_start >= k_stop:
            return range(0), range(0), Band(0, 0)
        shift = q_start - k_start
        return range(q_start, q_stop), range(k_start, k_stop), Band(self.lower + shift, self.upper + shift)

    def flash_window(self, q_len: int, k_len: int) -> tuple[int, int]:
        """The band as FlashAttention's ``(left, right)``, which aligns the last query with the last key.

        Both are >= 0 for a trimmed band.
        """
        offset = k_len - q_len
        return offset - self.lower, self.upper - offset


def _pairs_up_to(distance: int, q_len: int, k_len: int) -> int:
    """Pairs with ``j - i <= distance``: the sum over rows of ``clamp(i + distance + 1, 0, k_len)``."""

    def clamped_sum(n: int) -> int:
        """The sum of ``clamp(x, 0, k_len)`` over all ``x <= n``."""
        inside = min(max(n, 0), k_len)
        return inside * (inside + 1) // 2 + max(n - k_len, 0) * k_len

    return clamped_sum(distance + q_len) - clamped_sum(distance)
