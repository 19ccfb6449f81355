"""The attention layers of real models, by name.

Head counts, head dims and windows are those of the models' published configurations. Hugging Face's
``sliding_window`` counts the query's own token, so a model's 4096 is ``Window.tokens(4096)``, (4095, 0).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from dtensor_ring_swa.option_checks import check_factors
from dtensor_ring_swa.window import UNLIMITED, Window


@dataclass(frozen=True)
class Shape:
    """One layer's attention, on any number of tokens.

    Attributes:
        name: What ``--shape`` calls it.
        q_heads: Query heads.
        kv_heads: Key/value heads; divides ``q_heads``.
        head_dim: Width of q and k.
        v_head_dim: Width of v and of the output.
        window: Neighbours visible to each token.
        softcap: Scores become ``softcap * tanh(scores / softcap)``; 0.0 is off.
        note: What the benchmark leaves out of the model's layer, if anything.
        layers: How many such layers the model has; 0 where only the layer is of interest.

    Raises:
        ValueError: If no layer can have these numbers.
    """

    name: str
    q_heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    window: Window
    softcap: float = 0.0
    note: str = ""
    layers: int = 0

    def __post_init__(self) -> None:
        sizes = {f.name: getattr(self, f.name) for f in fields(self) if f.name.endswith(("heads", "head_dim"))}
        if min(sizes.values()) < 1:
            raise ValueError(f"shape {self.name!r}: heads and head dims must be at least 1, got {sizes}")
        if self.q_heads % self.kv_heads:
            raise ValueError(
                f"shape {self.name!r}: {self.q_heads} query heads are not a multiple of {self.kv_heads} "
                "key/value heads; pass --kv-heads"
            )
        check_factors(self.softcap, None)

    @property
    def unlimited(self) -> bool:
        """Whether the window has no limit on some side."""
        return UNLIMITED in self.window

    @property
    def lopsided(self) -> bool:
        """Whether the window is unlimited on one side only, so that contiguous shards have unequal work."""
        return (self.window.left == UNLIMITED) != (self.window.right == UNLIMITED)

    def __str__(self) -> str:
        width = f"{self.head_dim}" if self.head_dim == self.v_head_dim else f"{self.head_dim}/{self.v_head_dim}"
        cap = f", softcap {self.softcap:g}" if self.softcap else ""
        return (
            f"{self.name}: {self.q_heads}/{self.kv_heads} heads of {width}, "
            f"window ({self.window.left}, {self.window.right}){cap}"
        )


def _causal(
    name: str, q_heads: int, kv_heads: int, head_dim: int, tokens: int, softcap: float = 0.0, note: str = ""
) -> Shape:
    return Shape(name, q_heads, kv_heads, head_dim, head_dim, Window.tokens(tokens), softcap, note)


def _global(shape: Shape) -> Shape:
    """The same model's layers that see every earlier token."""
    return replace(shape, name=f"{shape.name}-global", window=Window.causal())


NO_SINKS = "the model's learned sinks are left out"

_ALL = (
    _causal("mistral-7b", 32, 8, 128, 4096),
    _causal("gemma-2-2b", 8, 4, 256, 4096, softcap=50.0),
    _causal("gemma-2-9b", 16, 8, 256, 4096, softcap=50.0),
    _causal("gemma-2-27b", 32, 16, 128, 4096, softcap=50.0),
    _causal("gemma-3-4b", 8, 4, 256, 1024),
    _causal("gemma-3-12b", 16, 8, 256, 1024),
    _causal("gemma-3-27b", 32, 16, 128, 1024),
    _causal("gpt-oss", 64, 8, 64, 128, note=NO_SINKS),
    _causal("phi-3-mini", 32, 32, 96, 2047),
    Shape("modernbert-base", 12, 12, 64, 64, Window(64, 64)),
    _causal("command-r7b", 32, 8, 128, 4096),
    _causal("olmo-3-7b", 32, 32, 128, 4096),
    _causal("ministral-8b", 32, 8, 128, 32768),
    Shape("mimo-v2-flash", 64, 8, 192, 128, Window.tokens(128), note=NO_SINKS),
    _causal("cwm-32b", 48, 8, 128, 8192),
    _causal("exaone-4-32b", 40, 8, 128, 4096),
)

_LOCAL = {shape.name: shape for shape in _ALL}

# Models that also have layers without a window: their name there, their layers, and every which one is of that kind.
# MiMo's have fewer key heads, and how many there are of its 48 layers is not known here.
_INTERLEAVED = {
    "gemma-2-2b": ("gemma-2-2b", 26, 2),
    "gemma-2-9b": ("gemma-2-9b", 42, 2),
    "gemma-2-27b": ("gemma-2-27b", 46, 2),
    "gemma-3-4b": ("gemma-3-4b", 34, 6),
    "gemma-3-12b": ("gemma-3-12b", 48, 6),
    "gemma-3-27b": ("gemma-3-27b", 62, 6),
    "gpt-oss-20b": ("gpt-oss", 24, 2),
    "gpt-oss-120b": ("gpt-oss", 36, 2),
    "command-r7b": ("command-r7b", 32, 4),
    "olmo-3-7b": ("olmo-3-7b", 32, 4),
    "cwm-32b": ("cwm-32b", 64, 4),
    "exaone-4-32b": ("exaone-4-32b", 64, 4),
}
_GLOBAL = [_global(_LOCAL[name]) for name, _, _ in _INTERLEAVED.values()]
_GLOBAL += [
    _global(replace(_LOCAL["mimo-v2-flash"], kv_heads=4)),
    replace(_LOCAL["modernbert-base"], name="modernbert-base-global", window=Window.full()),
]

SHAPES: dict[str, Shape] = _LOCAL | {shape.name: shape for shape in _GLOBAL}


def _hybrid(name: str, layers: int, without: int) -> tuple[Shape, Shape]:
    """Both kinds of layer of one model, with how many it has of each, ``without`` of them without a window."""
    return replace(SHAPES[name], layers=layers - without), replace(SHAPES[f"{name}-global"], layers=without)


HYBRIDS: dict[str, tuple[Shape, Shape]] = {
    f"{model}-hybrid": _hybrid(name, layers, layers // every) for model, (name, layers, every) in _INTERLEAVED.items()
}
# Its first layer has no window, nor has every third one after it.
HYBRIDS["modernbert-base-hybrid"] = _hybrid("modernbert-base", 22, 8)


def find(name: str) -> tuple[Shape, ...]:
    """The shape of this name, or both shapes of a hybrid model.

    Raises:
        ValueError: If there is none; it lists those there are.
    """
    if name in HYBRIDS:
        return HYBRIDS[name]
    if name not in SHAPES:
        names = ", ".join((*SHAPES, *HYBRIDS))
        raise ValueError(f"unknown shape {name!r}; choose from {names}, or give --heads and so on")
    return (SHAPES[name],)
