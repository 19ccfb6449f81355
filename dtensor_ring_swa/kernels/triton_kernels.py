"""The Triton programs: attention over intervals, forward and backward.

Heads that share keys lie in one tile: packed row ``p`` is row ``p // G`` of head ``p % G`` of the group
of G heads. So tiles of few rows are full, and the sum over a group is taken inside a program.

Scores are in units of log 2, and softmax is taken with exp2. ``bounds`` are the tensors of
``intervals.py``. For each layer of them a program walks the tiles between the first and the last row
that any of its rows sees; tiles that all of its rows see whole are not masked.
"""

# Inside programs Triton's ranges are iterated and constants are plain numbers, which its types do not say.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)
_FAR = tl.constexpr(2**31 - 1)


@triton.jit
def _tanh(x):
    # Near zero 1 - 2 / (exp(2x) + 1) cancels, and the series does not.
    square = x * x
    series = x * (1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    far = 1 - 2 / (tl.exp2(x * (2 * _LOG2E)) + 1)
    return tl.where(square < 0.0625, series, far)


@triton.jit
def _scores(a, b, scale, cap, CAPPED: tl.constexpr):
    """Scores of the rows of ``a`` and ``b``, and the slope of the softcap at each."""
    s = tl.dot(a, tl.trans(b), input_precision="ieee") * scale
    slope = 1.0
    if CAPPED:
        t = _tanh(s)
        s = t * cap
        slope = 1 - t * t
    return s, slope


@triton.jit
def _load(pointers, rows_exist, WIDTH: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """Load a tile of rows, zeros where there are none."""
    columns_exist = tl.arange(0, BLOCK)[None, :] < WIDTH
    if MASKED and WIDTH == BLOCK:
        return tl.load(pointers, mask=rows_exist[:, None], other=0.0)
    elif MASKED:
        return tl.load(pointers, mask=rows_exist[:, None] & columns_exist, other=0.0)
    elif WIDTH == BLOCK:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=columns_exist, other=0.0)


@triton.jit
def _store(pointers, x, rows_exist, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    mask = rows_exist[:, None] & (tl.arange(0, BLOCK)[None, :] < WIDTH)
    tl.store(pointers, x.to(pointers.dtype.element_ty), mask=mask)


@triton.jit
def _packed_offsets(packed, first_head, row_stride, head_stride, G: tl.constexpr):
    row = tl.cast(packed // G, tl.int64)
    return row * row_stride + tl.cast(first_head + packed % G, tl.int64) * head_stride


@triton.jit
def _interval(bounds, layer, rows, total, G: tl.constexpr, STEP: tl.constexpr, ALIGN: tl.constexpr):
    """Each row's interval in a layer, and the four edges of the tile's walk in steps of STEP.

    Between the second and the third edge every row sees all, and nothing has to be masked.
    """
    exist = rows < total
    lo = tl.load(bounds + 2 * layer * total + rows, mask=exist, other=0) * G
    hi = tl.load(bounds + (2 * layer + 1) * total + rows, mask=exist, other=0) * G
    stop = tl.max(hi, 0)
    # If no row sees anything, an empty walk from 0: a pipelined loop adds steps to its start before it looks.
    start = tl.minimum(tl.min(tl.where(lo < hi, lo, _FAR), 0), stop) // ALIGN * ALIGN
    all_from = tl.max(lo, 0)
    all_to = tl.min(tl.where(exist, hi, _FAR), 0)
    inner = start + tl.cdiv(all_from - start, STEP) * STEP
    outer = inner + (all_to - inner) // STEP * STEP
    whole = (all_to > inner) & (outer > inner)
    return lo, hi, (start, tl.where(whole, inner, start), tl.where(whole, outer, start), stop)


@triton.jit
def _attend(
    acc, top, total, q_tile, k, v, k_offsets, v_offsets, k_stride, v_stride, first, last, lo, hi, scale, cap,
    D: tl.constexpr, E: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    CAPPED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Fold the keys ``first:last`` into the running softmax of a tile of queries."""
    for n in tl.range(first, last, BLOCK_N):
        keys = n + tl.arange(0, BLOCK_N)
        k_tile = _load(k + tl.cast(n, tl.int64) * k_stride + k_offsets, keys < last, D, BLOCK_D, MASKED)
        s, _ = _scores(q_tile, k_tile, scale, cap, CAPPED)
        if MASKED:
            s = tl.where((keys[None, :] >= lo[:, None]) & (keys[None, :] < hi[:, None]), s, float("-inf"))
        new = tl.maximum(top, tl.max(s, 1))
        # A row that has seen no key yet is at -inf, which must not be subtracted from itself.
        base = tl.where(new == float("-inf"), 0.0, new) if MASKED else new
        p = tl.exp2(s - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(p, 1)
        v_tile = _load(v + tl.cast(n, tl.int64) * v_stride + v_offsets, keys < last, E, BLOCK_E, MASKED)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * shrink[:, None], input_precision="ieee")
        top = new
    return acc, top, total


@triton.jit(do_not_specialize=["M"])
def forward(
    q, k, v, sinks, out, lse, bounds, q_strides, k_strides, v_strides, out_strides, lse_strides, M, layers, scale, cap,
    D: tl.constexpr, E: tl.constexpr, G: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Write out and lse of one tile of packed query rows."""
    # With a causal window the last tiles have the most to do, so they go first.
    packed = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M + tl.arange(0, BLOCK_M)
    group, batch = tl.program_id(1), tl.cast(tl.program_id(2), tl.int64)
    d, e, n = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_N)
    exist = packed < M * G
    q_offsets = batch * q_strides[0] + _packed_offsets(packed, group * G, q_strides[1], q_strides[2], G)
    q_tile = _load(q + q_offsets[:, None] + d[None, :] * q_strides[3], exist, D, BLOCK_D, True)
    k += batch * k_strides[0] + tl.cast(group, tl.int64) * k_strides[2]
    v += batch * v_strides[0] + tl.cast(group, tl.int64) * v_strides[2]
    k_offsets = n[:, None] * k_strides[1] + d[None, :] * k_strides[3]
    v_offsets = n[:, None] * v_strides[1] + e[None, :] * v_strides[3]

    acc = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if sinks is not None:
        top = tl.load(sinks + group * G + packed % G).to(tl.float32) * _LOG2E
        total = tl.where(top == float("-inf"), 0.0, 1.0)
    for layer in range(layers):
        lo, hi, edges = _interval(bounds, layer, packed // G, M, 1, BLOCK_N, 1)
        for part in tl.static_range(3):
            acc, top, total = _attend(
                acc, top, total, q_tile, k, v, k_offsets, v_offsets, k_strides[1], v_strides[1], edges[part],
                edges[part + 1], lo, hi, scale, cap, D, E, BLOCK_N, BLOCK_D, BLOCK_E, CAPPED, part != 1,
            )  # fmt: skip

    empty = total == 0
    divisor = tl.where(empty, 1.0, total)
    out_offsets = batch * out_strides[0] + _packed_offsets(packed, group * G, out_strides[1], out_strides[2], G)
    _store(out + out_offsets[:, None] + e[None, :] * out_strides[3], acc / divisor[:, None], exist, E, BLOCK_E)
    lse_offsets = batch * lse_strides[0] + _packed_offsets(packed, group * G, lse_strides[2], lse_strides[1], G)
    tl.store(lse + lse_offsets, tl.where(empty, float("-inf"), (top + tl.log2(divisor)) * _LN2), mask=exist)


@triton.jit
def _attend_backward(
    dq, q_tile, dout_tile, lse, delta, k, v, k_offsets, v_offsets, k_stride, v_stride, first, last, lo, hi, scale, cap,
    D: tl.constexpr, E: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    CAPPED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add what the keys ``first:last`` give to dq of a tile of queries."""
    for n in tl.range(first, last, BLOCK_N):
        keys = n + tl.arange(0, BLOCK_N)
        k_tile = _load(k + tl.cast(n, tl.int64) * k_stride + k_offsets, keys < last, D, BLOCK_D, MASKED)
        v_tile = _load(v + tl.cast(n, tl.int64) * v_stride + v_offsets, keys < last, E, BLOCK_E, MASKED)
        s, slope = _scores(q_tile, k_tile, scale, cap, CAPPED)
        p = tl.exp2(s - lse[:, None])
        if MASKED:
            p = tl.where((keys[None, :] >= lo[:, None]) & (keys[None, :] < hi[:, None]), p, 0.0)
        dp = tl.dot(dout_tile, tl.trans(v_tile), input_precision="ieee")
        ds = p * (dp - delta[:, None]) * slope
        dq = tl.dot(ds.to(k_tile.dtype), k_tile, dq, input_precision="ieee")
    return dq


@triton.jit(do_not_specialize=["M"])
def backward_queries(
    dout, q, k, v, out, lse, dq, row_terms, bounds, dout_strides, q_strides, k_strides, v_strides, out_strides,
    lse_strides, dq_strides, M, layers, terms_len, scale, cap, dq_scale,
    D: tl.constexpr, E: tl.constexpr, G: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Write dq of a tile of packed query rows, and lse and rowsum(dout * out) of each for ``backward_keys``."""
    packed = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M + tl.arange(0, BLOCK_M)
    group, batch = tl.program_id(1), tl.cast(tl.program_id(2), tl.int64)
    d, e, n = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_N)
    exist = packed < M * G
    q_offsets = batch * q_strides[0] + _packed_offsets(packed, group * G, q_strides[1], q_strides[2], G)
    q_tile = _load(q + q_offsets[:, None] + d[None, :] * q_strides[3], exist, D, BLOCK_D, True)
    dout_offsets = batch * dout_strides[0] + _packed_offsets(packed, group * G, dout_strides[1], dout_strides[2], G)
    dout_tile = _load(dout + dout_offsets[:, None] + e[None, :] * dout_strides[3], exist, E, BLOCK_E, True)
    out_offsets = batch * out_strides[0] + _packed_offsets(packed, group * G, out_strides[1], out_strides[2], G)
    out_tile = _load(out + out_offsets[:, None] + e[None, :] * out_strides[3], exist, E, BLOCK_E, True)
    delta = tl.sum(dout_tile.to(tl.float32) * out_tile.to(tl.float32), 1)
    lse_offsets = batch * lse_strides[0] + _packed_offsets(packed, group * G, lse_strides[2], lse_strides[1], G)
    row_lse = tl.load(lse + lse_offsets, mask=exist, other=0.0)
    # Rows that see no key have no score to subtract it from.
    row_lse = tl.where(row_lse == float("-inf"), 0.0, row_lse * _LOG2E)
    terms = row_terms + (batch * tl.num_programs(1) + group) * 2 * terms_len + packed
    tl.store(terms, row_lse, mask=packed < terms_len)
    tl.store(terms + terms_len, delta, mask=packed < terms_len)
    k += batch * k_strides[0] + tl.cast(group, tl.int64) * k_strides[2]
    v += batch * v_strides[0] + tl.cast(group, tl.int64) * v_strides[2]
    k_offsets = n[:, None] * k_strides[1] + d[None, :] * k_strides[3]
    v_offsets = n[:, None] * v_strides[1] + e[None, :] * v_strides[3]

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for layer in range(layers):
        lo, hi, edges = _interval(bounds, layer, packed // G, M, 1, BLOCK_N, 1)
        for part in tl.static_range(3):
            acc = _attend_backward(
                acc, q_tile, dout_tile, row_lse, delta, k, v, k_offsets, v_offsets, k_strides[1], v_strides[1],
                edges[part], edges[part + 1], lo, hi, scale, cap, D, E, BLOCK_N, BLOCK_D, BLOCK_E, CAPPED, part != 1,
            )  # fmt: skip
    dq_offsets = batch * dq_strides[0] + _packed_offsets(packed, group * G, dq_strides[1], dq_strides[2], G)
    _store(dq + dq_offsets[:, None] + d[None, :] * dq_strides[3], acc * dq_scale, exist, D, BLOCK_D)


@triton.jit
def _seen_backward(
    dk, dv, k_tile, v_tile, q, dout, terms, terms_len, first_head, q_strides, dout_strides, first, last, lo, hi, scale,
    cap, D: tl.constexpr, E: tl.constexpr, G: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr, CAPPED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add what the packed queries ``first:last`` give to dk and dv of a tile of keys; scores are transposed."""
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    for m in tl.range(first, last, BLOCK_M):
        packed = tl.multiple_of(m, 4) + tl.arange(0, BLOCK_M)
        if BLOCK_M % G == 0:
            # The walk starts at the first head of a row: the heads lie in every tile alike.
            base, inside = tl.cast(m // G, tl.int64), tl.arange(0, BLOCK_M)
        else:
            base, inside = tl.cast(0, tl.int64), packed
        q_offsets = _packed_offsets(inside, first_head, q_strides[1], q_strides[2], G)
        dout_offsets = _packed_offsets(inside, first_head, dout_strides[1], dout_strides[2], G)
        exist = packed < last
        q_tile = _load(
            q + base * q_strides[1] + (q_offsets[:, None] + d[None, :] * q_strides[3]), exist, D, BLOCK_D, MASKED
        )
        dout_tile = _load(
            dout + base * dout_strides[1] + (dout_offsets[:, None] + e[None, :] * dout_strides[3]),
            exist, E, BLOCK_E, MASKED,
        )  # fmt: skip
        if MASKED:
            lse = tl.load(terms + packed, mask=packed < terms_len, other=0.0)
            delta = tl.load(terms + terms_len + packed, mask=packed < terms_len, other=0.0)
        else:
            lse, delta = tl.load(terms + packed), tl.load(terms + terms_len + packed)
        s, slope = _scores(k_tile, q_tile, scale, cap, CAPPED)
        p = tl.exp2(s - lse[None, :])
        if MASKED:
            p = tl.where((packed[None, :] >= lo[:, None]) & (packed[None, :] < hi[:, None]), p, 0.0)
        dv = tl.dot(p.to(dout_tile.dtype), dout_tile, dv, input_precision="ieee")
        dp = tl.dot(v_tile, tl.trans(dout_tile), input_precision="ieee")
        ds = p * (dp - delta[None, :]) * slope
        dk = tl.dot(ds.to(q_tile.dtype), q_tile, dk, input_precision="ieee")
    return dk, dv


@triton.jit(do_not_specialize=["M", "N"])
def backward_keys(
    dout, q, k, v, dk, dv, row_terms, bounds, dout_strides, q_strides, k_strides, v_strides, dk_strides, dv_strides,
    M, N, layers, terms_len, scale, cap, dk_scale,
    D: tl.constexpr, E: tl.constexpr, G: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Write dk and dv of one tile of key rows, summed over the heads that share them."""
    keys = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    group, batch = tl.program_id(1), tl.cast(tl.program_id(2), tl.int64)
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    exist, wide, head = keys < N, tl.cast(keys, tl.int64)[:, None], tl.cast(group, tl.int64)
    k += batch * k_strides[0] + head * k_strides[2]
    v += batch * v_strides[0] + head * v_strides[2]
    k_tile = _load(k + wide * k_strides[1] + d[None, :] * k_strides[3], exist, D, BLOCK_D, True)
    v_tile = _load(v + wide * v_strides[1] + e[None, :] * v_strides[3], exist, E, BLOCK_E, True)
    q += batch * q_strides[0]
    dout += batch * dout_strides[0]
    terms = row_terms + (batch * tl.num_programs(1) + group) * 2 * terms_len

    dk_acc, dv_acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32), tl.zeros([BLOCK_N, BLOCK_E], tl.float32)
    for layer in range(layers):
        lo, hi, edges = _interval(bounds, layer, keys, N, G, BLOCK_M, 4 * G)
        for part in tl.static_range(3):
            dk_acc, dv_acc = _seen_backward(
                dk_acc, dv_acc, k_tile, v_tile, q, dout, terms, terms_len, group * G, q_strides, dout_strides,
                edges[part], edges[part + 1], lo, hi, scale, cap, D, E, G, BLOCK_M, BLOCK_D, BLOCK_E, CAPPED,
                part != 1,
            )  # fmt: skip
    dk += batch * dk_strides[0] + head * dk_strides[2]
    dv += batch * dv_strides[0] + head * dv_strides[2]
    _store(dk + wide * dk_strides[1] + d[None, :] * dk_strides[3], dk_acc * dk_scale, exist, D, BLOCK_D)
    _store(dv + wide * dv_strides[1] + e[None, :] * dv_strides[3], dv_acc, exist, E, BLOCK_E)
