"""Every kernel that this machine can run, on bands of all kinds, against a dense float64 mask."""

from __future__ import annotations

import itertools
import re
import sys
from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dtensor_ring_swa.band import Band
from dtensor_ring_swa.block import Call
from dtensor_ring_swa.kernels import KERNELS, Request, choose, flash_package, triton, triton_package
from dtensor_ring_swa.kernels.flash_band import _pieces
from dtensor_ring_swa.kernels.flash_groups import Group, boundaries_on, flash_groups
from dtensor_ring_swa.merge import merge_
from dtensor_ring_swa.planning import make_plan

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# (dtype, largest relative error in the norm)
DTYPES = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 1.2e-2, "float16": 2e-3}


def dense(request: Request, band: Band, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """out, lse, dq, dk, dv with the whole mask; rows that see no key give zeros and -inf."""
    dout, *inputs = (x.double().detach() for x in tensors)
    q, k, v = (x.requires_grad_() for x in inputs)
    repeats = q.shape[2] // k.shape[2]
    scores = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(repeats, 2)) * request.scale
    if request.softcap:
        scores = request.softcap * torch.tanh(scores / request.softcap)
    distance = torch.arange(k.shape[1], device=q.device) - torch.arange(q.shape[1], device=q.device)[:, None]
    seen = (distance >= band.lower) & (distance <= band.upper)
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    weights = torch.where(seen.any(-1)[:, None], weights, 0.0)
    out = torch.einsum("bhij,bjhd->bihd", weights, v.repeat_interleave(repeats, 2))
    lse = scores.masked_fill(~seen, float("-inf")).logsumexp(-1)
    return (out.detach(), lse.detach(), *torch.autograd.grad(out, (q, k, v), dout))


def check(name: str, dtype: str, band: Band, sizes: dict[str, int], softcap: float, slices: bool) -> None:
    kernel = KERNELS[name]
    torch_dtype = getattr(torch, dtype)
    request = Request(DEVICE, torch_dtype, sizes["d"], sizes["e"], sizes["d"] ** -0.5, softcap)
    if kernel.supports(request) is not None:
        return
    generator = torch.Generator().manual_seed(sizes["m"] * 31 + sizes["n"])

    def draw(rows: int, heads: int, width: int) -> torch.Tensor:
        x = torch.randn(sizes["b"], rows + 3 * slices, heads, width, generator=generator).to(DEVICE, torch_dtype)
        return x[:, 3 * slices :]

    heads = sizes["g"] * sizes["r"]
    dout, q = draw(sizes["m"], heads, sizes["e"]), draw(sizes["m"], heads, sizes["d"])
    k, v = draw(sizes["n"], sizes["g"], sizes["d"]), draw(sizes["n"], sizes["g"], sizes["e"])
    # Results start as NaN: every element has to be written.
    out, dq = (torch.full_like(x, float("nan")) for x in (dout, q))
    wide = torch.promote_types(torch_dtype, torch.float32)
    lse = torch.full((sizes["b"], heads, sizes["m"]), float("nan"), device=DEVICE, dtype=wide)
    dk, dv = (torch.full_like(x, float("nan"), dtype=kernel.partial_dtype(torch_dtype)) for x in (k, v))
    call = Call.single(sizes["m"], sizes["n"], band)
    kernel.forward(request, q, k, v, call, out, lse)
    kernel.backward(request, dout, q, k, v, out, lse, call, dq, dk, dv)
    for what, got, want in zip(
        ("out", "lse", "dq", "dk", "dv"), (out, lse, dq, dk, dv), dense(request, band, (dout, q, k, v)), strict=True
    ):
        if what == "lse":
            assert torch.equal(got.isinf(), want.isinf()), "lse: other rows see no key"
            got, want = got.nan_to_num(neginf=0.0, nan=1e9), want.nan_to_num(neginf=0.0)
        # Where terms cancel, rounding is relative to the terms: about 1 an element for these inputs.
        error = float((got.double() - want).norm() / want.norm().clamp(min=0.3 * want.numel() ** 0.5))
        assert error < DTYPES[dtype], f"{what}: {error}"


@st.composite
def bands(draw: st.DrawFn) -> tuple[Band, dict[str, int]]:
    sizes = {name: draw(st.integers(1, top)) for name, top in {"b": 2, "m": 300, "n": 300, "g": 2, "r": 3}.items()}
    sizes |= {name: draw(st.integers(1, 6)) for name in "de"} if DEVICE.type == "cpu" else {
        name: draw(st.sampled_from([8, 20, 64, 128])) for name in "de"
    }  # fmt: skip
    lower = draw(st.integers(-sizes["m"] - 3, sizes["n"] + 3))
    return Band(lower, lower + draw(st.integers(0, 200))), sizes


# flash and triton compile a kernel for many of these cases, so they have a shorter list below.
@pytest.mark.parametrize("name", ["aten", "reference"])
@pytest.mark.parametrize("dtype", list(DTYPES))
@settings(max_examples=40)
@given(band_and_sizes=bands(), softcap=st.sampled_from([0.0, 3.0, 1e30]), slices=st.booleans())
# More queries than keys, of which the last sees the only key because the right side is open.
@example((Band(-2, 0), {"b": 1, "m": 3, "n": 1, "g": 1, "r": 1, "d": 8, "e": 8}), 0.0, False)
@example((Band(-5, -3), {"b": 1, "m": 9, "n": 4, "g": 1, "r": 2, "d": 8, "e": 8}), 0.0, False)
@example((Band(0, 0), {"b": 1, "m": 1, "n": 1, "g": 1, "r": 1, "d": 8, "e": 8}), 0.0, False)
@example((Band(-9, 300), {"b": 1, "m": 256, "n": 256, "g": 1, "r": 4, "d": 8, "e": 8}), 0.0, True)
def test_bands(
    name: str, dtype: str, band_and_sizes: tuple[Band, dict[str, int]], softcap: float, slices: bool
) -> None:
    request = Request(DEVICE, getattr(torch, dtype), 64, 64, 1.0)
    if reason := KERNELS[name].supports(request):
        pytest.skip(f"{name}: {reason}")
    check(name, dtype, *band_and_sizes, softcap, slices)


def test_flash_pieces_show_what_the_band_shows() -> None:
    # As FlashAttention-2 reads a window: a lone open side counts as the number of keys.
    for m, n, lower, width in itertools.product(range(1, 7), range(1, 7), range(-8, 8), range(0, 15)):
        shown: list[tuple[int, int]] = []
        for rows, keys, (left, right) in _pieces(Band(lower, lower + width), m, n):
            assert all(side is None or 0 <= side < len(keys) for side in (left, right))
            lone = len(keys) if (left is None) != (right is None) else m + n
            first, last = (lone if side is None else side for side in (left, right))
            diagonal = len(keys) - len(rows)
            shown += [
                (row, key)
                for i, row in enumerate(rows)
                for j, key in enumerate(keys)
                if i + diagonal - first <= j <= i + diagonal + last
            ]
        want = {(i, j) for i in range(m) for j in range(n) if lower <= j - i <= lower + width}
        assert len(shown) == len(want) and set(shown) == want


# test_kernel_calls.py runs triton without a GPU.
@pytest.mark.parametrize("name", ["flash", "triton"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize(
    ("band", "m", "n"),
    [
        (Band(-40, 0), 300, 300),  # causal window
        (Band(-300, 0), 300, 300),  # causal
        (Band(-300, 300), 200, 300),  # full
        (Band(-30, 20), 700, 650),  # both sides
        (Band(10, 90), 300, 200),  # some rows see nothing
        (Band(-290, -200), 300, 200),  # the lower corner
        (Band(40, 400), 100, 150),  # the upper corner
        (Band(-500, -400), 300, 200),  # nothing
        (Band(-3, 700), 300, 300),  # open on the right
    ],
)
def test_bands_of_all_kinds(name: str, band: Band, m: int, n: int, softcap: float, dtype: str) -> None:
    if reason := KERNELS[name].supports(Request(DEVICE, getattr(torch, dtype), 64, 64, 1.0)):
        pytest.skip(f"{name}: {reason}")
    check(name, dtype, band, {"b": 2, "m": m, "n": n, "g": 2, "r": 2, "d": 64, "e": 64}, softcap, True)


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs CUDA")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["flash", "aten", "triton"])
@pytest.mark.parametrize(("d", "e"), [(192, 128), (256, 256), (80, 80), (64, 128), (128, 64), (16, 16)])
def test_head_dims_on_gpu(name: str, d: int, e: int, dtype: str) -> None:
    request = Request(DEVICE, getattr(torch, dtype), d, e, 1.0)
    if reason := KERNELS[name].supports(request):
        pytest.skip(f"{name}: {reason}")
    check(name, dtype, Band(-100, 0), {"b": 1, "m": 700, "n": 700, "g": 2, "r": 2, "d": d, "e": e}, 0.0, False)


def test_reference_memory_grows_with_the_window_only() -> None:
    rows, request = 20_000, Request(torch.device("cpu"), torch.float32, 4, 4, 1.0)
    q, k, v = (torch.randn(1, rows, 1, 4) for _ in range(3))
    out, lse = torch.empty_like(q), torch.empty(1, 1, rows)
    with torch.profiler.profile(profile_memory=True) as profile:
        KERNELS["reference"].forward(request, q, k, v, Call.single(rows, rows, Band(-63, 0)), out, lse)
    largest = max(event.cpu_memory_usage for event in profile.events() or [])
    # One tile: 128 rows by 191 keys, at most 8 bytes each, and the allocator's rounding.
    assert 0 < largest <= 8 * 128 * 191 + 512


def test_triton_without_the_package_or_a_gpu() -> None:
    request = Request(torch.device("cpu"), torch.float16, 64, 64, 1.0)
    assert "needs a GPU" in str(triton.supports(request))
    assert "not torch.float64" in str(triton.supports(replace(request, dtype=torch.float64)))
    assert "head dims from 1 to 256, got 64 and 257" in str(triton.supports(replace(request, v_head_dim=257)))
    for cache in (triton_package.missing, triton_package.programs):
        cache.cache_clear()
    try:
        with mock.patch.dict(sys.modules, {"dtensor_ring_swa.kernels.triton_kernels": None}):
            assert "needs triton (pip install 'dtensor-ring-swa[triton]')" in str(triton.supports(request))
    finally:
        for cache in (triton_package.missing, triton_package.programs):
            cache.cache_clear()


def test_packages_that_cannot_be_used_are_named_with_the_reason() -> None:
    broken = mock.Mock(side_effect=OSError("libcuda.so.1 is missing"))
    with mock.patch.object(triton_package, "programs", broken):
        assert triton_package.missing.__wrapped__() == (
            "triton was found, and cannot be imported here: OSError('libcuda.so.1 is missing')"
        )
    with mock.patch.object(flash_package.metadata, "version", lambda _: "4.9"):
        with mock.patch.object(flash_package, "interface", broken):
            assert flash_package.missing.__wrapped__() == (
                "flash-attn-4 4.9 was found, and cannot be imported here: OSError('libcuda.so.1 is missing')"
            )
        of_another_version = mock.Mock(_flash_attn_fwd=lambda q, k, v: None, spec=["_flash_attn_fwd"])
        with mock.patch.object(flash_package, "interface", lambda: of_another_version):
            assert re.fullmatch(
                r"flash-attn-4 4\.9 was found, whose _flash_attn_fwd lacks \['cu_seqlens_k', .*'out'.*\]; it wants .*",
                str(flash_package.missing.__wrapped__()),
            )


def test_a_named_kernel_never_falls_back() -> None:
    request = Request(torch.device("cpu"), torch.float64, 8, 8, 1.0)
    for name in ("aten", "flash", "triton"):
        with pytest.raises(NotImplementedError, match=r"(NVIDIA GPU|not torch.float64).*'reference'"):
            choose(name, request)
    assert choose("auto", request) is KERNELS["reference"]
    with pytest.raises(ValueError, match="unknown kernel 'cudnn'"):
        choose("cudnn", request)


@settings(max_examples=300)
@given(data=st.data(), window=st.tuples(*[st.integers(-1, 12)] * 2), ranks=st.integers(1, 3))
def test_flash_groups_show_what_the_blocks_show(data: st.DataObject, window: tuple[int, int], ranks: int) -> None:
    seq_len = data.draw(st.integers(ranks, 40))
    cu = (0, *sorted(data.draw(st.lists(st.integers(0, seq_len), max_size=6))), seq_len)
    plan = make_plan(seq_len, ranks, data.draw(st.integers(0, ranks - 1)), window, cu)
    for call in (*plan.interior_calls, *plan.boundary_calls):
        want = {
            (i + b.q_start, j + b.k_start)
            for b in call.blocks
            for i in range(b.q_stop - b.q_start)
            for j in range(b.k_stop - b.k_start)
            if b.band.lower <= j - i <= b.band.upper
        }
        groups = flash_groups(call)
        assert groups is not None and len(groups) <= (1 if window[1] == 0 else 2)
        shown = [pair for group in groups for pair in _pairs(group)]
        assert len(shown) == len(want) and set(shown) == want


def _pairs(group: Group) -> list[tuple[int, int]]:
    """What FlashAttention shows of a group: each document's last query is aligned with its last key."""
    q_edges, k_edges = (edges.tolist() for edges in boundaries_on(group, torch.device("cpu")))
    assert q_edges[-1] == group.rows.stop - group.rows.start and k_edges[-1] == group.keys.stop - group.keys.start
    left, right = (10**6 if side is None else side for side in group.window)
    return [
        (group.rows.start + i, group.keys.start + j)
        for (q_start, q_stop), (k_start, k_stop) in zip(
            itertools.pairwise(q_edges), itertools.pairwise(k_edges), strict=True
        )
        for i in range(q_start, q_stop)
        for j in range(k_start, k_stop)
        if -left <= (j - k_stop) - (i - q_stop) <= right
    ]


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs CUDA")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 40, 64, 128, 256])
def test_fused_merge_equals_the_definition(width: int, dtype: torch.dtype) -> None:
    out, part = (torch.randn(2, 70, 3, width, device=DEVICE).to(dtype)[:, 5:] for _ in range(2))
    lse, part_lse = (torch.randn(2, 3, 70, device=DEVICE)[:, :, 5:] * 40 for _ in range(2))
    lse[:, :, :9], part_lse[:, :, 5:20] = float("-inf"), float("-inf")
    out[:, :9], part[:, 5:20] = 0, 0
    joint = torch.logaddexp(lse.double(), part_lse.double())
    base = joint.masked_fill(joint == float("-inf"), 0.0)
    old, new = ((x.double() - base).exp().transpose(1, 2).unsqueeze(-1) for x in (lse, part_lse))
    want = out.double() * old + part.double() * new
    merge_(out, lse, part, part_lse)
    assert torch.allclose(lse.double(), joint, atol=1e-5, rtol=1e-6)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    assert torch.allclose(out.double(), want, atol=tolerance, rtol=tolerance)


def test_auto_takes_triton_for_narrow_windows_on_gpus_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for kernel in KERNELS.values():
        monkeypatch.setattr(kernel, "supports", lambda request: None)
    narrow = Request(torch.device("cuda"), torch.bfloat16, 64, 64, 1.0, neighbours=127)
    chosen = [
        choose("auto", request).NAME
        for request in (
            narrow, replace(narrow, neighbours=129), replace(narrow, neighbours=None), replace(narrow, v_head_dim=128),
            replace(narrow, device=torch.device("cpu")),
        )
    ]  # fmt: skip
    assert chosen == ["triton", "flash", "flash", "flash", "flash"]
