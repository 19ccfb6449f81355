"""How train.py shards the model: the tensor-parallel and context-parallel plan, then FSDP2."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

from dtensor_ring_swa import ContextParallel, apply_context_parallel

from model import Decoder


class HeadParallel(ParallelStyle):
    """Split a module's parameters over the heads, dim 0; its forward then returns those of this rank's heads."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def split(_: str, part: nn.Module, mesh: DeviceMesh) -> None:
            for name, whole in part.named_parameters(recurse=False):
                part.register_parameter(name, nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)])))

        def local(_: nn.Module, heads: DTensor, __: DeviceMesh) -> torch.Tensor:
            return heads.to_local()

        return distribute_module(module, device_mesh, split, output_fn=local)  # pyright: ignore


def tensor_parallel_plan(sinks: bool = False) -> dict[str, ParallelStyle]:
    """Heads and hidden features over the ranks of ``tp``; between the layers each holds a part of its tokens."""
    # As DTensors the sinks have the mesh of all other parameters, which clipping of the gradients needs.
    heads: dict[str, ParallelStyle] = {"layers.*.attention.sinks": HeadParallel()} if sinks else {}
    return heads | {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "layers.*.attention_norm": SequenceParallel(),
        "layers.*.attention": PrepareModuleInput(
            input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
        ),
        "layers.*.attention.[qkv]": ColwiseParallel(),
        "layers.*.attention.out": RowwiseParallel(output_layouts=Shard(1)),
        "layers.*.feed_forward_norm": SequenceParallel(),
        "layers.*.feed_forward": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "layers.*.feed_forward.gate": ColwiseParallel(),
        "layers.*.feed_forward.up": ColwiseParallel(),
        "layers.*.feed_forward.down": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }


def parallelize(model: Decoder, mesh: DeviceMesh, dtype: torch.dtype, seq_len: int) -> Decoder:
    """Shard a model that is the same on every rank.

    Args:
        model: On its device, with the weights that it is to start from.
        mesh: Axes ``dp_shard``, ``cp`` and ``tp``.
        dtype: What to compute in; bfloat16 keeps the master weights as they are.
        seq_len: Tokens of a whole sequence.
    """
    plan: dict[str, ParallelStyle] = {"layers.*.attention.core": ContextParallel(seq_len=seq_len)}
    if mesh["tp"].size() > 1:
        plan |= tensor_parallel_plan(model.has_sinks)
    apply_context_parallel(model, mesh["cp", "tp"], plan)
    # FSDP shards over both: the ranks of one sequence hold different tokens, like those of one batch.
    everyone = mesh["dp_shard", "cp"]._flatten("dp_shard_cp")
    policy = MixedPrecisionPolicy()
    if dtype == torch.bfloat16:
        # Inputs are not cast: a layer's rotary angles reach the sequence length, where bfloat16 counts in fours.
        policy = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
    for layer in model.layers:
        fully_shard(layer, mesh=everyone, mp_policy=policy)
    fully_shard(model, mesh=everyone, mp_policy=policy)
    return model
