"""The attention function of "ring", which transformers calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dtensor_ring_swa.attention import ring_attention
from dtensor_ring_swa.integrations.hf_mask import RingMask, refuse_together
from dtensor_ring_swa.window import UNLIMITED, Window

# What models hand to every attention function, and what changes nothing about attention.
HARMLESS = frozenset(
    (
        "cache_position", "logits_to_keep", "max_length_k", "max_length_q", "num_items_in_batch",
        "output_hidden_states", "output_router_logits", "return_dict", "shift_labels", "use_cache",
    )
)  # fmt: skip
_EDGES = ("cu_seq_lens_q", "cu_seq_lens_k")


def ring_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: RingMask | object,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    position_ids: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    deterministic: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function of "ring".

    Args:
        module: The calling attention layer.
        query: This rank's queries ``[B, Hq, S_local, D]``.
        key: This rank's keys ``[B, Hkv, S_local, D]``.
        value: This rank's values ``[B, Hkv, S_local, Dv]``.
        attention_mask: What ``ring_mask`` made.
        dropout: Only 0.0 in training.
        scaling: Factor on the scores; ``D ** -0.5`` by default.
        sliding_window: Keys visible, the query's own included; must be what the mask shows.
        softcap: Bound on the scores; None is off.
        s_aux: Learned sink logits ``[Hq]``.
        is_causal: Must be what the mask shows.
        position_ids: Positions of this rank's tokens ``[B or 1, S_local]``.
        cu_seq_lens_q: Boundaries of packed documents in the whole sequence ``[N + 1]``.
        cu_seq_lens_k: The same, or None.
        deterministic: Bitwise the same gradients on every run.
        **others: Only None, but for some that have nothing to do with attention.

    Returns:
        out ``[B, S_local, Hq, Dv]``, and None for the attention weights, which do not exist.

    Raises:
        NotImplementedError: For what cannot be honoured.
        ValueError: For arguments that do not fit together, on every rank.
    """
    if not isinstance(attention_mask, RingMask):
        given = "none" if attention_mask is None else f"a {type(attention_mask).__name__}"
        wrong = NotImplementedError(
            f"{type(module).__name__} needs a mask from the mask function of 'ring', got {given}: masks of one's own "
            "cannot be honoured, nor models that make their masks without transformers.masking_utils"
        )
        refuse_together(wrong, query)
    error: Exception | None = None
    try:
        _refuse(module, dropout, others)
        _check_window(attention_mask.window, sliding_window, is_causal)
    except (NotImplementedError, ValueError) as problem:
        error = problem
    tokens = attention_mask.settle(module, query, position_ids, (cu_seq_lens_q, cu_seq_lens_k), error)
    q_BSHD, k_BSGD, v_BSGE = (x.transpose(1, 2) for x in (query, key, value))
    out_BSHE = ring_attention(
        q_BSHD, k_BSGD, v_BSGE, window=attention_mask.window, scale=scaling, softcap=softcap or 0.0, sinks=s_aux,
        cu_seqlens=tokens.documents, mesh=attention_mask.mesh, seq_len=tokens.seq_len,
        deterministic=bool(deterministic),
    )  # fmt: skip
    return out_BSHE, None


def passed_on(others: dict[str, Any]) -> str:
    """What a model may hand on to its attention, for the ranks to compare: what one gets alone, it refuses alone.

    Args:
        others: The keywords of a model's call that its ``forward`` does not name.
    """
    # The boundaries are compared by themselves.
    said = {name: x for name, x in others.items() if x is not None and name not in HARMLESS and name not in _EDGES}
    plain = (bool, int, float, str)
    return repr(sorted((name, repr(x) if isinstance(x, plain) else type(x).__name__) for name, x in said.items()))


def _refuse(module: nn.Module, dropout: float, others: dict[str, Any]) -> None:
    """Raise for arguments that cannot be honoured."""
    if dropout and module.training:
        raise NotImplementedError(
            f"dropout of attention weights is not supported, got {dropout}; set config.attention_dropout = 0.0, or "
            "call model.eval()"
        )
    unknown = sorted(name for name, value in others.items() if value is not None and name not in HARMLESS)
    # False says that something is not wanted.
    unknown = [name for name in unknown if others[name] is not False]
    if unknown:
        raise NotImplementedError(
            f"{type(module).__name__} hands {', '.join(unknown)} to its attention, which 'ring' cannot honour; leave "
            "it out, or use another attn_implementation"
        )


def _check_window(window: Window, sliding_window: int | None, is_causal: bool | None) -> None:
    """Raise ValueError if a layer says something else than its mask, whose word would be lost otherwise."""
    if sliding_window is not None:
        # A window to both sides counts the query's own key in some models, in others it does not.
        fits = sliding_window == window.left + 1 or (window.right != 0 and sliding_window == window.left)
        if window.left == UNLIMITED or not fits:
            raise ValueError(
                f"the layer's sliding_window={sliding_window} contradicts its mask, which shows ({window.left}, "
                f"{window.right}) tokens; use another attn_implementation for this model"
            )
    if is_causal is not None and bool(is_causal) != (window.right == 0):
        raise ValueError(
            f"is_causal={is_causal} contradicts the model's mask, which shows ({window.left}, {window.right}) tokens; "
            "set config.is_causal before the model makes its masks"
        )
