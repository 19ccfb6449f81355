"""attn_implementation="ring" in models of Hugging Face transformers: equal to their own eager attention in one process.

Small random models from real configuration classes; nothing is downloaded.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from transformers import masking_utils

from dtensor_ring_swa import Window, gather_sequence, next_token_labels, positions, shard_sequence
from dtensor_ring_swa.integrations import hf
from dtensor_ring_swa.integrations.hf_attention import ring_attention_forward
from dtensor_ring_swa.integrations.hf_mask import RingMask, scope
from dtensor_ring_swa.integrations.hf_window import read_window
from dtensor_ring_swa.layout import shard
from dtensor_ring_swa.testing import RankPool

from cases import apart, mesh_of


@pytest.fixture(scope="module")
def ranks(pools: Callable[[int], RankPool]) -> RankPool:
    """Four ranks that have imported transformers, which takes each of them seconds."""
    pools(4).run(tokens_of, 1, 1, timeout=240)
    return pools(4)


SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED: dict[str, Any] = {**SIZES, "num_key_value_heads": 2}
HYBRID = ["sliding_attention", "full_attention"]

# Configuration class and arguments. A shard of 26 tokens on 4 ranks has 7, so windows reach the neighbour and beyond.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("Mistral", {**GROUPED, "head_dim": 8, "sliding_window": 9}),
    "gemma2": ("Gemma2", {**GROUPED, "head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 16,
                          "attn_logit_softcapping": 1.0}),
    "gemma3": ("Gemma3Text", {**GROUPED, "head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 16,
                              "layer_types": HYBRID}),
    "gpt_oss": ("GptOss", {**GROUPED, "head_dim": 8, "sliding_window": 5, "num_local_experts": 2,
                           "num_experts_per_tok": 1}),
    "qwen3": ("Qwen3", {**GROUPED, "head_dim": 8}),
    "modernbert": ("ModernBert", {**SIZES, "local_attention": 10, "global_attn_every_n_layers": 2, "cls_token_id": 1,
                                  "sep_token_id": 2}),
    "olmo3": ("Olmo3", {**GROUPED, "sliding_window": 5, "layer_types": HYBRID}),
    "phi3": ("Phi3", {**GROUPED, "sliding_window": 5}),
    # Counts positions from the one after the padding's.
    "roberta": ("Roberta", {**SIZES, "vocab_size": 65, "pad_token_id": 64, "max_position_embeddings": 96,
                            "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}),
}  # fmt: skip


ENCODERS = ("modernbert", "roberta")


def model_of(name: str, **changes: Any) -> Any:
    """A model with its own eager attention, the same on every rank."""
    family, sizes = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**{**sizes, **changes})
    torch.manual_seed(0)
    auto = transformers.AutoModelForMaskedLM if name in ENCODERS else transformers.AutoModelForCausalLM
    model = auto.from_config(config, attn_implementation="eager")
    for parameter in model.parameters():
        if parameter.ndim == 1:  # norms, biases and sinks begin as ones and zeros
            torch.nn.init.normal_(parameter, 0.5, 0.5)
    return model


def tokens_of(batch: int, seq_len: int) -> torch.Tensor:
    return torch.randint(64, (batch, seq_len), generator=torch.Generator().manual_seed(0))


def mesh_here(sharers: int = 2, device: str = "cpu") -> Any:
    """The context-parallel axis: all ranks, or of four two pairs that do the same."""
    return mesh_of((dist.get_world_size() // sharers, sharers), ("dp", "cp"), device)["cp"]


def run(model: Any, labels: torch.Tensor, count: int, inside: Any = None, **inputs: Any) -> torch.Tensor:
    """Forward (in a context) and backward (outside of it) of this share of the mean loss; the logits."""
    with inside or nullcontext():
        logits = model(use_cache=False, **inputs).logits
    (F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / count).backward()
    return logits.detach()


@lru_cache
def alone(
    name: str,
    batch: int,
    ids: tuple[tuple[int, ...], ...] | None,
    seq_len: int = 26,
    device: str = "cpu",
    **inputs: Any,
) -> Any:
    """Logits, and gradients by parameter, of eager attention in one process; ``ids`` are position_ids."""
    model, tokens = model_of(name).to(device), tokens_of(batch, seq_len).to(device)
    inputs = inputs if ids is None else {**inputs, "position_ids": torch.tensor(ids, device=device)}
    logits = run(model, next_token_labels(tokens), tokens.numel(), input_ids=tokens, **inputs)
    return logits, {name: parameter.grad for name, parameter in model.named_parameters()}


def difference(model: Any, mesh: Any, logits: torch.Tensor, want: Any) -> tuple[float, float]:
    """The largest difference of this rank's logits, and of any parameter's gradient once the ranks' are summed."""
    expected, gradients = want
    worst = float((logits - shard_sequence(mesh, expected)).abs().amax())
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert grads.keys() == gradients.keys()
    for grad in grads.values():
        dist.all_reduce(grad, group=mesh.get_group())
    assert max(float(grad.abs().amax()) for grad in gradients.values()) > 0.01
    return worst, max(float((grads[name] - gradients[name]).abs().amax()) for name in grads)


def attached(
    name: str,
    sharers: int,
    ids: Any = None,
    changed: Any = None,
    seq_len: int = 26,
    device: str = "cpu",
    **inputs: Any,
) -> tuple[float, float]:
    """How far the sharded model is from the whole; ``ids`` are position_ids, ``changed`` other configuration."""
    model, tokens = model_of(name, **(changed or {})).to(device), tokens_of(2, seq_len).to(device)
    mesh = mesh_here(sharers, device)
    hf.attach(model, mesh)
    mine, labels = shard_sequence(mesh, tokens, next_token_labels(tokens))
    placed = {} if ids is None else {"position_ids": shard_sequence(mesh, torch.tensor(ids, device=device))}
    logits = run(model, labels, tokens.numel(), input_ids=mine, **placed, **inputs)
    return difference(model, mesh, logits, alone(name, 2, ids, seq_len, device, **inputs))


def in_bfloat16(
    name: str, sharers: int, seq_len: int = 26, device: str = "cpu"
) -> tuple[tuple[float, float], tuple[float, float]]:
    """How far logits and gradients in bfloat16 are from those in float32: of "ring", and of eager in one process."""
    tokens, mesh = tokens_of(2, seq_len).to(device), mesh_here(sharers, device)
    labels, found = next_token_labels(tokens), []
    for dtype, attach in ((torch.float32, False), (torch.bfloat16, True), (torch.bfloat16, False)):
        model = model_of(name).to(device, torch.bfloat16).to(dtype)
        shards = tokens, labels
        if attach:
            hf.attach(model, mesh)
            shards = shard_sequence(mesh, tokens, labels)
        logits = run(model, shards[1], tokens.numel(), input_ids=shards[0])
        grads = torch.cat([parameter.grad.float().flatten() for parameter in model.parameters()])
        if attach:
            logits = gather_sequence(mesh, logits)
            dist.all_reduce(grads, group=mesh.get_group())
        found.append((logits, grads))
    (logits, grads), ring, eager = found
    return (apart(ring[0], logits, True), apart(ring[1], grads, True)), (
        apart(eager[0], logits, True),
        apart(eager[1], grads, True),
    )


def test_bfloat16_is_as_exact_as_eager(ranks: RankPool) -> None:
    for ring, eager in ranks.run(in_bfloat16, "mistral", 4):
        assert all(0 < mine < 1.5 * theirs for mine, theirs in zip(ring, eager, strict=True)), (ring, eager)


def worst(results: list[tuple[float, float]]) -> float:
    return max(max(result) for result in results)


@pytest.mark.parametrize("sharers", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_equal_one_process(ranks: RankPool, name: str, sharers: int) -> None:
    assert worst(ranks.run(attached, name, sharers)) < 1e-5


def attached_with_other_window(name: str) -> tuple[float, float]:
    key = "local_attention" if name == "modernbert" else "sliding_window"
    return attached(name, 2, changed={key: MODELS[name][1][key] + 2})


@pytest.mark.parametrize("name", [name for name, (_, sizes) in MODELS.items() if name not in ("qwen3", "roberta")])
def test_the_window_is_not_lost(ranks: RankPool, name: str) -> None:
    results = ranks.run(attached_with_other_window, name)
    assert results[1][0] > 1e-3 and results[0][1] > 1e-3


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_a_decoder_may_be_an_encoder(ranks: RankPool, name: str) -> None:
    assert worst(ranks.run(encoder, name)) < 1e-5


def encoder(name: str) -> tuple[float, float]:
    return attached(name, 2, is_causal=False)


# Packed documents


def restarting(*lengths: int) -> tuple[int, ...]:
    return tuple(i for length in lengths for i in range(length))


SAME = (restarting(3, 14, 9),) * 2
OWN = (restarting(3, 14, 9), restarting(20, 6))


@pytest.mark.parametrize("ids", [SAME, OWN, SAME[:1]], ids=["shared", "of each row", "one row"])
def test_documents_from_position_ids(ranks: RankPool, ids: Any) -> None:
    assert worst(ranks.run(attached, "gemma3", 4, ids)) < 1e-5


def attached_to_packed(sharers: int, edges: list[int], ids: Any, others: Any) -> tuple[float, float]:
    """Documents by ``cu_seq_lens_q``; the whole has them by position_ids."""
    model, tokens, mesh = model_of("mistral"), tokens_of(1, 26), mesh_here(sharers)
    hf.attach(model, mesh)
    mine, labels = shard_sequence(mesh, tokens, next_token_labels(tokens))
    lengths = torch.tensor(edges, dtype=torch.int32)
    placed = {} if ids is None else {"position_ids": shard_sequence(mesh, torch.tensor(ids))}
    logits = run(
        model, labels, 26, input_ids=mine, cu_seq_lens_q=lengths, cu_seq_lens_k=lengths, max_length_q=14, **placed
    )
    return difference(model, mesh, logits, alone("mistral", 1, others))


def test_documents_from_cu_seq_lens(ranks: RankPool) -> None:
    edges = [0, 3, 17, 17, 26]
    assert worst(ranks.run(attached_to_packed, 4, edges, None, SAME[:1])) < 1e-5
    assert worst(ranks.run(attached_to_packed, 4, edges, SAME[:1], SAME[:1])) < 1e-5
    # Without documents it is another result.
    assert worst(ranks.run(attached_to_packed, 4, [0, 26], None, SAME[:1])) > 1e-3


def test_a_shard_may_be_a_document_if_that_is_said(ranks: RankPool) -> None:
    ids = (restarting(13, 13),)
    assert worst(ranks.run(attached_to_packed, 2, [0, 13, 26], ids, ids)) < 1e-5


# In a context


def in_context(name: str, ids: Any, checkpointing: bool) -> tuple[float, float]:
    """The forward in a context, backward outside, with the layers recomputed there or not."""
    hf.register()
    model, tokens = model_of(name), tokens_of(2, 26)
    model.set_attn_implementation("ring")
    if checkpointing:
        model.train().gradient_checkpointing_enable({"use_reentrant": False})
    places = positions(None, 26)[None] if ids is None else torch.tensor(ids)
    mine, labels, placed = shard_sequence(mesh_here(), tokens, next_token_labels(tokens), places.expand(2, -1))
    logits = run(model, labels, 52, hf.context_parallel(mesh_here()), input_ids=mine, position_ids=placed)
    return difference(model, mesh_here(), logits, alone(name, 2, ids))


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("ids", [None, OWN], ids=["one document", "packed"])
def test_in_a_context(ranks: RankPool, checkpointing: bool, ids: Any) -> None:
    assert worst(ranks.run(in_context, "gemma3", ids, checkpointing)) < 1e-5


def recomputed_by_reentrant_checkpoints() -> tuple[float, float]:
    model, tokens = model_of("gemma3"), tokens_of(2, 26)
    hf.attach(model, mesh_here())
    model.train().gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    mine, labels = shard_sequence(mesh_here(), tokens, next_token_labels(tokens))
    return difference(model, mesh_here(), run(model, labels, 52, input_ids=mine), alone("gemma3", 2, None))


def test_reentrant_checkpoints(ranks: RankPool) -> None:
    assert worst(ranks.run(recomputed_by_reentrant_checkpoints)) < 1e-5


@pytest.mark.parametrize("name", ["mistral", "modernbert"])
def test_one_device_without_ranks(name: str) -> None:
    model, tokens = model_of(name), tokens_of(2, 26)
    want = model(tokens).logits
    hf.attach(model, None)
    assert (model(tokens).logits - want).abs().max() < 1e-5
    hf.detach(model)
    with hf.context_parallel(None):
        assert (model(tokens).logits - want).abs().max() < 1e-5
    with pytest.raises(RuntimeError, match="does not know which ranks"):
        model(tokens)


def test_a_copy_is_attached_and_detached_like_its_model() -> None:
    model, tokens = model_of("roberta"), tokens_of(1, 8)
    want = model(tokens).logits
    hf.attach(model, None)
    copied = deepcopy(model)
    assert (copied(tokens).logits - want).abs().max() < 1e-5
    # The hooks of the copy's model would have left its scope behind.
    hf.attach(copied, None)
    assert (copied(tokens).logits - want).abs().max() < 1e-5
    assert scope.get() is None
    hf.detach(copied)
    with pytest.raises(RuntimeError, match="does not know which ranks"):
        copied(tokens)
    assert (model(tokens).logits - want).abs().max() < 1e-5


def test_the_implementation_is_found_by_its_name() -> None:
    hf.register()
    config = transformers.MistralConfig(**MODELS["mistral"][1])
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="ring")
    assert model.config._attn_implementation == "ring"
    with hf.context_parallel(None):
        assert model(tokens_of(1, 8)).logits.shape == (1, 8, 64)


# What raises, on every rank


def refusal(case: str, *args: Any) -> str:
    """The error of a case on this rank."""
    try:
        REFUSED[case](*args)
    except (ValueError, NotImplementedError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def call(name: str = "mistral", changed: Any = None, train: bool = False, **inputs: Any) -> None:
    """An attached model on this rank's 13 of 26 tokens."""
    model = model_of(name, **(changed or {})).train(train)
    hf.attach(model, mesh_here())
    model(**({"input_ids": tokens_of(1, 13)} | inputs))


def call_of_another_attention(how: str) -> None:
    """A model that is attached, and then set to an attention that sees this rank's shard alone."""
    config = transformers.MistralConfig(**MODELS["mistral"][1])
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    hf.attach(model, mesh_here())
    if how == "set":
        model.set_attn_implementation("sdpa")
    else:
        transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model(tokens_of(1, 13))


def call_strict(**inputs: Any) -> None:
    """An attached model whose forward takes nothing that it does not name."""
    model = model_of("mistral")
    forward = model.forward
    model.forward = lambda input_ids=None, position_ids=None: forward(input_ids, position_ids=position_ids)
    hf.attach(model, mesh_here())
    model(input_ids=tokens_of(1, 13), **inputs)


def call_of(name: str, config: Any, **inputs: Any) -> None:
    """An attached model of another class on this rank's 13 of 26 tokens."""
    config = transformers.MistralConfig(**MODELS[config][1]) if isinstance(config, str) else config
    model = getattr(transformers, name)(config)
    hf.attach(model, mesh_here())
    model(tokens_of(1, 13), **inputs)


def call_in_context(name: str, **inputs: Any) -> None:
    hf.register()
    model = model_of(name)
    model.set_attn_implementation("ring")
    with hf.context_parallel(mesh_here()):
        model(tokens_of(1, 13), **inputs)


def rank_here() -> int:
    return mesh_here().get_local_rank()


def padded_on_one_rank() -> torch.Tensor:
    mask = torch.ones(1, 13, dtype=torch.long)
    mask[0, -1] = rank_here() == 0
    return mask


def cached() -> None:
    hf.register()
    model = model_of("mistral")
    model.set_attn_implementation("ring")
    run = shard(26, 2, rank_here())
    with hf.context_parallel(mesh_here()):
        out = model(tokens_of(1, 13), position_ids=torch.arange(run.start, run.stop)[None], use_cache=True)
        # transformers 5.17 knows it by the other name.
        name = "cache" if "cache" in out else "past_key_values"
        model(tokens_of(1, 1), position_ids=torch.tensor([[26]]), **{name: out[name]})


def zigzag() -> torch.Tensor:
    slices = torch.arange(24).view(1, 4, 6)
    return slices[:, [rank_here(), 3 - rank_here()]].flatten(1)


def places_here() -> torch.Tensor:
    return positions(mesh_here(), 26)[None]


def on_rank_1(given: dict[str, Any]) -> dict[str, Any]:
    """For one of the two ranks alone."""
    return given if rank_here() else {}


def call_other_on_rank_1(**autocast: Any) -> None:
    """An attached model that on one rank trains, or is under autocast."""
    model = model_of("mistral").train(not autocast and rank_here() == 1)
    hf.attach(model, mesh_here())
    with torch.autocast("cpu", enabled=bool(autocast) and rank_here() == 1, **autocast):
        model(tokens_of(1, 13))


REFUSED: dict[str, Callable[..., None]] = {
    "NotImplementedError: MistralAttention needs a mask from the": lambda: call_in_context(
        "mistral", position_ids=places_here(), **on_rank_1({"attention_mask": torch.zeros(1, 1, 13, 13)})
    ),
    "ValueError: an attached model takes integer input_ids, or inputs_embeds, got both": lambda: call(
        **on_rank_1({"inputs_embeds": torch.ones(1, 13, 32)})
    ),
    "ValueError: an attached model takes integer input_ids, or inputs_embeds, got input_ids of": lambda: call(
        **on_rank_1({"input_ids": torch.ones(1, 13)})
    ),
    "ValueError: the ranks disagree on training or evaluation": call_other_on_rank_1,
    "ValueError: the ranks disagree on training or evaluation, whether": lambda: call_other_on_rank_1(
        dtype=torch.bfloat16
    ),
    "NotImplementedError: an attention_mask that hides tokens": lambda: call(attention_mask=padded_on_one_rank()),
    "NotImplementedError: an attention_mask that hides": lambda: call_in_context(
        "mistral", attention_mask=padded_on_one_rank(), position_ids=places_here()
    ),
    "NotImplementedError: an attention_mask that": lambda: call(attention_mask=torch.zeros(1, 1, 13, 13)),
    "NotImplementedError: MistralAttention needs a mask from": lambda: call_in_context(
        "mistral", attention_mask=torch.zeros(1, 1, 13, 13)
    ),
    "NotImplementedError: dropout of attention weights": lambda: call(changed={"attention_dropout": 0.1}, train=True),
    "NotImplementedError: output_attentions": lambda: call(output_attentions=True),
    "NotImplementedError: MistralAttention hands output_attentions": lambda: call_in_context(
        "mistral", position_ids=places_here(), output_attentions=True
    ),
    "NotImplementedError: MistralAttention hands head_mask": lambda: call(head_mask=torch.ones(4)),
    "NotImplementedError: a cache with earlier keys": cached,
    "NotImplementedError: ModernBertAttention does not hand": lambda: call_in_context("modernbert"),
    "ValueError: labels would be shifted inside": lambda: call(labels=tokens_of(1, 13)),
    "ValueError: an attached model needs": lambda: call(input_ids=None),
    "ValueError: the positions of every rank's shard count": lambda: call_in_context("mistral"),
    "ValueError: the positions of every rank": lambda: call(position_ids=torch.arange(13)[None]),
    "ValueError: position_ids must have the shape": lambda: call(position_ids=torch.arange(26)[None]),
    "ValueError: position_ids jump from 5 to 18": lambda: call(input_ids=tokens_of(1, 12), position_ids=zigzag()),
    "ValueError: cu_seq_lens_q must rise from 0 to the 26": lambda: call(cu_seq_lens_q=torch.tensor([0, 5, 13])),
    "ValueError: cu_seq_lens_q needs a batch of 1": lambda: call(
        input_ids=tokens_of(2, 13), cu_seq_lens_q=torch.tensor([0, 26, 52])
    ),
    "ValueError: cu_seq_lens_q [0, 5, 26] and position_ids": lambda: call(
        cu_seq_lens_q=torch.tensor([0, 5, 26]),
        position_ids=shard_sequence(mesh_here(), torch.tensor([restarting(6, 20)])),
    ),
    "ValueError: the ranks disagree on cu_seq_lens_q": lambda: call(
        cu_seq_lens_q=torch.tensor([0, 5 + rank_here(), 26])
    ),
    "ValueError: the ranks disagree on the keywords that forward does not name": lambda: call(
        head_mask=torch.ones(4) if rank_here() else None
    ),
    "ValueError: the ranks disagree on the keywords that forward does not name, which": lambda: call(
        is_causal=False if rank_here() else None
    ),
    "TypeError: got an unexpected keyword argument 'misspelt'": lambda: call_strict(
        **{"misspelt": 1} if rank_here() else {}
    ),
    "NotImplementedError: MistralAttention hands misspelt": lambda: call_in_context(
        "mistral", position_ids=places_here(), **{"misspelt": 1} if rank_here() else {}
    ),
    "ValueError: shards of [12, 13] tokens are not": lambda: call(input_ids=tokens_of(1, 12 + rank_here())),
    "ValueError: 1 tokens on 2 ranks leave": lambda: call(input_ids=tokens_of(1, 1 - rank_here())),
    "ValueError: an attached model needs this rank's shard, plain input_ids": lambda: call(input_ids=torch.ones(13)),
    "ValueError: cu_seq_lens_q must be a tensor of integers, got torch.float32": lambda: call(
        cu_seq_lens_q=torch.tensor([0, 5.5, 26])
    ),
    "ValueError: cu_seq_lens_q must be a tensor of integers, got list": lambda: call(
        cu_seq_lens_q=[0, 26] if rank_here() % 2 else torch.tensor([0, 26])
    ),
    "ValueError: cu_seq_lens_k [0, 5, 26] must be what cu_seq_lens_q is, None": lambda: call(
        cu_seq_lens_k=torch.tensor([0, 5, 26])
    ),
    "ValueError: cu_seq_lens_k [0, 5, 26] must be what cu_seq_lens_q is, [0, 6": lambda: call_in_context(
        "mistral",
        position_ids=places_here(),
        cu_seq_lens_q=torch.tensor([0, 6, 26]),
        cu_seq_lens_k=torch.tensor([0, 5, 26]),
    ),
    "ValueError: position_ids must have the shape [1 or 1, 13] of this rank's shard, got list": lambda: call(
        position_ids=[[0]]
    ),
    "NotImplementedError: start_positions and": lambda: call_of(
        "MistralForQuestionAnswering", "mistral", start_positions=torch.ones(1), end_positions=torch.ones(1)
    ),
    "NotImplementedError: MistralForSequenceClassification makes one answer": lambda: call_of(
        "MistralForSequenceClassification", "mistral"
    ),
    "NotImplementedError: Lfm2ForCausalLM mixes tokens in model.layers.0.conv.conv": lambda: call_of(
        "Lfm2ForCausalLM", transformers.Lfm2Config(**GROUPED, layer_types=["conv", "full_attention"])
    ),
    "ValueError: an attached model needs attn_implementation='ring', and MistralForCausalLM was set to ['sdpa']": (
        lambda: call_of_another_attention("set")
    ),
    "ValueError: an attached model needs attn_implementation='ring', and MistralForCausalLM was set to ['eager']": (
        lambda: call_of_another_attention("shared configuration")
    ),
    "ValueError: mesh must have one axis": lambda: hf.attach(model_of("mistral"), mesh_of((2, 2), ("dp", "cp"))),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_honoured_raises_on_every_rank(ranks: RankPool, case: str) -> None:
    # What one rank alone has found, its peers report.
    told = "ValueError: rank 1 of the context-parallel group refused its arguments"
    for rank, error in enumerate(ranks.run(refusal, case)):
        assert error.startswith(case if rank % 2 else (case, told)), error


def test_dropout_is_off_in_evaluation(ranks: RankPool) -> None:
    ranks.run(call, "mistral", {"attention_dropout": 0.1}, False)


def labelled() -> tuple[float, float]:
    """The model's own loss of labels that were shifted before sharding, summed over the ranks; and of the whole."""
    tokens = tokens_of(2, 26)
    shifted = next_token_labels(tokens)
    model = model_of("mistral")
    want = model(tokens, labels=tokens).loss
    hf.attach(model, mesh_here())
    mine, labels = shard_sequence(mesh_here(), tokens, shifted)
    labels = labels.contiguous()
    loss = model(mine, labels=labels, shift_labels=labels, num_items_in_batch=(shifted >= 0).sum()).loss.detach()
    dist.all_reduce(loss, group=mesh_here().get_group())
    return float(loss), float(want)


def test_loss_of_shifted_labels(ranks: RankPool) -> None:
    for loss, want in ranks.run(labelled):
        assert abs(loss - want) < 1e-5


def test_attach_refuses_models_that_count_by_themselves() -> None:
    config = transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=2)
    with pytest.raises(NotImplementedError, match="takes no position_ids"):
        hf.attach(transformers.BloomForCausalLM(config), None)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"sliding_window": 6}, "sliding_window=6 contradicts its mask"),
        ({"is_causal": False}, "is_causal=False contradicts"),
        ({"position_bias": torch.zeros(1)}, "hands position_bias to its attention"),
    ],
)
def test_a_layer_must_say_what_its_mask_shows(more: dict[str, Any], message: str) -> None:
    mask = RingMask(Window.tokens(5), None, None)
    q, k, v = torch.randn(3, 1, 2, 8, 4)
    out, weights = ring_attention_forward(torch.nn.Identity(), q, k, v, mask, sliding_window=5, is_causal=True)
    assert out.shape == (1, 8, 2, 4) and weights is None
    with pytest.raises((ValueError, NotImplementedError), match=message):
        ring_attention_forward(torch.nn.Identity(), q, k, v, mask, **more)


# Windows of masks

PLACES = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5, 6]])
# transformers 5.17 has no such function yet.
REMAPPED = [
    masking_utils.remap_positions_for_packed_sequence(masking_utils.sliding_window_causal_mask_function(3), PLACES)
] if hasattr(masking_utils, "remap_positions_for_packed_sequence") else []  # fmt: skip


@pytest.mark.parametrize(
    "function",
    [
        masking_utils.causal_mask_function,
        masking_utils.bidirectional_mask_function,
        *(make(n) for n in (1, 3) for make in (
            masking_utils.sliding_window_causal_mask_function,
            masking_utils.sliding_window_bidirectional_mask_function,
            masking_utils.sliding_window_overlay,
            masking_utils.sliding_window_bidirectional_overlay,
        )),
        masking_utils.and_masks(
            masking_utils.sliding_window_overlay(4), masking_utils.sliding_window_bidirectional_overlay(2)
        ),
        *REMAPPED,
    ],
)  # fmt: skip
def test_window_of_a_mask(function: Callable[..., Any]) -> None:
    window = read_window(function)
    left, right = window.reach(10)
    for q in range(3, 10):
        shown = [k for k in range(3, 10) if function(0, 0, torch.tensor(q), torch.tensor(k))]
        assert shown == [k for k in range(3, 10) if q - left <= k <= q + right], (q, window)


@pytest.mark.parametrize(
    "function",
    [
        masking_utils.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.long)),
        masking_utils.or_masks(masking_utils.causal_mask_function, masking_utils.bidirectional_mask_function),
        masking_utils.and_masks(masking_utils.causal_mask_function, lambda b, h, q, k: k % 2 == 0),
        masking_utils.or_masks(
            masking_utils.causal_mask_function, masking_utils.blockwise_overlay(torch.zeros(1, 4, dtype=torch.long))
        ),
        masking_utils.padding_mask_function(torch.ones(1, 4)),
    ],
)
def test_other_masks_are_refused(function: Callable[..., Any]) -> None:
    with pytest.raises(NotImplementedError, match="is no window"):
        read_window(function)


# The example

ROOT = Path(__file__).parents[1]
FLAGS = ["--steps=4", "--seq-len=130", "--batch=2", "--model=gemma3"]


def train(dp: int, cp: int) -> list[tuple[float, float]]:
    sys.path.insert(0, str(ROOT / "examples"))
    import hf_finetune  # pyright: ignore

    args = hf_finetune.arguments([*FLAGS, f"--dp={dp}", f"--cp={cp}"])
    return list(hf_finetune.train(args, torch.device("cpu")))


def test_example_gives_the_same_losses_on_every_mesh(ranks: RankPool) -> None:
    command = [sys.executable, str(ROOT / "examples" / "hf_finetune.py"), *FLAGS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    alone = [(float(line.split()[3]), float(line.split()[5])) for line in done.stdout.splitlines()]
    assert len(alone) == 4 and alone[-1][0] < alone[0][0] - 0.1
    for dp, cp in ((2, 2), (1, 4)):
        for losses in ranks.run(train, dp, cp):
            for (loss, norm), (loss_alone, norm_alone) in zip(losses, alone, strict=True):
                assert abs(loss - loss_alone) < 1e-5 and abs(norm / norm_alone - 1) < 1e-4
