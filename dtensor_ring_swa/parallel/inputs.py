"""The inputs of a module: which there are, and where one lies in a call."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

Key = int | str
_P = inspect.Parameter


@dataclass(frozen=True)
class Parameters:
    """What a module's forward takes.

    Attributes:
        ordered: Names of those that can be passed by position.
        named: Names of those that can only be passed by keyword.
        any_position: Whether there is ``*args``.
        any_keyword: Whether there is ``**kwargs``.
    """

    ordered: tuple[str, ...] = ()
    named: tuple[str, ...] = ()
    any_position: bool = True
    any_keyword: bool = True

    @classmethod
    def of(cls, module: nn.Module) -> Parameters:
        """Read the signature of ``forward``; one that cannot be read takes anything."""
        try:
            every = [(p.name, p.kind) for p in inspect.signature(module.forward).parameters.values()]
        except (TypeError, ValueError):
            return cls()
        kinds = {kind for _, kind in every}
        return cls(
            tuple(name for name, kind in every if kind in (_P.POSITIONAL_ONLY, _P.POSITIONAL_OR_KEYWORD)),
            tuple(name for name, kind in every if kind is _P.KEYWORD_ONLY),
            _P.VAR_POSITIONAL in kinds,
            _P.VAR_KEYWORD in kinds,
        )

    def has_named(self, key: Key) -> bool:
        """Whether forward declares an input of this name."""
        return key in self.ordered or key in self.named

    def key(self, given: Key) -> Key:
        """The name of an input that was given by position or name, or the position if it has no name.

        Raises:
            ValueError: If the module takes no such input.
        """
        if isinstance(given, str) and (self.has_named(given) or self.any_keyword):
            return given
        if isinstance(given, int) and 0 <= given < len(self.ordered):
            return self.ordered[given]
        if isinstance(given, int) and given >= 0 and self.any_position:
            return given
        takes = [*self.ordered, *self.named, *["*args"] * self.any_position, *["**kwargs"] * self.any_keyword]
        raise ValueError(f"there is no input {given!r}; forward takes {', '.join(takes) or 'nothing'}")


class Call:
    """The inputs of one call; what is put in place of one changes neither the caller's tuple nor dict.

    Args:
        parameters: What the module takes.
        args: Inputs by position.
        kwargs: Inputs by keyword.
    """

    def __init__(self, parameters: Parameters, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.parameters = parameters
        self.args = list(args)
        self.kwargs = dict(kwargs)

    def places(self) -> Iterator[Key]:
        """Where every input of this call lies: a position or a keyword."""
        yield from range(len(self.args))
        yield from self.kwargs

    def find(self, key: Key) -> Key | None:
        """Where an input lies in this call; None if it was not passed."""
        if isinstance(key, str) and key in self.kwargs:
            return key
        position = self.parameters.ordered.index(key) if key in self.parameters.ordered else key
        return position if isinstance(position, int) and position < len(self.args) else None

    def get(self, key: Key) -> Any:
        """An input; None if it was not passed."""
        where = self.find(key)
        if where is None:
            return None
        return self.args[where] if isinstance(where, int) else self.kwargs[where]

    def put(self, key: Key, value: Any) -> None:
        """Replace an input, or add it by its name.

        Raises:
            ValueError: If it was not passed and has no name.
        """
        where = self.find(key)
        if isinstance(where, int):
            self.args[where] = value
        elif isinstance(key, str):
            self.kwargs[key] = value
        else:
            raise ValueError(f"input {key} was not passed, and has no name to pass it by")
