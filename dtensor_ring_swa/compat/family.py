"""The three forms in which ring-flash-attention offers each function: q, k, v apart, kv packed, qkv packed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from dtensor_ring_swa.compat.common import CallOptions, default_group, flash_window, refusing_together, sizes_of

# What each form takes first, and what all take last.
FORMS = {"func": ("q", "k", "v"), "kvpacked_func": ("q", "kv"), "qkvpacked_func": ("qkv",)}
OPTIONS = {
    "dropout_p": 0.0, "softmax_scale": None, "causal": False, "window_size": (-1, -1), "alibi_slopes": None,
    "deterministic": False, "return_attn_probs": False, "group": None,
}  # fmt: skip

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
        out ``[{rows}, Hq, Dv]``; or ``(out, lse, None)`` with lse ``[{lse}]``, natural log,
        float32 (float64 for float64 inputs), not differentiable.

    Raises:
        NotImplementedError: For dropout and ALiBi.
        ValueError: If the arguments do not fit together, before keys are sent, on every rank.

    What differs: {differs}
    """

SHAPES = {
    "q": "q: This rank's queries ``[{rows}, Hq, D]``.",
    "k": "k: This rank's keys ``[{rows}, Hkv, D]`` with ``Hq % Hkv == 0``.",
    "v": "v: This rank's values ``[{rows}, Hkv, Dv]``.",
    "kv": "kv: This rank's keys and values ``[{rows}, 2, Hkv, D]`` with ``Hq % Hkv == 0``.",
    "qkv": "qkv: This rank's queries, keys and values ``[{rows}, 3, H, D]``.",
}


# From q, k, v, the options and the arguments between them: out and lse.
Attend = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def make_family(
    module: str, prefix: str, summary: str, differs: str, attend: Attend, between: Mapping[str, str] | None = None
) -> tuple[Callable[..., Any], ...]:
    """``{prefix}_func``, ``{prefix}_kvpacked_func`` and ``{prefix}_qkvpacked_func``.

    Args:
        module: Name of the module that will hold them.
        prefix: What their names begin with.
        summary: First line of their docstrings.
        differs: Last paragraph of their docstrings: what differs from the originals.
        attend: Computes out and lse from ``(q, k, v, options, *arguments of between)``.
        between: Required arguments between tensors and options, with their descriptions. Functions
            that have some take packed documents ``[T_local, H, D]``; others ``[B, S_local, H, D]``.
    """
    return tuple(_make_form(form, module, prefix, summary, differs, attend, between or {}) for form in FORMS)


def _make_form(
    form: str, module: str, prefix: str, summary: str, differs: str, attend: Attend, between: Mapping[str, str]
) -> Callable[..., Any]:
    names, packed = FORMS[form], bool(between)
    rows, lse = ("T_local", "Hq, T_local") if packed else ("B, S_local", "B, Hq, S_local")
    signature = inspect.Signature(
        [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in (*names, *between)]
        + [inspect.Parameter(x, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=y) for x, y in OPTIONS.items()]
    )

    def function(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        said = given.arguments
        group = default_group(said["group"])
        with refusing_together(group):
            window = flash_window(said["window_size"], said["causal"], said["dropout_p"], said["alibi_slopes"])
            q, k, v = (part for name in names for part in _parts(name, said[name], packed))
        options = CallOptions(window, said["softmax_scale"], said["deterministic"], group)
        out, lse = attend(q, k, v, options, *(said[name] for name in between))
        return (out, lse, None) if said["return_attn_probs"] else out

    described = [SHAPES[name].format(rows=rows) for name in names] + [f"{x}: {text}" for x, text in between.items()]
    shapes = "\n".join(f"        {line}" for line in described)
    function.__doc__ = DOC.format(summary=summary, shapes=shapes, differs=differs, rows=rows, lse=lse)
    function.__name__ = function.__qualname__ = f"{prefix}_{form}"
    function.__module__ = module
    function.__signature__ = signature  # pyright: ignore[reportFunctionMemberAccess]
    return function


def _parts(name: str, x: torch.Tensor, packed: bool) -> tuple[torch.Tensor, ...]:
    """q, k and v of a tensor that holds several; a tensor that holds one as it is."""
    if len(name) == 1:
        return (x,)
    if not isinstance(x, torch.Tensor) or x.ndim != (4 if packed else 5) or x.shape[-3] != len(name):
        leading = "tokens" if packed else "batch, sequence"
        raise ValueError(f"{name} must be [{leading}, {len(name)}, heads, head_dim], got {sizes_of(x)}")
    return x.unbind(-3)
