"""Hugging Face transformers: ``attn_implementation="ring"``.

    register()
    model = AutoModelForCausalLM.from_config(config, attn_implementation="ring")
    attach(model, mesh["cp"])

The model is then called with each rank's shard of ``input_ids``. docs/integrations.md says more.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import Token
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from dtensor_ring_swa.groups import group_of
from dtensor_ring_swa.integrations.hf_attention import passed_on, ring_attention_forward
from dtensor_ring_swa.integrations.hf_mask import Scope, refuse_padding, ring_mask, scope
from dtensor_ring_swa.integrations.hf_model import first_position, refuse_mixing
from dtensor_ring_swa.integrations.hf_tokens import ranks_of, settle, state_of
from dtensor_ring_swa.sequence import positions

__all__ = ["attach", "context_parallel", "detach", "register"]

NAME = "ring"

# Losses that compare a token's logits with the label at the same place; others need labels of the next shard.
LOCAL_LOSSES = ("ForMaskedLM", "ForTokenClassification")

# Where a model holds the handles of its hooks: there they are copied with it, and are then those of the copy's hooks.
_HANDLES = "_dtensor_ring_swa_handles"


def register() -> None:
    """Add the attention function and the mask function ``"ring"`` to transformers. Once is enough."""
    AttentionInterface.register(NAME, ring_attention_forward)
    AttentionMaskInterface.register(NAME, ring_mask)


@contextmanager
def context_parallel(mesh: DeviceMesh | ProcessGroup | None) -> Iterator[None]:
    """In this context, models with ``attn_implementation="ring"`` take shards of sequences.

    Call the model with ``shard_sequence``'s shards of ``input_ids`` and of ``position_ids``: a context
    cannot set the positions, so they are checked, and models raise that do not hand them to their
    attention (``attach`` serves those). Backward may run outside, with activation checkpointing too.

    Args:
        mesh: The context-parallel axis, a 1-D DeviceMesh or a ProcessGroup; None for one device that
            holds whole sequences.

    Raises:
        ValueError: If the mesh has more than one axis.
    """
    if mesh is not None:
        group_of(mesh)
    token = scope.set(Scope(mesh))
    try:
        yield
    finally:
        scope.reset(token)


def attach(model: PreTrainedModel, mesh: DeviceMesh | ProcessGroup | None) -> None:
    """Switch a model to ``"ring"`` on these ranks: every call takes shards of sequences.

    What it adds to a ``context_parallel`` around every call: ``position_ids`` are set to the positions in
    the whole sequence where the caller gives none, and padding masks and labels are checked. A second
    call replaces the first. Only calls of ``model`` itself count, not those of a part of it.

    Args:
        model: A model whose ``forward`` takes ``position_ids``. Its configuration is changed.
        mesh: The context-parallel axis, a 1-D DeviceMesh or a ProcessGroup; None for one device that
            holds whole sequences.

    Raises:
        ValueError: If the mesh has more than one axis.
        NotImplementedError: If the model takes no ``position_ids``, does not let its attention be set, or, on
            several ranks, mixes or pools tokens elsewhere than in attention.
    """
    if ranks_of(mesh) > 1:
        refuse_mixing(model)
    signature = inspect.signature(model.forward)
    if "position_ids" not in signature.parameters:
        raise NotImplementedError(
            f"{type(model).__name__}.forward takes no position_ids, so it would count each shard from 0; use a model "
            "that takes them"
        )
    detach(model)
    register()
    model.set_attn_implementation(NAME)
    others = _other_attention(model)
    if others:
        raise NotImplementedError(
            f"{type(model).__name__} keeps the attention {others}; use a model that takes it from transformers' "
            "AttentionInterface"
        )
    entered: list[Token[Scope | None]] = []

    def enter(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]]:
        here, given = _shard_of(module, mesh, signature, args, kwargs)
        entered.append(scope.set(here))
        return (), given

    def leave(*_: object) -> None:
        if entered:
            scope.reset(entered.pop())

    handles = (
        model.register_forward_pre_hook(enter, with_kwargs=True),
        # Also when the model raises.
        model.register_forward_hook(leave, always_call=True),
    )
    setattr(model, _HANDLES, handles)


def detach(model: PreTrainedModel) -> None:
    """Take back ``attach``'s hooks, if there are any; the model keeps its ``attn_implementation``."""
    for handle in vars(model).pop(_HANDLES, ()):
        handle.remove()


def _other_attention(model: nn.Module) -> list[str]:
    """The attentions but "ring" that a model, or a model in it, is set to."""
    names = {module.config._attn_implementation for module in model.modules() if isinstance(module, PreTrainedModel)}
    return sorted(map(str, names - {NAME}))


def _by_name(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A call's arguments by name, and those of them that ``forward`` does not name; TypeError if it takes no such."""
    given = dict(signature.bind_partial(*args, **kwargs).arguments)
    others: dict[str, Any] = {}
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            others |= given.pop(name, {})
    return given | others, others


def _shard_of(
    model: PreTrainedModel,
    mesh: DeviceMesh | ProcessGroup | None,
    signature: inspect.Signature,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Scope, dict[str, Any]]:
    """Check one call's arguments with the other ranks, and complete them. Collective."""
    error: Exception | None = None
    batch, rows, tokens, given, others, state = 0, 0, None, {}, {}, ""
    try:
        given, others = _by_name(signature, args, kwargs)
        tokens = given.get("inputs_embeds") if given.get("input_ids") is None else given["input_ids"]
        if not isinstance(tokens, torch.Tensor):
            raise ValueError("an attached model needs this rank's shard of input_ids or inputs_embeds, got neither")
        dims = 3 if given.get("input_ids") is None else 2
        if tokens.ndim != dims or isinstance(tokens, DTensor):
            raise ValueError(
                "an attached model needs this rank's shard, plain input_ids [B, S_local] or inputs_embeds "
                f"[B, S_local, hidden], got a {type(tokens).__name__} {list(tokens.shape)}"
            )
        batch, rows = tokens.shape[:2]
        _check_call(model, given)
        state = state_of(model, tokens)
    except Exception as problem:  # of any kind: the peers of a rank that raised alone would wait for it
        error = problem
    position_ids, edges = given.get("position_ids"), (given.get("cu_seq_lens_q"), given.get("cu_seq_lens_k"))
    settled = settle(mesh, batch, rows, position_ids, edges, error, passed_on(others), state)
    assert tokens is not None
    if position_ids is None:
        own = positions(mesh, settled.seq_len, device=tokens.device)
        given["position_ids"] = own[None] + first_position(model)
    # It hides nothing: without it, every rank takes the same path through the model.
    given.pop("attention_mask", None)
    return Scope(mesh, settled), given


def _check_call(model: PreTrainedModel, given: dict[str, Any]) -> None:
    """Raise for what a model that sees one shard cannot do."""
    others = _other_attention(model)
    if others:
        raise ValueError(
            f"an attached model needs attn_implementation='ring', and {type(model).__name__} was set to {others}, by "
            "set_attn_implementation or by another model of the same configuration; that would attend to this rank's "
            "shard alone: attach(model, mesh) again, or detach(model)"
        )
    ids, embeds = given.get("input_ids"), given.get("inputs_embeds")
    if ids is not None and (embeds is not None or ids.is_floating_point()):
        what = "both" if embeds is not None else f"input_ids of {ids.dtype}"
        raise ValueError(f"an attached model takes integer input_ids, or inputs_embeds, got {what}; pass one of them")
    refuse_padding(given.get("attention_mask"))
    loss = getattr(model, "loss_type", None)
    if given.get("labels") is not None and given.get("shift_labels") is None and loss not in LOCAL_LOSSES:
        raise ValueError(
            "labels would be shifted inside the shard, which loses the label of its last token; shift them before "
            "sharding: shift_labels=shard_sequence(mesh, next_token_labels(tokens)), beside labels, and "
            "num_items_in_batch=the labels on all ranks"
        )
    if given.get("start_positions") is not None or given.get("end_positions") is not None:
        raise NotImplementedError(
            "start_positions and end_positions are compared with the tokens of one shard; leave them out, and make the "
            "loss of the gathered logits"
        )
    if given.get("output_attentions") or getattr(model.config, "output_attentions", False):
        raise NotImplementedError("output_attentions is not supported: the weights are never formed; leave it out")
