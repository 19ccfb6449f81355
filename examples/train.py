"""Train a byte-level language model with FSDP2, context and tensor parallelism on a dp x cp x tp mesh.

    torchrun --standalone --nproc-per-node 4 examples/train.py --dp 2 --cp 2
    torchrun --standalone --nproc-per-node 8 examples/train.py --dp 2 --cp 2 --tp 2 --save checkpoint
    torchrun --standalone --nproc-per-node 4 examples/train.py --cp 4 --resume checkpoint
    torchrun --standalone --nproc-per-node 4 examples/train.py --dp 2 --cp 2 --pack --sinks --global-every 2

With a GPU for each process it uses NCCL and the GPU kernels, without any it uses gloo; the flags are
the same. Text, batches and first weights do not depend on the mesh, so neither does the loss.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from tqdm import tqdm

from dtensor_ring_swa import Documents, next_token_labels, positions, shard_sequence, token_mean
from dtensor_ring_swa.kernels import KERNELS

from checkpoint import resume, save
from data import Packed, batch_of, entropy, pack, packed_batch_of, read_text
from model import Decoder, ModelConfig
from parallelism import parallelize
from processes import joined

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
VOCABULARY = 256


def arguments(line: Sequence[str] | None = None, world: int | None = None) -> argparse.Namespace:
    """Read and check the command line, for this many processes; by default those of this run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dp", type=int, default=1, help="data-parallel ranks")
    parser.add_argument("--cp", type=int, default=1, help="context-parallel ranks: they share each sequence")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks: they share heads and features")
    parser.add_argument("--steps", type=int, default=60, help="steps of this run, also when it resumes")
    parser.add_argument("--batch", type=int, default=4, help="sequences a step, over all ranks")
    parser.add_argument("--seq-len", type=int, default=1024, help="tokens of a whole sequence")
    parser.add_argument("--window", type=int, default=128, help="tokens visible, the query's own included")
    parser.add_argument(
        "--global-every", type=int, default=0, help="every Nth layer sees all earlier tokens; 0, the default, is none"
    )
    parser.add_argument("--sinks", action="store_true", help="learn a sink logit for each query head of each layer")
    parser.add_argument(
        "--pack", action="store_true", help="pack files into the sequences as documents that do not see each other"
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="bfloat16 keeps float32 master weights")
    parser.add_argument("--kernel", choices=["auto", *KERNELS], default="auto")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--max-norm", type=float, default=1.0, help="clip the global gradient norm to this")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--text", help="a file or folder to train on instead of Python's standard library; with --pack this repository"
    )
    parser.add_argument("--metrics", help="write a JSON line a step here")
    parser.add_argument("--save", help="write a checkpoint into this folder at the end")
    parser.add_argument("--resume", help="go on from the checkpoint in this folder, whatever mesh wrote it")
    args = parser.parse_args(line)
    world = int(os.environ.get("WORLD_SIZE", "1")) if world is None else world
    ranks = args.dp * args.cp * args.tp
    sizes = ("dp", "cp", "tp", "steps", "batch", "window", "layers", "dim", "heads", "kv_heads")
    for size in sizes:
        if getattr(args, size) < 1:
            parser.error(f"--{size.replace('_', '-')} must be at least 1, got {getattr(args, size)}")
    for wrong, what in (
        (ranks != world, f"--dp {args.dp} x --cp {args.cp} x --tp {args.tp} needs {ranks} processes, not {world}"),
        (args.batch % args.dp, f"--batch {args.batch} does not divide by --dp {args.dp}"),
        (args.global_every < 0, f"--global-every must be 0 or more, got {args.global_every}"),
        (args.dim % (2 * args.heads), f"--dim {args.dim} does not divide into --heads {args.heads} of an even size"),
        (args.heads % args.kv_heads, f"--heads {args.heads} is no multiple of --kv-heads {args.kv_heads}"),
        (args.kv_heads % args.tp, f"--kv-heads {args.kv_heads} does not divide by --tp {args.tp}"),
        (VOCABULARY % args.tp, f"the {VOCABULARY} bytes do not divide by --tp {args.tp}"),
        (
            args.tp > 1 and args.seq_len % (args.cp * args.tp),
            f"--seq-len {args.seq_len} does not divide by --cp {args.cp} x --tp {args.tp}",
        ),
        (args.seq_len < 2, f"--seq-len must be at least 2, a token and the next, got {args.seq_len}"),
        (args.text and not Path(args.text).exists(), f"--text {args.text} does not exist"),
        (args.resume and not Path(args.resume).is_dir(), f"--resume {args.resume} is no folder"),
    ):
        if wrong:
            parser.error(what)
    return args


def build(args: argparse.Namespace, device: torch.device, mesh: DeviceMesh) -> Decoder:
    """The same model on every mesh of the axes dp_shard, cp and tp."""
    torch.manual_seed(args.seed)
    config = ModelConfig(
        VOCABULARY, args.layers, args.dim, args.heads, args.kv_heads, args.window, args.global_every, args.kernel,
        args.sinks,
    )  # fmt: skip
    dtype = DTYPES[args.dtype]
    # Draw the weights on CPU in float32, so that they do not depend on device or dtype.
    model = Decoder(config).to(device, torch.float64 if dtype == torch.float64 else torch.float32)
    return parallelize(model, mesh, dtype, args.seq_len)


def read(args: argparse.Namespace) -> torch.Tensor | Packed:
    """The text, long enough for a sequence; with ``--pack`` with the ends of its documents."""
    text = pack(args.text, args.seed) if args.pack else read_text(args.text)
    if isinstance(text, Packed):
        packed_batch_of(text, 1, args.seq_len, 0)
    else:
        batch_of(text, 1, args.seq_len, 0, 0)
    return text


def loss_of(
    args: argparse.Namespace, model: Decoder, mesh: DeviceMesh, text: torch.Tensor | Packed, step: int
) -> torch.Tensor:
    """The mean loss over all tokens of a step's batch, on every rank. Collective."""
    mine = slice(*(args.batch // args.dp * (mesh.get_local_rank("dp_shard") + end) for end in (0, 1)))
    documents = None
    if isinstance(text, Packed):
        whole, boundaries = packed_batch_of(text, args.batch, args.seq_len, step)
        documents = Documents(boundaries[mine], mesh["cp"])  # once a step, for all layers
    else:
        whole = batch_of(text, args.batch, args.seq_len, args.seed, step)
    whole = whole[mine].to(mesh.device_type)
    # Shift before sharding: a shard does not hold the label of its last token.
    tokens, labels = shard_sequence(mesh["cp"], whole, next_token_labels(whole, documents))
    position = positions(mesh["cp"], args.seq_len, device=whole.device)
    logits = model(tokens, position, documents=documents).flatten(0, 1)
    exact = torch.promote_types(logits.dtype, torch.float32)
    summed = F.cross_entropy(logits.to(exact), labels.flatten(), reduction="sum")
    return token_mean(summed, (labels >= 0).sum(), mesh["dp_shard", "cp"])


def train(args: argparse.Namespace, text: torch.Tensor | Packed, device: torch.device) -> Iterator[dict[str, float]]:
    """Train, and yield the metrics of each step."""
    mesh = init_device_mesh(device.type, (args.dp, args.cp, args.tp), mesh_dim_names=("dp_shard", "cp", "tp"))
    model = build(args, device, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    first = resume(args.resume, model, optimizer) if args.resume else 0
    for step in range(first, first + args.steps):
        began = time.perf_counter()
        loss = loss_of(args, model, mesh, text, step)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        metrics = {"loss": loss.item(), "grad_norm": norm.item()}
        seconds = time.perf_counter() - began
        yield {"step": step, **metrics, "tokens_per_s": args.batch * args.seq_len / seconds}
    if args.save:
        save(args.save, model, optimizer, first + args.steps)


def report(args: argparse.Namespace, text: torch.Tensor | Packed, device: torch.device) -> None:
    """Train; rank 0 shows the progress and writes the metrics."""
    rank = dist.get_rank()
    out = open(args.metrics, "w") if args.metrics and rank == 0 else None  # noqa: SIM115
    loss = float("nan")
    mesh = f"dp {args.dp} x cp {args.cp}" + (f" x tp {args.tp}" if args.tp > 1 else "")
    with tqdm(total=args.steps, unit="step", disable=rank != 0, desc=mesh) as bar:
        for metrics in train(args, text, device):
            loss = metrics["loss"]
            if out:  # a line at a time: a run that is stopped keeps its steps
                print(json.dumps(metrics), file=out, flush=True)
            bar.set_postfix(loss=f"{loss:.4f}", tokens_per_s=f"{metrics['tokens_per_s']:.0f}")
            bar.update()
    if rank == 0:
        its = text.text if isinstance(text, Packed) else text
        print(f"loss {loss:.4f} nats a byte after {args.steps} steps; the bytes' own entropy is {entropy(its):.4f}")


def main() -> None:
    """Read what is needed, join the other processes and train."""
    args = arguments()
    try:
        text = read(args)
        if args.metrics:
            Path(args.metrics).parent.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as problem:
        print(f"train.py: error: {problem}", file=sys.stderr)
        sys.exit(2)
    with joined() as device:
        report(args, text, device)


if __name__ == "__main__":
    main()
