"""Attention as a module, and the plan entry that makes a module context-parallel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle

from dtensor_ring_swa.attention import WindowLike, ring_attention
from dtensor_ring_swa.groups import agree
from dtensor_ring_swa.kernels import check_name
from dtensor_ring_swa.layout import shard
from dtensor_ring_swa.sequence import wrap_shard
from dtensor_ring_swa.window import Window


class RingAttention(nn.Module):
    """``ring_attention`` as a module without parameters, the entry for a plan to name.

    Without a plan it is ordinary attention on one device.

    Args:
        window: ``(left, right)`` tokens visible; see ``ring_attention``.
        scale: Factor on the scores; ``head_dim ** -0.5`` by default.
        softcap: Bound on the scores; 0.0 is off.
        kernel: A kernel's name or ``"auto"``.
        deterministic: Bitwise the same gradients on every run.

    Raises:
        ValueError: For a window or kernel that does not exist.
    """

    def __init__(
        self,
        window: WindowLike = (-1, 0),
        scale: float | None = None,
        softcap: float = 0.0,
        kernel: str = "auto",
        deterministic: bool = False,
    ) -> None:
        super().__init__()
        check_name(kernel)
        self.window = Window.of(window)
        self.scale = scale
        self.softcap = softcap
        self.kernel = kernel
        self.deterministic = deterministic

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attend: q ``[B, S, Hq, D]``, k ``[B, S, Hkv, D]``, v ``[B, S, Hkv, Dv]`` to ``[B, S, Hq, Dv]``."""
        return ring_attention(
            q,
            k,
            v,
            window=self.window,
            scale=self.scale,
            softcap=self.softcap,
            kernel=self.kernel,
            deterministic=self.deterministic,
        )

    def extra_repr(self) -> str:
        """What ``print(model)`` shows."""
        return f"window=({self.window.left}, {self.window.right}), kernel={self.kernel!r}"


class ContextParallel(ParallelStyle):
    """Shard a module's inputs on the sequence: ``{"layers.*.attn.core": ContextParallel()}``.

    On the way in, the module's local tensors become DTensors sharded on ``seq_dim`` over the mesh
    that ``parallelize_module`` is given; on the way out, DTensors become local shards again.

    Args:
        seq_dim: The sequence dim of the module's tensors.
        seq_len: Tokens of the whole sequence, when it is always the same. By default the ranks
            compare the lengths of their shards at every call.
    """

    def __init__(self, seq_dim: int = 1, seq_len: int | None = None) -> None:
        super().__init__()
        self.seq_dim = seq_dim
        self.seq_len = seq_len

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if device_mesh.ndim != 1:
            raise ValueError(
                f"ContextParallel needs a mesh of one axis, got {device_mesh.mesh_dim_names}; pass mesh['cp']"
            )

        def shard_inputs(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            tensors = [x for x in (*args, *kwargs.values()) if _is_sequence(x)]
            if not tensors:
                raise ValueError(f"{type(module).__name__} got no local tensor to shard on the sequence")
            total = self._total_length(device_mesh, tensors)

            def wrap(x: Any) -> Any:
                if not _is_sequence(x):
                    return x
                shape = list(x.shape)
                shape[self.seq_dim] = total
                return wrap_shard(x, device_mesh, self.seq_dim, shape)

            return tuple(map(wrap, args)), {name: wrap(x) for name, x in kwargs.items()}

        def unwrap_outputs(_: nn.Module, args: Any, outputs: Any) -> Any:
            return _map_structure(lambda x: x.to_local() if isinstance(x, DTensor) else x, outputs)

        module.register_forward_pre_hook(shard_inputs, with_kwargs=True)
        module.register_forward_hook(unwrap_outputs)
        return module

    def _total_length(self, mesh: DeviceMesh, tensors: list[torch.Tensor]) -> int:
        lengths = {x.shape[self.seq_dim] for x in tensors}
        shapes = [list(x.shape) for x in tensors]
        error = None
        if len(lengths) > 1:
            error = ValueError(f"inputs differ in length on dim {self.seq_dim}: {shapes}")
        if self.seq_len is not None:
            rows = len(shard(self.seq_len, mesh.size(), mesh.get_local_rank()))
            if error is None and lengths != {rows}:
                error = ValueError(f"seq_len={self.seq_len} gives this rank {rows} tokens, got inputs of {shapes}")
            if error is not None:
                raise error
            return self.seq_len
        if torch.compiler.is_compiling():
            return lengths.pop() * mesh.size()
        return agree(mesh.get_group(), ("the length of a shard",), tuple(lengths), error)


def _is_sequence(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and not isinstance(x, DTensor) and x.is_floating_point()


def _map_structure(function: Callable[[Any], Any], x: Any) -> Any:
    """Apply ``function`` to the leaves of tuples, named tuples, lists and dicts."""
    if isinstance(x, dict):
        return type(x)((name, _map_structure(function, value)) for name, value in x.items())
    if isinstance(x, (tuple, list)):
        values = [_map_structure(function, value) for value in x]
        return type(x)(*values) if hasattr(x, "_fields") else type(x)(values)
    return function(x)
