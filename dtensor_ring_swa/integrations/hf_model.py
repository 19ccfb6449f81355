"""What a model of transformers does besides attention that one rank's shard would change."""

from __future__ import annotations

from torch import nn

# Heads that make one answer of a whole sequence: from its last token, its first, or a mean.
_POOLING = ("ForSequenceClassification", "ForMultipleChoice", "ForNextSentencePrediction")


def refuse_mixing(model: nn.Module) -> None:
    """Raise NotImplementedError for a model in which tokens meet elsewhere than in attention, as far as can be told.

    A convolution stands for state spaces and linear attention as well: their layers have one.
    """
    name = type(model).__name__
    if any(word in base.__name__ for base in type(model).__mro__ for word in _POOLING):
        raise NotImplementedError(
            f"{name} makes one answer of all tokens, and would make one of each shard; attach its base model, and "
            "pool gather_sequence(mesh, hidden_states)"
        )
    mixing = [path for path, module in model.named_modules() if isinstance(module, nn.Conv1d)]
    if mixing:
        raise NotImplementedError(
            f"{name} mixes tokens in {mixing[0]}, which would see this rank's shard alone; only models whose tokens "
            "meet in attention alone can be attached on several ranks"
        )


def first_position(model: nn.Module) -> int:
    """The position of a sequence's first token: RoBERTa and its kind count from the one after the padding's."""
    for path, module in model.named_modules():
        if path.endswith("position_embeddings") and isinstance(module, nn.Embedding) and module.padding_idx is not None:
            return module.padding_idx + 1
    return 0
