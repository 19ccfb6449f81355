"""What happens around a context-parallel module: its inputs become DTensors, its outputs go back as the inputs came."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dtensor_ring_swa.parallel.inputs import Call, Key, Parameters
from dtensor_ring_swa.parallel.joint import Form, context_axis
from dtensor_ring_swa.parallel.lengths import agree_on_length, facts_of, sequence_dims
from dtensor_ring_swa.sequence import positions


@dataclass
class Hooks:
    """The hooks of one module.

    Attributes:
        name: What the module is called in errors.
        parameters: What it takes.
        inputs: Sequence dim by input; None if every floating-point tensor carries it on ``seq_dim``.
        seq_dim: The sequence dim of those.
        positions: Input to replace by global positions.
        layout: How positions lie on the ranks.
        seq_len: Tokens of the whole sequence, where the ranks need not compare.
        use_local_input: Whether the module gets its inputs as they came.
        any_strides: Whether the module takes tensors of any strides; others may view them, as linear layers do.
        mesh: The plan's mesh.
        axis: Name of its context-parallel axis.
    """

    name: str
    parameters: Parameters
    inputs: Mapping[Key, int] | None
    seq_dim: int
    positions: Key | None
    layout: str
    seq_len: int | None
    use_local_input: bool
    any_strides: bool
    mesh: DeviceMesh
    axis: str

    def __post_init__(self) -> None:
        self.context = context_axis(self.mesh, self.axis)
        self._form = Form(None, self.context, 0)  # of the latest call

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The module's inputs, given the caller's. Collective, unless the length is known.

        Raises:
            ValueError: On every rank, if the inputs contradict each other, the mesh or the other ranks'.
        """
        call = Call(self.parameters, args, kwargs)
        dims: dict[Key, int] = {}
        facts: tuple[int, ...] = ()
        problem: Exception | None = None
        try:
            dims = sequence_dims(call, self.inputs, self.seq_dim)
            form = Form.of([call.get(key) for key in dims], self.mesh, self.axis)
            if form != self._form:  # in a checkpoint that lies in its graph torch.compile refuses to assign this
                self._form = form
            facts = facts_of(call, dims, form)
            self._check_positions(call)
        except Exception as error:  # of any kind: the peers of a rank that raised alone would wait for it
            problem = error
        try:
            seq_len = agree_on_length(self.context, self.layout, self.seq_len, facts, problem)
        except ValueError as error:
            raise ValueError(f"{self.name} got {_shapes(call)}: {error}") from None
        form = self._form
        tensors = {key: call.get(key) for key in dims}
        if not self.use_local_input:
            for key, x in tensors.items():
                call.put(key, form.enter(x if self.any_strides else x.contiguous(), dims[key], seq_len))
        if self.positions is not None:
            own = positions(self.context, seq_len, self.layout, next(iter(tensors.values())).device)
            self._put_positions(call, self.positions, own, form, seq_len)
        return tuple(call.args), call.kwargs

    def leave(self, outputs: Any) -> Any:
        """The caller's outputs, given the module's.

        Raises:
            ValueError: If an output cannot go back as the inputs came.
        """
        form = self._form
        if self.use_local_input:
            return outputs
        try:
            return _map_structure(lambda x: form.leave(x) if isinstance(x, DTensor) else x, outputs)
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from None

    def _check_positions(self, call: Call) -> None:
        given = None if self.positions is None else call.get(self.positions)
        if given is None:
            return
        if type(given) is not torch.Tensor or given.is_floating_point() or not given.ndim:
            kind = f"{given.dtype} " if isinstance(given, torch.Tensor) else ""
            raise ValueError(
                f"input {self.positions!r} is to be replaced by positions and must be None or a local tensor of "
                f"integers, got a {kind}{type(given).__name__}"
            )

    def _put_positions(self, call: Call, key: Key, own: torch.Tensor, form: Form, seq_len: int) -> None:
        """Replace an input by this rank's global positions, in the dtype and the leading dims of what was passed."""
        given = call.get(key)
        leading = (1,) if given is None else given.shape[:-1]
        own = own.to(own.dtype if given is None else given.dtype).expand(*leading, -1).contiguous()
        call.put(key, own if self.use_local_input else form.enter_replicated(own, own.ndim - 1, seq_len))


def _shapes(call: Call) -> str:
    """The shapes of the tensors of a call."""
    tensors = {place: call.get(place) for place in call.places()}
    shapes = [f"{place}: {list(x.shape)}" for place, x in tensors.items() if isinstance(x, torch.Tensor)]
    return ", ".join(shapes) or "no tensor"


def _map_structure(function: Callable[[Any], Any], x: Any) -> Any:
    """Apply ``function`` to the leaves of tuples, named tuples, lists and dicts."""
    if isinstance(x, dict):
        return type(x)((name, _map_structure(function, value)) for name, value in x.items())
    if isinstance(x, (tuple, list)):
        values = [_map_structure(function, value) for value in x]
        return type(x)(*values) if hasattr(x, "_fields") else type(x)(values)
    return function(x)
