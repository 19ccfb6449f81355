"""Train a Hugging Face model with FSDP2 and context parallelism on a dp x cp mesh.

    torchrun --standalone --nproc-per-node 4 examples/hf_finetune.py --dp 2 --cp 2

The model is a small random one made from a configuration class, so nothing is downloaded; with
``from_pretrained(..., attn_implementation="ring")`` the rest stays the same. Losses do not depend on
the mesh. It runs on NVIDIA GPUs with NCCL, and without any on gloo.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Gemma3TextConfig, MistralConfig, PreTrainedConfig, PreTrainedModel

from dtensor_ring_swa import next_token_labels, shard_sequence, token_mean
from dtensor_ring_swa.integrations.hf import attach, register

from data import batch_of, read_text
from processes import joined

SIZES: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 3, "sliding_window": 48,
}  # fmt: skip
CONFIGS: dict[str, type[PreTrainedConfig]] = {"gemma3": Gemma3TextConfig, "mistral": MistralConfig}


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=CONFIGS, default="gemma3")
    parser.add_argument("--dp", type=int, default=1, help="data-parallel ranks")
    parser.add_argument("--cp", type=int, default=1, help="context-parallel ranks: they share each sequence")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=4, help="sequences a step, over all ranks")
    parser.add_argument("--seq-len", type=int, default=256, help="tokens of a whole sequence")
    parser.add_argument("--text", help="a file or folder to train on instead of Python's standard library")
    args = parser.parse_args(argv)
    if args.batch % args.dp:
        parser.error(f"--batch {args.batch} does not divide by --dp {args.dp}")
    return args


def build(name: str) -> PreTrainedModel:
    """The same small model on every rank; every third layer of gemma3 sees all earlier tokens."""
    register()
    more: dict[str, Any] = {"sliding_window_pattern": 3, "query_pre_attn_scalar": 16} if name == "gemma3" else {}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[name](**SIZES, **more), attn_implementation="ring")


def train(args: argparse.Namespace, device: torch.device) -> Iterator[tuple[float, float]]:
    """Train, and yield the loss and the gradient norm of each step."""
    text = read_text(args.text)
    mesh = init_device_mesh(device.type, (args.dp, args.cp), mesh_dim_names=("dp", "cp"))
    # FSDP shards over all ranks: those of one sequence hold different tokens, like those of one batch.
    everyone = init_device_mesh(device.type, (args.dp * args.cp,), mesh_dim_names=("dp_cp",))
    model = build(args.model)
    nn.Module.to(model, device)
    attach(model, mesh["cp"])
    for layer in model.get_submodule("model.layers").children():
        fully_shard(layer, mesh=everyone)
    fully_shard(model, mesh=everyone)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    mine = slice(*(args.batch // args.dp * (mesh.get_local_rank("dp") + end) for end in (0, 1)))
    for step in range(args.steps):
        whole = batch_of(text, args.batch, args.seq_len, 0, step)[mine].to(device)
        # Shift before sharding: a shard does not hold the label of its last token.
        tokens, labels = shard_sequence(mesh["cp"], whole, next_token_labels(whole))
        logits = model(tokens, use_cache=False).logits.flatten(0, 1)
        summed = F.cross_entropy(logits.float(), labels.flatten(), reduction="sum")
        loss = token_mean(summed, (labels >= 0).sum(), everyone)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item(), (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()


def main() -> None:
    """Train; rank 0 prints the losses."""
    args = arguments()
    with joined() as device:
        for step, (loss, norm) in enumerate(train(args, device)):
            if dist.get_rank() == 0:
                print(f"step {step} loss {loss:.7f} grad_norm {norm:.7f}", flush=True)


if __name__ == "__main__":
    main()
