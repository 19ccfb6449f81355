"""The three forms in which ring-flash-attention offers each layout: q, k, v apart, kv packed, qkv packed."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import ProcessGroup

from dtensor_ring_swa.compat.common import attend, default_group, flash_window, refusing_together

DOC = """{summary}

    Args:
{shapes}
        dropout_p: Only 0.0.
        softmax_scale: Factor on the scores; ``D ** -0.5`` by default.
        causal: Nothing to the right of the query. False, the default, is full attention.
        window_size: ``(left, right)`` tokens visible beside the query's own, -1 for unlimited;
            distances in the whole sequence, whatever the layout.
        alibi_slopes: Only None.
        deterministic: Bitwise the same gradients on every run; raises where no kernel can.
        return_attn_probs: Return ``(out, lse, None)``.
        group: The ranks that share the sequence. None is the default group of torch.distributed, or
            one device that holds the whole sequence where none is initialised.

    Returns:
        out ``[B, S_local, Hq, Dv]``; or ``(out, lse, None)`` with lse ``[B, Hq, S_local]``, natural log,
        float32 (float64 for float64 inputs), not differentiable.

    Raises:
        NotImplementedError: For dropout and ALiBi.
        ValueError: If the arguments do not fit together, before keys are sent, on every rank.

    What differs: {differs}
    """

SHAPES = {
    "func": """        q: This rank's queries ``[B, S_local, Hq, D]``.
        k: This rank's keys ``[B, S_local, Hkv, D]`` with ``Hq % Hkv == 0``.
        v: This rank's values ``[B, S_local, Hkv, Dv]``.""",
    "kvpacked_func": """        q: This rank's queries ``[B, S_local, Hq, D]``.
        kv: This rank's keys and values ``[B, S_local, 2, Hkv, D]`` with ``Hq % Hkv == 0``.""",
    "qkvpacked_func": """        qkv: This rank's queries, keys and values ``[B, S_local, 3, H, D]``.""",
}


def make_family(module: str, prefix: str, summary: str, differs: str, layout: str, load_balance: str = "auto"):
    """``{prefix}_func``, ``{prefix}_kvpacked_func`` and ``{prefix}_qkvpacked_func``.

    Args:
        module: Name of the module that will hold them.
        prefix: What their names begin with.
        summary: First line of their docstrings.
        differs: Last paragraph of their docstrings: what differs from the originals.
        layout: How positions lie on the ranks; see ``ring_attention``.
        load_balance: See ``ring_attention``.
    """

    def call(
        packed: dict[str, torch.Tensor], dropout_p: float, softmax_scale: float | None, causal: bool,
        window_size: tuple[int, int], alibi_slopes: torch.Tensor | None, deterministic: bool,
        return_attn_probs: bool, group: ProcessGroup | None,
    ) -> Any:  # fmt: skip
        group = default_group(group)
        with refusing_together(group):
            window = flash_window(window_size, causal, dropout_p, alibi_slopes)
            q, k, v = (part for name, x in packed.items() for part in _parts(name, x))
        out, lse = attend(q, k, v, window, softmax_scale, deterministic, layout, load_balance, group)
        return (out, lse, None) if return_attn_probs else out

    def func(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        alibi_slopes: torch.Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        group: ProcessGroup | None = None,
    ) -> Any:
        return call(
            {"q": q, "k": k, "v": v}, dropout_p, softmax_scale, causal, window_size, alibi_slopes,
            deterministic, return_attn_probs, group,
        )  # fmt: skip

    def kvpacked_func(
        q: torch.Tensor,
        kv: torch.Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        alibi_slopes: torch.Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        group: ProcessGroup | None = None,
    ) -> Any:
        return call(
            {"q": q, "kv": kv}, dropout_p, softmax_scale, causal, window_size, alibi_slopes,
            deterministic, return_attn_probs, group,
        )  # fmt: skip

    def qkvpacked_func(
        qkv: torch.Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        alibi_slopes: torch.Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        group: ProcessGroup | None = None,
    ) -> Any:
        return call(
            {"qkv": qkv}, dropout_p, softmax_scale, causal, window_size, alibi_slopes,
            deterministic, return_attn_probs, group,
        )  # fmt: skip

    for form in (func, kvpacked_func, qkvpacked_func):
        form.__doc__ = DOC.format(summary=summary, shapes=SHAPES[form.__name__], differs=differs)
        form.__name__ = form.__qualname__ = f"{prefix}_{form.__name__}"
        form.__module__ = module
    return func, kvpacked_func, qkvpacked_func


def _parts(name: str, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """q, k and v of a packed tensor; a tensor that is not packed as it is."""
    if len(name) == 1:
        return (x,)
    if x.ndim != 5 or x.shape[2] != len(name):
        raise ValueError(f"{name} must be [batch, sequence, {len(name)}, heads, head_dim], got sizes {list(x.shape)}")
    return x.unbind(2)
