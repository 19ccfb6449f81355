"""What others ship for the same job: PyTorch's context parallel, and the ``ring_swa`` package."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from dtensor_ring_swa.bench.case import Case
from dtensor_ring_swa.bench.inputs import Inputs
from dtensor_ring_swa.bench.methods import Differentiated, Given, Gradients
from dtensor_ring_swa.window import UNLIMITED


class TorchContextParallel(Differentiated):
    """PyTorch's context parallel with flex_attention: all-gather of K and V, block mask, fused kernel.

    ``_ContextParallel`` is torch's own style for it; private, in this place in torch 2.11 and 2.13.
    The rows stay contiguous (no load balancer): for a window the work is balanced as it is. Inputs
    are in its native layout ``[B, H, S, D]``, so that no transpose is timed. Its collectives are
    torch's functional ones, which wire.py does not see.
    """

    name = "torch-cp"
    counted = False

    @classmethod
    def gap(cls, case: Case) -> str | None:
        """Whether torch has it."""
        try:
            _context_parallel_style()
        except (ImportError, AttributeError) as problem:
            return f"this torch has no such context parallel: {problem}"
        return None

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        cuda = self._cuda = case.request.device.type == "cuda"
        if cuda:
            # Else the graphs of the shapes before count towards the limit of recompilations.
            torch.compiler.reset()
        self.backward_gap = None if cuda else "flex_attention has no backward on CPU"
        style = _context_parallel_style()
        module = _Flex(case, torch.compile(flex_attention, dynamic=False) if cuda else flex_attention)
        plan = style(seq_dim=2, attention_type=style.AttentionType.FLEX)
        self._module = parallelize_module(module, case.environment.mesh, plan)

    def prepare(self, inputs: Inputs) -> Given:
        """Heads first; gradients only where there is a backward."""
        given = Given(*(inputs.own(name).transpose(1, 2).contiguous() for name in Given._fields))
        return given if self.backward_gap else self.leaves(given)

    def call(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """See ``Differentiated``."""
        with self._settings():
            return self._module(q, k, v)

    @contextmanager
    def _settings(self) -> Iterator[None]:
        if self._cuda:
            # A compiled graph otherwise gives its saved buffers away in its first backward, and refuses a second.
            with importlib.import_module("torch._functorch.config").patch(donated_buffer=False):
                yield
        else:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="flex_attention called without")
                yield

    def output(self, state: torch.Tensor) -> torch.Tensor:
        """Heads back in place."""
        return state.detach().transpose(1, 2)

    def gradients(self, grads: Gradients) -> Gradients:
        """Heads back in place."""
        dq, dk, dv = (grad.transpose(1, 2) for grad in grads)
        return dq, dk, dv

    def predicted_bytes(self) -> tuple[int, int]:
        """Every other rank's rows, either way."""
        case = self.case
        received = (case.environment.ranks - 1) * case.rows * case.row_numel * case.request.dtype.itemsize
        return received, received


class _Flex(nn.Module):
    """flex_attention of this rank's rows over the whole sequence's keys."""

    def __init__(self, case: Case, attend: Any) -> None:
        super().__init__()
        cuda = case.request.device.type == "cuda"
        start, (left, right), softcap = case.plan.start, case.reach, case.shape.softcap

        def visible(batch: Any, head: Any, row: Any, key: Any) -> Any:
            return (row + start - key <= left) & (key - row - start <= right)

        def capped(score: Any, batch: Any, head: Any, row: Any, key: Any) -> Any:
            return softcap * torch.tanh(score / softcap)

        # Uncompiled, the mask is first made whole: rows x sequence.
        make_mask: Any = torch.compile(create_block_mask, dynamic=False) if cuda else create_block_mask
        self._attend = attend
        self._options = {
            "block_mask": make_mask(visible, None, None, case.rows, case.seq_len, device=case.request.device),
            "score_mod": capped if softcap else None,
            "scale": case.request.scale,
            "enable_gqa": case.shape.q_heads != case.shape.kv_heads,
        }

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return self._attend(query, key, value, **self._options)


class RingSwaPackage(Differentiated):
    """``ring_swa.ring_sliding_window_attn``: the whole-chunk ring on FlashAttention-2, if installed.

    It calls isend and irecv one by one, which wire.py does not see.
    """

    name = "ring_swa"
    counted = False

    @classmethod
    def gap(cls, case: Case) -> str | None:
        """Whether it is installed, and whether it knows such a window."""
        window, shape = case.shape.window, case.shape
        if window.right != 0 or window.left == UNLIMITED:
            return f"it has causal windows (left, 0) only, not ({window.left}, {window.right})"
        if shape.softcap or shape.head_dim != shape.v_head_dim:
            return "it has no softcap, and only v as wide as q"
        if case.request.device.type != "cuda" or case.request.dtype not in (torch.bfloat16, torch.float16):
            return f"it takes bfloat16 and float16 on CUDA, not {case.request.dtype} on {case.request.device.type}"
        try:
            importlib.import_module("ring_swa")
        except Exception as problem:  # Whatever its own imports raise is why it cannot run.
            return f"import ring_swa: {problem}"
        return None

    def call(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """See ``Differentiated``. Its window, as ours, does not count the query's own token."""
        environment = self.case.environment
        return importlib.import_module("ring_swa").ring_sliding_window_attn(
            q, k, v, window_size=self.case.shape.window.left, cp_group=environment.group,
            cp_size=environment.ranks, cp_local_rank=environment.rank,
            cp_prev_global_rank=(environment.rank - 1) % environment.ranks,
            cp_next_global_rank=(environment.rank + 1) % environment.ranks,
        )  # fmt: skip

    def predicted_bytes(self) -> tuple[int, int]:
        """A chunk a hop; backward also its gradients, in float32."""
        case = self.case
        hops = min(-(-case.shape.window.left // case.rows), case.environment.ranks - 1)
        numel = hops * case.rows * case.row_numel
        itemsize = case.request.dtype.itemsize
        return numel * itemsize, numel * (itemsize + 4)


def _context_parallel_style() -> Any:
    return importlib.import_module("torch.distributed.tensor.experimental._attention")._ContextParallel
