"""The Triton programs: attention over intervals, forward and backward.

Heads that share keys lie in one tile: packed row ``p`` is row ``p // G`` of head ``p % G`` of the group
of G heads. So tiles of few rows are full, and the sum over a group is taken inside a program.

A program holds one tile and walks over the other side's rows that any of its own rows sees. Tiles that
all of its rows see whole are not masked. Scores are in units of log 2, and softmax is taken with exp2.

A tensor comes as ``(pointer, batch stride, row stride, head stride, column stride)``, compile-time sizes
as a ``Sizes``, ``bounds`` from ``intervals.py``, ``scales`` as factor and cap, and ``terms`` as ``(pointer,
length)``: for each batch row and group lse and rowsum(dout * out) of the packed rows. ``sees`` is where a tile is,
``(batch, group)``, and each row's first and last key. As few keys as sink tokens are have a tile of their size.
"""

# Inside programs Triton's ranges are iterated and constants are plain values, which its types do not say.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

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
    return tl.where(square < 0.0625, series, 1 - 2 / (tl.exp2(x * (2 * _LOG2E)) + 1))


@triton.jit
def _scores(a, b, scales, CAPPED: tl.constexpr):
    """Scores of the rows of ``a`` and ``b``, and the slope of the softcap at each."""
    s = tl.dot(a, tl.trans(b), input_precision="ieee") * scales[0]
    slope = 1.0
    if CAPPED:
        t = _tanh(s)
        s, slope = t * scales[1], 1 - t * t
    return s, slope


@triton.jit
def _rows(x, batch, row, head, rows, heads):
    """Pointers to rows of a tensor: to the tensors ``rows`` and ``heads``, counted from ``row`` and ``head``."""
    start = x[0] + batch * x[1] + tl.cast(row, tl.int64) * x[2] + tl.cast(head, tl.int64) * x[3]
    return start + (tl.cast(rows, tl.int64) * x[2] + tl.cast(heads, tl.int64) * x[3])


@triton.jit
def _load(x, rows, exist, WIDTH: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr):
    """The tile of the rows at these pointers, zeros where there are none."""
    columns = tl.arange(0, PADDED)[None, :]
    mask = exist[:, None] | (not MASKED)
    if WIDTH != PADDED:
        mask &= columns < WIDTH
    return tl.load(rows[:, None] + columns * x[4], mask=mask, other=0.0)


@triton.jit
def _store(x, rows, tile, exist, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    columns = tl.arange(0, PADDED)[None, :]
    mask = exist[:, None] & (columns < WIDTH)
    tl.store(rows[:, None] + columns * x[4], tile.to(x[0].dtype.element_ty), mask=mask)


@triton.jit
def _interval(bounds, layer, rows, count, G: tl.constexpr, ALIGN: tl.constexpr, STEP: tl.constexpr):
    """Each row's interval in a layer, times G, and the four edges of the tile's walk in steps of STEP.

    Between the second and the third edge every row sees all, and nothing has to be masked.
    """
    exist = rows < count
    lo = tl.load(bounds + 2 * layer * count + rows, mask=exist, other=0) * G
    hi = tl.load(bounds + (2 * layer + 1) * count + rows, mask=exist, other=0) * G
    stop = tl.max(hi, 0)
    # If no row sees anything, an empty walk from 0: a pipelined loop adds steps to its start before it looks.
    start = tl.minimum(tl.min(tl.where(lo < hi, lo, _FAR), 0), stop) // ALIGN * ALIGN
    inner = start + tl.cdiv(tl.max(lo, 0) - start, STEP) * STEP
    outer = inner + (tl.min(tl.where(exist, hi, _FAR), 0) - inner) // STEP * STEP
    whole = outer > inner
    return lo, hi, (start, tl.where(whole, inner, start), tl.where(whole, outer, start), stop)


@triton.jit
def _keys(x, sees, first, last, KEYS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr):
    keys = tl.arange(0, KEYS)
    rows = _rows(x, sees[0][0], first, sees[0][1], keys, 0)
    return _load(x, rows, first + keys < last, WIDTH, PADDED, MASKED)


@triton.jit
def _visible(sees, first, KEYS: tl.constexpr):
    """Which keys of a tile each row sees."""
    keys = first + tl.arange(0, KEYS)[None, :]
    return (keys >= sees[1][:, None]) & (keys < sees[2][:, None])


@triton.jit
def _attend(
    q_tile, k, v, first, last, sees, acc, top, total, scales, KEYS: tl.constexpr, MASKED: tl.constexpr, S: tl.constexpr
):
    """Go on with softmax over a tile of keys: the weighted sum of values, the largest score, the sum of weights."""
    k_tile = _keys(k, sees, first, last, KEYS, S.D, S.PADDED_D, MASKED)
    s, _ = _scores(q_tile, k_tile, scales, S.CAPPED)
    if MASKED:
        s = tl.where(_visible(sees, first, KEYS), s, float("-inf"))
    new = tl.maximum(top, tl.max(s, 1))
    # A row that has seen no key yet is at -inf, which must not be subtracted from itself.
    base = tl.where(new == float("-inf"), 0.0, new) if MASKED else new
    p = tl.exp2(s - base[:, None])
    shrink = tl.exp2(top - base)
    v_tile = _keys(v, sees, first, last, KEYS, S.E, S.PADDED_E, MASKED)
    acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * shrink[:, None], input_precision="ieee")
    return acc, new, total * shrink + tl.sum(p, 1)


@triton.jit(do_not_specialize=["M"])
def forward(q, k, v, sinks, out, lse, bounds, M, layers, scales, S: tl.constexpr):
    """Write out and lse of one tile of packed query rows."""
    ROWS: tl.constexpr = S.ROWS
    WIDTH: tl.constexpr = S.PADDED_E
    # With a causal window the last tiles have the most to do, so they go first.
    packed = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS + tl.arange(0, ROWS)
    group, batch = tl.program_id(1), tl.cast(tl.program_id(2), tl.int64)
    place = batch, group
    row, head, exist = packed // S.G, packed % S.G, packed < M * S.G
    q_tile = _load(q, _rows(q, batch, 0, group * S.G, row, head), exist, S.D, S.PADDED_D, True)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if sinks is not None:
        top = tl.load(sinks + group * S.G + head).to(tl.float32) * _LOG2E
        total += 1
    for layer in range(layers):
        lo, hi, edges = _interval(bounds, layer, row, M, 1, 1, S.KEYS)
        sees = place, lo, hi
        if S.FEW and edges[3] - edges[0] <= S.FEW:
            acc, top, total = _attend(q_tile, k, v, edges[0], edges[3], sees, acc, top, total, scales, S.FEW, True, S)
        else:
            for part in tl.static_range(3):
                last = edges[part + 1]
                for first in tl.range(edges[part], last, S.KEYS):
                    acc, top, total = _attend(
                        q_tile, k, v, first, last, sees, acc, top, total, scales, S.KEYS, part != 1, S
                    )
    empty = total == 0
    divisor = tl.where(empty, 1.0, total)
    rows = _rows(out, batch, 0, group * S.G, row, head)
    _store(out, rows, acc / divisor[:, None], exist, S.E, S.PADDED_E)
    row_lse = tl.where(empty, float("-inf"), (top + tl.log2(divisor)) * _LN2)
    tl.store(_rows(lse, batch, 0, group * S.G, row, head), row_lse, mask=exist)


@triton.jit
def _attend_back(
    q_tile, dout_tile, k, v, first, last, sees, row_lse, delta, acc, scales, KEYS: tl.constexpr,
    MASKED: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Add to dq, without its factor, what comes through a tile of keys."""
    k_tile = _keys(k, sees, first, last, KEYS, S.D, S.PADDED_D, MASKED)
    v_tile = _keys(v, sees, first, last, KEYS, S.E, S.PADDED_E, MASKED)
    s, slope = _scores(q_tile, k_tile, scales, S.CAPPED)
    p = tl.exp2(s - row_lse[:, None])
    if MASKED:
        p = tl.where(_visible(sees, first, KEYS), p, 0.0)
    dp = tl.dot(dout_tile, tl.trans(v_tile), input_precision="ieee")
    ds = p * (dp - delta[:, None]) * slope
    return tl.dot(ds.to(k_tile.dtype), k_tile, acc, input_precision="ieee")


@triton.jit(do_not_specialize=["M"])
def backward_queries(dout, q, k, v, out, lse, dq, terms, bounds, M, layers, scales, dq_scale, S: tl.constexpr):
    """Write dq of a tile of packed query rows, and lse and rowsum(dout * out) of each for ``backward_keys``."""
    ROWS: tl.constexpr = S.ROWS
    WIDTH: tl.constexpr = S.PADDED_D
    packed = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS + tl.arange(0, ROWS)
    group, batch = tl.program_id(1), tl.cast(tl.program_id(2), tl.int64)
    place = batch, group
    row, head, exist = packed // S.G, packed % S.G, packed < M * S.G
    q_tile = _load(q, _rows(q, batch, 0, group * S.G, row, head), exist, S.D, S.PADDED_D, True)
    dout_tile = _load(dout, _rows(dout, batch, 0, group * S.G, row, head), exist, S.E, S.PADDED_E, True)
    out_tile = _load(out, _rows(out, batch, 0, group * S.G, row, head), exist, S.E, S.PADDED_E, True)
    delta = tl.sum(dout_tile.to(tl.float32) * out_tile.to(tl.float32), 1)
    row_lse = tl.load(_rows(lse, batch, 0, group * S.G, row, head), mask=exist, other=0.0)
    # Rows that see no key have no score to subtract it from.
    row_lse = tl.where(row_lse == float("-inf"), 0.0, row_lse * _LOG2E)
    places = terms[0] + (batch * tl.num_programs(1) + group) * 2 * terms[1] + packed
    tl.store(places, row_lse, mask=packed < terms[1])
    tl.store(places + terms[1], delta, mask=packed < terms[1])
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    for layer in range(layers):
        lo, hi, edges = _interval(bounds, layer, row, M, 1, 1, S.KEYS)
        sees = place, lo, hi
        if S.FEW and edges[3] - edges[0] <= S.FEW:
            acc = _attend_back(
                q_tile, dout_tile, k, v, edges[0], edges[3], sees, row_lse, delta, acc, scales, S.FEW, True, S
            )
        else:
            for part in tl.static_range(3):
                last = edges[part + 1]
                for first in tl.range(edges[part], last, S.KEYS):
                    acc = _attend_back(
                        q_tile, dout_tile, k, v, first, last, sees, row_lse, delta, acc, scales, S.KEYS, part != 1, S
                    )
    _store(dq, _rows(dq, batch, 0, group * S.G, row, head), acc * dq_scale, exist, S.D, S.PADDED_D)


@triton.jit(do_not_specialize=["N"])
def backward_keys(dout, q, k, v, dk, dv, terms, bounds, N, layers, scales, dk_scale, S: tl.constexpr):
    """Write dk and dv of one tile of key rows, summed over the heads that share them; scores are transposed."""
    KEYS: tl.constexpr = S.KEYS
    WIDTH_D: tl.constexpr = S.PADDED_D
    WIDTH_E: tl.constexpr = S.PADDED_E
    keys = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    group, batch = tl.program_id(1), tl.cast(tl.program_id(2), tl.int64)
    k_tile = _load(k, _rows(k, batch, 0, group, keys, 0), keys < N, S.D, S.PADDED_D, True)
    v_tile = _load(v, _rows(v, batch, 0, group, keys, 0), keys < N, S.E, S.PADDED_E, True)
    places = terms[0] + (batch * tl.num_programs(1) + group) * 2 * terms[1]
    dk_acc, dv_acc = tl.zeros([KEYS, WIDTH_D], tl.float32), tl.zeros([KEYS, WIDTH_E], tl.float32)
    for layer in range(layers):
        # Walks start at the first head of a row, and where a vector of four rows does.
        lo, hi, edges = _interval(bounds, layer, keys, N, S.G, 4 * S.G, S.ROWS)
        for part in tl.static_range(3):
            for first in tl.range(edges[part], edges[part + 1], S.ROWS):
                inside = tl.arange(0, S.ROWS)
                packed = tl.multiple_of(first, 4) + inside
                # Where every tile starts at a first head, what is added to its start is always the same.
                start = first // S.G
                if S.ROWS % S.G != 0:
                    start, inside = 0, packed
                row, head, exist = inside // S.G, inside % S.G, packed < edges[part + 1]
                q_tile = _load(q, _rows(q, batch, start, group * S.G, row, head), exist, S.D, S.PADDED_D, part != 1)
                rows = _rows(dout, batch, start, group * S.G, row, head)
                dout_tile = _load(dout, rows, exist, S.E, S.PADDED_E, part != 1)
                row_lse = tl.load(places + packed, mask=packed < terms[1], other=0.0)
                delta = tl.load(places + terms[1] + packed, mask=packed < terms[1], other=0.0)
                s, slope = _scores(k_tile, q_tile, scales, S.CAPPED)
                p = tl.exp2(s - row_lse[None, :])
                if part != 1:
                    p = tl.where((packed[None, :] >= lo[:, None]) & (packed[None, :] < hi[:, None]), p, 0.0)
                dv_acc = tl.dot(p.to(dout_tile.dtype), dout_tile, dv_acc, input_precision="ieee")
                dp = tl.dot(v_tile, tl.trans(dout_tile), input_precision="ieee")
                ds = p * (dp - delta[None, :]) * slope
                dk_acc = tl.dot(ds.to(q_tile.dtype), q_tile, dk_acc, input_precision="ieee")
    _store(dk, _rows(dk, batch, 0, group, keys, 0), dk_acc * dk_scale, keys < N, S.D, S.PADDED_D)
    _store(dv, _rows(dv, batch, 0, group, keys, 0), dv_acc, keys < N, S.E, S.PADDED_E)
