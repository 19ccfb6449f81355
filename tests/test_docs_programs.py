"""Every Python block and diff of the documentation runs, and does what the text around it says."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.checkpoint import checkpoint

import dtensor_ring_swa
from dtensor_ring_swa import Window, gather_sequence, next_token_labels, ring_attention, shard_sequence
from dtensor_ring_swa.integrations.sdpa import ring_sdpa
from dtensor_ring_swa.integrations.torchtitan import InnerAttention
from dtensor_ring_swa.testing import RankPool

from cases import mesh_of
from model import Decoder, ModelConfig
from pages import blocks

Pools = Callable[[int], RankPool]
Names = dict[str, Any]
PUBLIC: Names = {name: getattr(dtensor_ring_swa, name) for name in dtensor_ring_swa.__all__}


def run(code: str, names: Names) -> str:
    """Execute it with these names, to which it adds its own; return what it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, "a block of the documentation", "exec"), names)
    return printed.getvalue()


def same(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


# Each of these runs one block on a rank, with the names that the text takes for granted, and asserts what it says.


def first_program(code: str) -> None:
    placements, difference = run(code, {}).rsplit(maxsplit=1)
    assert placements == "(Shard(dim=1),)" and float(difference) < 1e-14


def plan_program(code: str) -> None:
    assert float(run(code, {})) < 1e-15


def training_step(code: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "cp"))
    torch.manual_seed(0)
    model = Decoder(ModelConfig(vocabulary=16, layers=2, dim=16, heads=2, kv_heads=1, window=5)).double()
    one, batch = copy.deepcopy(model), torch.randint(16, (2, 13))
    tokens = batch[mesh.get_local_rank("dp_shard")][None]
    given = {"F": F, "fully_shard": fully_shard, "mesh": mesh, "model": model, "tokens": tokens, "seq_len": 13}
    names: Names = {**PUBLIC, **given}
    run(code, names)
    expect_one_step(one, one(batch, torch.arange(13)), batch, model, names["loss"])


def expect_one_step(one: nn.Module, logits: torch.Tensor, batch: torch.Tensor, model: nn.Module, loss: Any) -> None:
    """The loss and all gradients are those of one process."""
    mean = F.cross_entropy(logits.flatten(0, 1), next_token_labels(batch).flatten())
    mean.backward()
    same(loss.detach(), mean.detach())
    for theirs, ours in zip(one.parameters(), model.parameters(), strict=True):
        assert isinstance(ours.grad, DTensor) and theirs.grad is not None
        same(ours.grad.full_tensor(), theirs.grad)


def on_shards(code: str) -> None:
    """Attention of q, k and v. They come whole, but in the block about documents, where each rank has its shard."""
    mesh = mesh_of((2,), ("cp",))
    whole = torch.randn(3, 1, 24, 2, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64).unbind()
    documents = torch.tensor([0, 5, 17, 24]) if "cu_seqlens" in code else None
    q, k, v = whole if documents is None else shard_sequence(mesh, *whole)
    tokens = torch.arange(24)[None]
    given = {"mesh": {"cp": mesh}, "q": q, "k": k, "v": v, "seq_len": 24, "tokens": tokens, "cu_seqlens": documents}
    names: Names = {**PUBLIC, **given}
    run(code, names)
    layout = "zigzag" if "zigzag" in code else "contiguous"
    want = ring_attention(*whole, cu_seqlens=documents, window=(127, 0))  # as wide as those of the blocks, here
    same(gather_sequence(mesh, names["out"], layout=layout), want)
    if layout == "zigzag":
        same(names["whole"], want)
        assert names["position"].tolist() == [[*range(6), *range(18, 24)], [*range(6, 18)]][dist.get_rank()]
    if documents is not None:
        assert (names["labels"][0] == -100).nonzero().flatten().tolist() == [4, 16, 23]


def bytes_of_a_layer(code: str) -> None:
    printed = run(code, {})
    assert "halo: 4095 rows from rank 2" in printed and "takes the halo" in printed and "16773120" in printed


class Small(nn.Module):
    """A model whose attention is a method that a block defines, ``forward_of``."""

    forward_of: Callable[..., torch.Tensor]
    cp, seq_len = None, 12

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.qkv, self.out = nn.Embedding(16, 8), nn.Linear(8, 24), nn.Linear(8, 16)

    def project(self, x: torch.Tensor, position: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (self.qkv(x) + position[:, None].sin()).unflatten(-1, (3, 2, 4)).unbind(2)

    def forward(self, tokens: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        return self.forward_of(self.embedding(tokens), position)


def plain_torch(code: str) -> None:
    torch.manual_seed(0)
    names: Names = {"nn": nn, "F": F, "init_device_mesh": init_device_mesh, "dp": 2, "cp": 2, "seq_len": 12}
    model, batch = Small().double(), torch.randint(16, (2, 12))
    one = copy.deepcopy(model)
    definition, step = code.split("# the training step")
    names["model"] = model
    run(definition, names)
    Small.forward_of, model.cp = names["Attention"].forward, names["mesh"]["cp"]
    names["tokens"] = batch[names["mesh"].get_local_rank("dp")][None]
    run(step, names)
    expect_one_step(one, one(batch, torch.arange(12)), batch, model, names["loss"])


class Layer(nn.Module):
    """A layer around an attention."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x)


class Layers(nn.Module):
    """A model of two layers."""

    def __init__(self, attention: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(attention()) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def plans(code: str) -> None:
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
    styles = {"ColwiseParallel": ColwiseParallel, "RowwiseParallel": RowwiseParallel, "fully_shard": fully_shard}
    names: Names = {**PUBLIC, **styles, "nn": nn, "data": mesh["dp", "cp"]._flatten(), "mesh": mesh}
    definition, change = code.split("plan = {")
    run(definition, names)
    torch.manual_seed(0)
    names["model"] = model = Layers(names["Attention"])
    one, x = copy.deepcopy(model), torch.randn(1, 9, 256)
    run("plan = {" + change, names)
    same(model(shard_sequence(mesh["cp"], x)), shard_sequence(mesh["cp"], one(x)))


def sdpa(code: str) -> None:
    mesh = mesh_of((2,), ("cp",))
    names: Names = {"nn": nn, "F": F}
    run(code, names)
    torch.manual_seed(0)
    layer, x = names["Attention"](), torch.randn(1, 10, 16)
    layer.q, layer.k, layer.v, layer.out = (nn.Linear(*sizes) for sizes in ((16, 128), (16, 64), (16, 64), (128, 16)))
    whole = layer(x)
    distribute_module(layer, mesh)
    out = layer(distribute_tensor(x, mesh, [Shard(1)]))
    assert out.placements == (Shard(1),)
    same(out.full_tensor(), whole)


class Recomputed(nn.Module):
    def forward(self, q: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, q, q, is_causal=True)


class Entering(Recomputed):
    def forward(self, q: torch.Tensor) -> torch.Tensor:
        with ring_sdpa():
            return super().forward(q)


def checkpoints(code: str) -> None:
    mesh = mesh_of((2,), ("cp",))
    q = torch.randn(1, 2, 8, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    whole = q.clone().requires_grad_()
    Recomputed()(whole).sum().backward()
    for line, layer in zip(code.splitlines(), (Entering(), Recomputed()), strict=True):
        x = distribute_tensor(q, mesh, [Shard(2)]).requires_grad_()
        with contextlib.nullcontext() if isinstance(layer, Entering) else ring_sdpa():
            names: Names = {"checkpoint": checkpoint, "ring_sdpa": ring_sdpa, "layer": layer, "x": x}
            run(line, names)
        names["out"].sum().backward()
        assert isinstance(x.grad, DTensor) and whole.grad is not None
        same(x.grad.redistribute(placements=[Replicate()]).to_local(), whole.grad)


def hugging_face(code: str) -> None:
    """Two blocks: the one about the model's own loss goes on where the other ended."""
    from transformers import MistralConfig

    (own_loss,) = (block.program for block in blocks("python") if "num_items_in_batch" in block.code)
    sizes: Names = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2,
             "num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": 5}  # fmt: skip
    batch = torch.randint(16, (2, 12), generator=torch.Generator().manual_seed(0))
    names: Names = {"F": F, "dp": 2, "cp": 2, "config": MistralConfig(**sizes), "batch": batch}
    torch.manual_seed(0)
    run(code.replace("whole = ...", 'whole = batch[mesh.get_local_rank("dp")][None]'), names)
    torch.manual_seed(0)
    one = names["AutoModelForCausalLM"].from_config(MistralConfig(**sizes), attn_implementation="eager")
    mean = one(batch, labels=batch).loss.detach()
    same(names["loss"].detach(), mean)
    names["count_on_all_ranks"] = batch.numel() - len(batch)
    run(own_loss, names)
    total = names["loss"].detach()
    dist.all_reduce(total)
    same(total, mean)


class Titan(nn.Module):
    """Calls its layers' inner attention as torchtitan's decoders do."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.qkv = nn.Embedding(16, 8), nn.Linear(8, 24)
        attention = nn.Module()
        attention.inner_attention = nn.Identity()
        self.layers = nn.ModuleDict({"0": Layer(attention)})

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        q, k, v = (self.qkv(self.embedding(tokens)) + positions[..., None].sin()).unflatten(-1, (3, 2, 4)).unbind(2)
        return self.layers["0"].attention.inner_attention(q, k, v, scale=None, enable_gqa=False)  # pyright: ignore


def torchtitan(code: str) -> None:
    torch.manual_seed(0)
    model, tokens, mesh = Titan(), torch.randint(16, (1, 10)), mesh_of((2,), ("cp",))
    one = copy.deepcopy(model)
    one.layers["0"].attention.inner_attention = InnerAttention(Window.tokens(4096))  # pyright: ignore
    names: Names = {"model": model, "mesh": {"cp": mesh}, "tokens": tokens, "seq_len": 10}
    run(code, names)
    same(names["logits"], shard_sequence(mesh, one(tokens, torch.arange(10)[None])))


def imports(code: str) -> None:
    known: Names = {}
    run(code, {"ALL_ATTENTION_FUNCTIONS": known})
    assert list(known) == ["ring"]


def internals_example(code: str) -> None:
    (said,) = (b.code for b in blocks("") if b.page == "docs/internals.md" and b.code.startswith("rank 0 of 3"))
    assert run(code, dict(PUBLIC)) == said


def contributed_test(code: str) -> None:
    names: Names = {**PUBLIC, "mesh_of": mesh_of}
    run(code, names)
    assert f"== {[2 * rank for rank in range(4)]}" in code
    assert names["first_position"](8) == 2 * dist.get_rank()


# What a block is known by, on how many ranks it runs, and how.
PROGRAMS: dict[tuple[str, str], tuple[int, Callable[[str], None]]] = {
    ("README.md", "print(out.placements"): (2, first_program),
    ("README.md", "loss = token_mean"): (4, training_step),
    ("README.md", "# or a ProcessGroup"): (2, on_shards),
    ("docs/guide.md", "ColwiseParallel()"): (4, plan_program),
    ("docs/guide.md", 'layout="zigzag"'): (2, on_shards),
    ("docs/guide.md", "documents = Documents"): (2, on_shards),
    ("docs/guide.md", "plan.describe()"): (2, bytes_of_a_layer),
    ("docs/integrations.md", "# the training step"): (4, plain_torch),
    ("docs/integrations.md", "ColwiseParallel()"): (4, plans),
    ("docs/integrations.md", "with ring_sdpa(window="): (2, sdpa),
    ("docs/integrations.md", "checkpoint(layer"): (2, checkpoints),
    ("docs/integrations.md", "AutoModelForCausalLM"): (4, hugging_face),
    ("docs/integrations.md", "InnerAttention(Window"): (2, torchtitan),
    ("docs/migrating.md", "ring_swa"): (2, imports),
    ("docs/internals.md", "make_plan(12"): (2, internals_example),
    ("CONTRIBUTING.md", "def first_position"): (4, contributed_test),
}
# Runs with the one before.
CONTINUED = ("docs/integrations.md", "num_items_in_batch")


def test_every_block_is_run() -> None:
    found = blocks("python", "diff")
    for block in found:
        known = [text for page, text in (*PROGRAMS, CONTINUED) if page == block.page and text in block.code]
        assert len(known) == 1, f"{block.page}: {known} run this:\n{block.code}"
    assert len(found) == len(PROGRAMS) + 1


@pytest.mark.parametrize("page, text", PROGRAMS)
def test_a_block_does_what_the_page_says(pools: Pools, page: str, text: str) -> None:
    (code,) = (block.program for block in blocks("python", "diff") if block.page == page and text in block.code)
    ranks, check = PROGRAMS[page, text]
    pools(ranks).run(check, code)
