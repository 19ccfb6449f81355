"""The plan entry that makes a module context-parallel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from dtensor_ring_swa.groups import refuse_outsider
from dtensor_ring_swa.module import RingAttention
from dtensor_ring_swa.option_checks import check_layout, check_seq_len
from dtensor_ring_swa.parallel.hooks import Hooks
from dtensor_ring_swa.parallel.inputs import Key, Parameters


class ContextParallel(ParallelStyle):
    """Shard a module's inputs on the sequence: ``{"layers.*.attn.core": ContextParallel()}``.

    The caller passes shards and gets shards; the module works on DTensors of the whole sequence.

    * Local tensors become DTensors sharded on the sequence over the context-parallel axis. What comes out
      becomes local again. That tensor parallelism has split their heads is no matter: heads stay local.
    * DTensors on other axes, for example heads on ``tp`` with the local rows of the sequence, become
      DTensors on those axes and the context-parallel one. What comes out goes back to those axes. The plan
      must be applied on a mesh that has them all, such as ``mesh["cp", "tp"]``.
    * DTensors on the context-parallel axis pass as they are.

    Before anything else the ranks compare their inputs, in one small message between hosts a call. If they
    do not fit together, all ranks raise. While torch.compile traces, equal shards are taken for granted.

    Args:
        seq_dim: The sequence dim of the module's tensors. A ``RingAttention`` knows its own.
        seq_len: Tokens of the whole sequence, when it is always the same. Then the ranks do not compare: a
            rank that alone has wrong inputs raises alone.
        inputs: Which inputs carry the sequence and on which dim, by position or name, for example
            ``{"q": 1, "k": 1, "mask": 2}``. Those that a call leaves out or passes None for are skipped; all
            others pass as they are. By default these are q, k and v of a ``RingAttention``, and every
            floating-point tensor of another module.
        positions: An integer input, by position or name, that is *replaced* by the global positions of this
            rank's tokens, whatever the caller passed. It keeps the caller's shape and dtype except for
            its last dim; where none was passed, it is int64 ``[1, S_local]``. Do not name an input whose
            positions begin anew in each document: shard it with ``shard_sequence`` like the tokens.
        layout: How positions lie on the ranks; see ``ring_attention``. ``RingAttention`` modules inside are
            set to it. By default it is theirs, or else contiguous.
        axis: Name of the context-parallel axis in a mesh of several.
        use_local_input: Leave inputs and outputs as they are, and only compare lengths and make positions:
            for modules whose parameters are plain tensors.

    Raises:
        ValueError: For a ``seq_dim``, ``seq_len``, ``layout`` or ``inputs`` that cannot be one. When applied, if the
            module takes no such input, the mesh has no such axis or not this rank, layouts contradict each other, or a
            ``RingAttention`` would not see the whole sequence.
    """

    def __init__(
        self,
        seq_dim: int = 1,
        seq_len: int | None = None,
        *,
        inputs: Mapping[Key, int] | Mapping[int, int] | Mapping[str, int] | None = None,
        positions: Key | None = None,
        layout: str | None = None,
        axis: str = "cp",
        use_local_input: bool = False,
    ) -> None:
        super().__init__()
        if layout is not None:
            check_layout(layout)
        check_seq_len(seq_len)
        _check_dims(seq_dim, inputs)
        self.seq_dim = seq_dim
        self.seq_len = seq_len
        self.inputs = None if inputs is None else dict[Key, int](inputs.items())
        self.positions = positions
        self.layout = layout
        self.axis = axis
        self.use_local_input = use_local_input

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return self.attach(module, device_mesh, type(module).__name__)

    def attach(self, module: nn.Module, mesh: DeviceMesh, name: str) -> nn.Module:
        """Make one module context-parallel, which errors call ``name``.

        Raises:
            ValueError: If it cannot be; nothing has been changed then.
        """
        try:
            hooks = self._hooks(module, mesh, name)
        except ValueError as error:
            raise ValueError(f"ContextParallel on {name}: {error}") from None
        for core in _attentions(module):
            core.layout = hooks.layout

        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return hooks.enter(args, kwargs)

        def leave(_: nn.Module, args: Any, outputs: Any) -> Any:
            return hooks.leave(outputs)

        module.register_forward_pre_hook(enter, with_kwargs=True)
        module.register_forward_hook(leave)
        return module

    def _hooks(self, module: nn.Module, mesh: DeviceMesh, name: str) -> Hooks:
        refuse_outsider(mesh)
        parameters = Parameters.of(module)
        inputs = self.inputs
        if inputs is None and isinstance(module, RingAttention):
            if self.seq_dim != 1:
                raise ValueError(f"seq_dim={self.seq_dim}, but q, k and v are [B, S, H, D], or [T, H, D] packed")
            inputs = dict.fromkeys(("q", "k", "v"), -3)
        if self.use_local_input and isinstance(module, RingAttention):
            raise ValueError("use_local_input=True would let it attend to this rank's shard alone; leave it out")
        if inputs is not None:
            dims = [(parameters.key(key), dim) for key, dim in inputs.items()]
            inputs = dict(dims)
            if isinstance(module, RingAttention) and not set(inputs.values()) <= {1, -3}:
                raise ValueError(
                    f"inputs={self.inputs}, but q, k and v are [B, S, H, D], or [T, H, D] packed; leave inputs out"
                )
            if len(inputs) < len(dims):
                raise ValueError(f"inputs={self.inputs} names an input twice, by position and by name")
        positions = None if self.positions is None else parameters.key(self.positions)
        if inputs is not None and positions in inputs:
            raise ValueError(f"input {positions!r} cannot both carry the sequence and be replaced by positions")
        return Hooks(
            name=name,
            parameters=parameters,
            inputs=inputs,
            seq_dim=self.seq_dim,
            positions=positions,
            layout=self._common_layout(module),
            seq_len=self.seq_len,
            use_local_input=self.use_local_input,
            any_strides=isinstance(module, RingAttention),
            mesh=mesh,
            axis=self.axis,
        )

    def _common_layout(self, module: nn.Module) -> str:
        """The layout that the plan states, or that the attention inside has."""
        theirs = {core.layout for core in _attentions(module)}
        if self.layout is not None and theirs <= {"contiguous", self.layout}:
            for core in _attentions(module):
                check_layout(self.layout, core.load_balance)
            return self.layout
        if self.layout is None and len(theirs) <= 1:
            return next(iter(theirs), "contiguous")
        raise ValueError(
            f"layout={self.layout!r} contradicts the layouts of the RingAttention inside: {sorted(theirs)}"
        )

    def __repr__(self) -> str:
        return (
            f"ContextParallel(seq_dim={self.seq_dim}, seq_len={self.seq_len}, inputs={self.inputs}, "
            f"positions={self.positions!r}, layout={self.layout!r}, axis={self.axis!r}, "
            f"use_local_input={self.use_local_input})"
        )


def _check_dims(seq_dim: object, inputs: object) -> None:
    """Raise ValueError unless all sequence dims are integers, and ``inputs`` says which input each is of."""
    if inputs is not None and not isinstance(inputs, Mapping):
        raise ValueError(f"inputs must map names or positions to sequence dims, such as {{'q': 1}}, got {inputs!r}")
    dims = [seq_dim, *(inputs or {}).values()]
    if not all(isinstance(dim, int) for dim in dims):
        raise ValueError(f"sequence dims must be integers, got seq_dim={seq_dim!r} and inputs={inputs!r}")


def _attentions(module: nn.Module) -> list[RingAttention]:
    return [each for each in module.modules() if isinstance(each, RingAttention)]
