"""PyTorch's own ``scaled_dot_product_attention``, on DTensors whose sequence is sharded.

Example:
    ``with ring_sdpa(): out = F.scaled_dot_product_attention(q, k, v, is_causal=True)`` on DTensors
    ``[B, H, S, D]``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from dtensor_ring_swa.attention import ring_attention
from dtensor_ring_swa.dtensor import viewed
from dtensor_ring_swa.integrations.sdpa_call import SDPACall, has_sharded_sequence
from dtensor_ring_swa.integrations.sdpa_recompute import RecomputeWatch
from dtensor_ring_swa.kernels import check_name
from dtensor_ring_swa.option_checks import check_layout
from dtensor_ring_swa.window import Window, WindowLike

__all__ = ["RingSDPA", "ring_sdpa"]


def ring_sdpa(
    window: WindowLike | None = None,
    *,
    kernel: str = "auto",
    deterministic: bool = False,
    layout: str = "contiguous",
    load_balance: str = "auto",
    exchange: str = "auto",
) -> RingSDPA:
    """A context in which ``F.scaled_dot_product_attention`` on sequence-sharded DTensors is ``ring_attention``.

    It takes the calls whose q, k and v are DTensors ``[B, H, S, D]`` of which one is sharded on the
    sequence, dim 2. Other mesh axes may shard the batch (dim 0) or the heads (dim 1), or replicate. The
    result has q's placements. All other calls pass through untouched. It holds in the thread that
    enters it. Of nested contexts the inner one counts.

    Backward may run outside. But a checkpointed layer calls attention again in backward, so it must
    enter the context itself, inside what is checkpointed or by ``context_fn``; docs/integrations.md shows
    both.

    Args:
        window: ``(left, right)`` tokens visible on each side of the query, its own not counted, in every
            call; ``is_causal=True`` hides those to the right besides. By default ``is_causal`` decides
            alone: ``(-1, 0)`` or ``(-1, -1)``.
        kernel: A kernel's name or ``"auto"``.
        deterministic: Bitwise the same gradients on every run; raises where the kernel cannot.
        layout: How positions lie on the ranks; see ``ring_attention``. ``is_causal`` counts positions in
            the sequence.
        load_balance: Whether to compute contiguous shards in another layout.
        exchange: Halo or ring.

    Returns:
        The context manager. In it, calls that cannot be honoured raise before anything is sent:
        ``NotImplementedError`` for ``attn_mask``, ``dropout_p``, q of another length than k and v,
        ``nn.MultiheadAttention`` and checkpoints that are not as above; ``ValueError`` for what does not
        fit together.

    Raises:
        ValueError: For an option that does not exist, or options that exclude each other.
    """
    check_name(kernel)
    check_layout(layout, load_balance, exchange)
    options = {"kernel": kernel, "deterministic": deterministic, "layout": layout, "load_balance": load_balance,
               "exchange": exchange}  # fmt: skip
    return RingSDPA(None if window is None else Window.of(window), options)


class RingSDPA(TorchFunctionMode):
    """What ``ring_sdpa`` returns.

    Args:
        window: Tokens visible; None if ``is_causal`` decides alone.
        options: Options of ``ring_attention``.
    """

    def __init__(self, window: Window | None, options: dict[str, Any]) -> None:
        super().__init__()
        self.window = window
        self.options = options
        self._watch = RecomputeWatch()

    def __enter__(self) -> RingSDPA:
        self._watch.enter()
        super().__enter__()
        return self

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            call = SDPACall(*args, **kwargs)
            if has_sharded_sequence(call[:3], -2):
                return self._attend(call)
        elif func is F.multi_head_attention_forward and has_sharded_sequence(args[:3], 0):
            # torch takes the context away inside of it, so its own call of SDPA would not be seen.
            raise NotImplementedError(
                "ring_sdpa cannot see into nn.MultiheadAttention; project q, k and v in a module of your own and call "
                "F.scaled_dot_product_attention there"
            )
        elif func is checkpoint:
            # Only while torch.compile traces; there the function that is checkpointed cannot see the context.
            raise NotImplementedError(
                "under torch.compile no checkpoint may lie inside of ring_sdpa; put the checkpoint around the compiled "
                "function, and ring_sdpa in it"
            )
        self._watch.see(func, args)
        return func(*args, **kwargs)

    def _attend(self, call: SDPACall) -> torch.Tensor:
        """Attend: DTensors q ``[B, Hq, S, D]``, k ``[B, Hkv, S, D]``, v ``[B, Hkv, S, Dv]`` to ``[B, Hq, S, Dv]``."""
        call.refuse()
        self._watch.refuse()
        window = self.window or Window.full()
        if call.is_causal:
            window = Window(window.left, 0)
        q_BSHD, k_BSGD, v_BSGE = (viewed(x, lambda x: x.transpose(1, 2)) for x in call[:3])
        try:
            out_BSHE = ring_attention(q_BSHD, k_BSGD, v_BSGE, window=window, scale=call.scale, **self.options)
        except ValueError as error:
            error.add_note("ring_sdpa exchanges dims 1 and 2 of q, k and v before: [B, S, H, D] here")
            raise
        return viewed(out_BSHE, lambda x: x.transpose(1, 2))
