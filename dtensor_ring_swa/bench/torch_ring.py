"""PyTorch's own ring: context parallelism of ``scaled_dot_product_attention``, for windows without limit.

All of it is private and experimental, seen alike in torch 2.11 and 2.13: ``_context_parallel_shard``
deals the sequence out, by ``_HeadTailLoadBalancer`` for causal attention; the style
``_ContextParallel`` makes DTensors of a module's inputs; ``_enable_context_parallel_dispatcher`` sends
DTensor's SDPA operators through ``_templated_ring_attention``, whose keys ``set_rotate_method`` moves by
all-gather or all-to-all. Inputs are in its native layout ``[B, H, S, D]``, so that no transpose is
timed. Its collectives are torch's functional ones, which wire.py does not see.
"""

from __future__ import annotations

import importlib
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention import SDPBackend, sdpa_kernel

from dtensor_ring_swa.bench.case import Case
from dtensor_ring_swa.bench.extras import Extras
from dtensor_ring_swa.bench.inputs import Inputs
from dtensor_ring_swa.bench.methods import Differentiated, Given, Gradients
from dtensor_ring_swa.bench.shapes import Shape
from dtensor_ring_swa.window import Window

_NEEDED = (
    "_ContextParallel", "_HeadTailLoadBalancer", "_context_parallel_shard", "_cp_options",
    "_enable_context_parallel_dispatcher", "set_rotate_method",
)  # fmt: skip


class TorchRing(Differentiated):
    """One kernel and one way to move the keys; the four subclasses name them.

    Forward and backward read two settings of torch's module, which are set before each.
    """

    counted = False
    backend: ClassVar[SDPBackend]
    rotate: ClassVar[str]

    @classmethod
    def suits(cls, shape: Shape, extras: Extras) -> bool:
        """SDPA has no window."""
        return shape.window in (Window.causal(), Window.full())

    @classmethod
    def gap(cls, case: Case) -> str | None:
        """Whether torch has it, and whether it can do this case."""
        try:
            api = _api()
        except ImportError as problem:
            return f"torch {torch.__version__} has no such context parallel: {problem}"
        missing = [name for name in _NEEDED if not hasattr(api, name)]
        if missing:
            return f"torch {torch.__version__} has no {', '.join(missing)} in {api.__name__}"
        cuda, causal = case.request.device.type == "cuda", case.shape.window == Window.causal()
        if not cuda and cls.backend is SDPBackend.CUDNN_ATTENTION:
            return "cuDNN's attention needs CUDA"
        if cuda and case.request.dtype not in (torch.bfloat16, torch.float16):
            return f"this kernel takes bfloat16 and float16, not {case.request.dtype}"
        if case.request.dtype is torch.float64:
            return "it adds in float32, whatever the inputs"
        if case.shape.softcap or case.shape.head_dim != case.shape.v_head_dim:
            return "it has no softcap, and only v as wide as q"
        if causal and case.seq_len % (2 * case.environment.ranks):
            return f"its load balancer deals multiples of {2 * case.environment.ranks} tokens, not {case.seq_len}"
        return None

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self._causal = case.shape.window == Window.causal()
        self.layout = "zigzag" if self._causal else "contiguous"
        self._api = _api()
        if case.request.device.type == "cuda":
            # For the rest of the process: DTensors elsewhere in the benchmark do not enter SDPA.
            self._api._enable_context_parallel_dispatcher()
            style = self._api._ContextParallel(seq_dim=2, attention_type=self._api._ContextParallel.AttentionType.SDPA)
            module = _Attention(self.backend, self._causal, case.request.scale)
            self._module = parallelize_module(module, case.environment.mesh, style)
            how = "_ContextParallel and the SDPA dispatcher"
        else:
            self._module = _CpuRing(self._api, case, self._causal)
            how = "_templated_ring_attention called directly, since the SDPA dispatcher has no kernel for CPU"
        self._expand = 1
        shared = case.shape.q_heads // case.shape.kv_heads
        if shared > 1 and (problem := self._refuses_shared_heads()):
            self._expand = shared
            how += f"; k and v are repeated to {case.shape.q_heads} heads, because it refuses fewer ({problem})"
        balancer = "_HeadTailLoadBalancer" if self._causal else "no load balancer"
        self.note = f"torch {torch.__version__}, {how}; {balancer}"

    def _refuses_shared_heads(self) -> str | None:
        """Try a few rows, on all ranks at once: shapes alone decide, so every rank sees the same."""
        case = self.case
        ranks, shape = case.environment.ranks, case.shape
        sizes = [(case.batch, heads, 16, shape.head_dim) for heads in (shape.q_heads, shape.kv_heads, shape.kv_heads)]
        like = {"dtype": case.request.dtype, "device": case.request.device}
        leaves = [torch.ones(size, **like).requires_grad_() for size in sizes]
        self._set_options()
        try:
            out = self._module(*leaves)
            torch.autograd.grad(out, leaves, torch.ones_like(out))
        except Exception as problem:  # Whatever it raises is why.
            return f"{type(problem).__name__} on {ranks} ranks"
        return None

    def prepare(self, inputs: Inputs) -> Given:
        """Deal the whole sequence out as torch does."""
        case, whole = self.case, [inputs.whole(name).transpose(1, 2) for name in Given._fields]
        balancer = None
        if self._causal:
            balancer = self._api._HeadTailLoadBalancer(case.seq_len, case.environment.ranks, case.request.device)
        dealt = self._api._context_parallel_shard(case.environment.mesh, whole, [2] * len(whole), balancer)
        return self.leaves(Given(*(x.contiguous() for x in dealt)))

    def call(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """See ``Differentiated``."""
        self._set_options()
        if self._expand > 1:
            k, v = (x.repeat_interleave(self._expand, dim=1) for x in (k, v))
        return self._module(q, k, v)

    def backward(self, given: Given, state: torch.Tensor) -> Gradients:
        """Run the graph."""
        self._set_options()
        return super().backward(given, state)

    def _set_options(self) -> None:
        self._api.set_rotate_method(self.rotate)
        self._api._cp_options.enable_load_balance = self._causal

    def output(self, state: torch.Tensor) -> torch.Tensor:
        """Heads back in place."""
        return state.detach().transpose(1, 2)

    def gradients(self, grads: Gradients) -> Gradients:
        """Heads back in place."""
        return tuple(grad.transpose(1, 2) for grad in grads)

    def predicted_bytes(self) -> tuple[int, int]:
        """Every other rank's rows; backward fetches them again, and gradients go all the way round in float32."""
        case, ranks = self.case, self.case.environment.ranks
        chunk = case.rows * case.row_numel * self._expand
        keys = (ranks - 1) * chunk * case.request.dtype.itemsize
        return keys, keys + (ranks * chunk * 4 if ranks > 1 else 0)


class TorchFlashAllGather(TorchRing):
    """FlashAttention-2; one all-gather of K and V."""

    name = "torch-flash-allgather"
    backend, rotate = SDPBackend.FLASH_ATTENTION, "allgather"


class TorchFlashAllToAll(TorchRing):
    """FlashAttention-2; K and V go from rank to rank."""

    name = "torch-flash-alltoall"
    backend, rotate = SDPBackend.FLASH_ATTENTION, "alltoall"


class TorchCudnnAllGather(TorchRing):
    """cuDNN; one all-gather of K and V."""

    name = "torch-cudnn-allgather"
    backend, rotate = SDPBackend.CUDNN_ATTENTION, "allgather"


class TorchCudnnAllToAll(TorchRing):
    """cuDNN; K and V go from rank to rank."""

    name = "torch-cudnn-alltoall"
    backend, rotate = SDPBackend.CUDNN_ATTENTION, "alltoall"


class _Attention(nn.Module):
    """SDPA with one kernel."""

    def __init__(self, backend: SDPBackend, causal: bool, scale: float) -> None:
        super().__init__()
        self._backend, self._causal, self._scale = backend, causal, scale

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        shared = query.shape[1] != key.shape[1]
        with sdpa_kernel(self._backend):
            return F.scaled_dot_product_attention(
                query, key, value, is_causal=self._causal, scale=self._scale, enable_gqa=shared
            )


class _CpuRing:
    """The same ring on the operator that SDPA uses on CPU, which has no entry in torch's table of kernels."""

    def __init__(self, api: Any, case: Case, causal: bool) -> None:
        group, scale = case.environment.group, case.request.scale
        # The stub module offers forward only.
        implementation = importlib.import_module(api._templated_ring_attention.__module__)
        aten: Any = torch.ops.aten

        class Function(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
                kernel = aten._scaled_dot_product_flash_attention_for_cpu
                out, lse, *_ = implementation._templated_ring_attention(
                    group, 2, kernel, q, k, v, is_causal=causal, dropout_p=0.0, scale=scale
                )
                ctx.save_for_backward(q, k, v, out, lse)
                return out

            @staticmethod
            def backward(ctx: Any, *grads: Any) -> Any:
                q, k, v, out, lse = ctx.saved_tensors
                return implementation._templated_ring_attention_backward(
                    group, 2, aten._scaled_dot_product_flash_attention_for_cpu_backward.default, grads[0], "grad_out",
                    q, k, v, out, lse, is_causal=causal, dropout_p=0.0, scale=scale,
                )  # fmt: skip

        self._function = Function

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
        return self._function.apply(query, key, value)


def _api() -> Any:
    return importlib.import_module("torch.distributed.tensor.experimental._attention")
