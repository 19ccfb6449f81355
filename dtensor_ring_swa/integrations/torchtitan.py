"""torchtitan: an inner attention for its decoders. docs/integrations.md shows how to swap it in."""

from __future__ import annotations

from typing import Any

import torch

from dtensor_ring_swa.module import RingAttention

__all__ = ["InnerAttention"]


class InnerAttention(RingAttention):
    """``RingAttention`` that is called as torchtitan calls a layer's ``attention.inner_attention``.

    The window takes the place of torchtitan's attention masks. Arguments are those of ``RingAttention``.
    """

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None = None, **others: Any
    ) -> torch.Tensor:
        """Attend: q ``[B, S, Hq, D]``, k ``[B, S, Hkv, D]``, v ``[B, S, Hkv, Dv]`` to ``[B, S, Hq, Dv]``.

        Args:
            q: Queries.
            k: Keys; grouped heads need no flag.
            v: Values.
            scale: Factor on the scores; the module's own where it is None.
            **others: Only None, but for ``enable_gqa``.

        Raises:
            NotImplementedError: For masks, score functions and transforms of the output.
        """
        unknown = sorted(name for name, value in others.items() if value is not None and name != "enable_gqa")
        if unknown:
            raise NotImplementedError(
                f"{', '.join(unknown)} cannot be honoured; call the model without attention_masks, and give the window "
                "to InnerAttention(window=...)"
            )
        return self._attend(q, k, v, self.scale if scale is None else scale)
