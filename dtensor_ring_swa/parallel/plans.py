"""Plans for whole models: which modules, by name, become parallel in which style."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from dtensor_ring_swa.parallel.style import ContextParallel


def apply_context_parallel(
    model: nn.Module, mesh: DeviceMesh, plan: Mapping[str, ParallelStyle] | Iterable[str]
) -> nn.Module:
    """Make the modules that a plan names context-parallel; the model's code stays as it is.

    It does what ``parallelize_module`` does, and besides: a pattern that matches nothing raises, errors
    of a module say its whole name, and a plan on a mesh of two axes may hold the styles of both.

    Args:
        model: Any model; its modules get hooks.
        mesh: The context-parallel axis, or a mesh of several of which one has the style's ``axis`` name.
        plan: Styles by pattern, or only patterns, for ``ContextParallel()``. A pattern is a module's name
            with ``*``, ``?`` and ``[]`` as in ``parallelize_module``, each within one part of the name, between
            dots: ``"layers.*.attention.core"``. The empty pattern is the model. Styles other than
            ``ContextParallel``, such as ``ColwiseParallel``, are applied on the other axis of a mesh of two.

    Returns:
        The model.

    Raises:
        ValueError: If ``mesh`` is no DeviceMesh, a pattern matches no module, two match the same one with
            ``ContextParallel``, or a style cannot be applied. Names are checked before any module is changed.
    """
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(f"mesh must be a DeviceMesh with the context-parallel axis, got {type(mesh).__name__}")
    styles = _styles(plan)
    found = {pattern: _matching(model, pattern) for pattern in styles}
    missing = [pattern for pattern, modules in found.items() if not modules]
    if missing or not found:
        raise ValueError(_nothing_matches(model, missing))
    _check_once({pattern: found[pattern] for pattern, style in styles.items() if isinstance(style, ContextParallel)})
    other = _other_axis(mesh, styles)
    for pattern, style in styles.items():
        for name, module in found[pattern].items():
            if isinstance(style, ContextParallel):
                style.attach(module, mesh, f"{name or 'the model'} ({type(module).__name__})")
            else:
                parallelize_module(module, other, style)
    return model


def _styles(plan: Mapping[str, ParallelStyle] | Iterable[str]) -> dict[str, ParallelStyle]:
    if not isinstance(plan, Iterable):
        raise ValueError(
            f"a plan maps names of modules to styles, got {plan!r}; for the whole model pass {{'': style}}"
        )
    if not isinstance(plan, Mapping):
        plan = dict.fromkeys([plan] if isinstance(plan, str) else plan, ContextParallel())
    styles: dict[str, ParallelStyle] = {**plan}
    for pattern, style in styles.items():
        if not isinstance(pattern, str) or not isinstance(style, ParallelStyle):
            raise ValueError(f"a plan maps names to styles such as ContextParallel(), got {pattern!r}: {style!r}")
    return styles


def _matching(model: nn.Module, pattern: str) -> dict[str, nn.Module]:
    """Modules by name; a pattern matches as many parts of a name as it has. A module of several names counts once."""
    if not pattern:
        return {"": model}
    wanted = pattern.split(".")
    found: dict[nn.Module, str] = {}
    for name, module in _named(model).items():
        parts = name.split(".")
        if len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted)):
            found.setdefault(module, name)
    return {name: module for module, name in found.items()}


def _named(model: nn.Module) -> dict[str, nn.Module]:
    """All modules below the model, under all their names."""
    return {name: module for name, module in model.named_modules(remove_duplicate=False) if name}


def _nothing_matches(model: nn.Module, missing: list[str]) -> str:
    names = list(_named(model))
    near = {name for pattern in missing for name in get_close_matches(pattern, names, n=8, cutoff=0.3)}
    some = [name for name in names if name in near] or names
    what = f"no module matches {', '.join(map(repr, missing))}" if missing else "the plan is empty"
    rule = "; a * stands for one part of a name, between dots" if any("*" in pattern for pattern in missing) else ""
    return f"{what}; of {len(names)} names of modules, some are: {', '.join(some[:8]) or 'none'}{rule}"


def _check_once(found: dict[str, dict[str, nn.Module]]) -> None:
    owner: dict[nn.Module, str] = {}
    for pattern, modules in found.items():
        for name, module in modules.items():
            if module in owner:
                raise ValueError(
                    f"{name or 'the model'} is matched by {owner[module]!r} and by {pattern!r}; name it once"
                )
            owner[module] = pattern


def _other_axis(mesh: DeviceMesh, styles: dict[str, ParallelStyle]) -> DeviceMesh | None:
    """Where styles other than ContextParallel go: the axis that is not the context-parallel one."""
    strange = [style for style in styles.values() if not isinstance(style, ContextParallel)]
    if not strange:
        return None
    own = {style.axis for style in styles.values() if isinstance(style, ContextParallel)} or {"cp"}
    others = [name for name in mesh.mesh_dim_names or () if name not in own]
    if mesh.ndim != 2 or len(others) != 1:
        raise ValueError(
            f"{type(strange[0]).__name__} needs one axis beside the context-parallel one, got a mesh with the axes "
            f"{mesh.mesh_dim_names}; pass a slice such as mesh['cp', 'tp']"
        )
    return mesh[others[0]]
