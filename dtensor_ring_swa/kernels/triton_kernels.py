"""The Triton programs: attention over intervals, forward and backward.

Heads that share keys lie in one tile: packed row ``p`` is row ``p // G`` of head ``p % G`` of the group
of G heads. So tiles of few rows are full, and the sum over a group is taken inside a program.

A program holds one tile and walks over the other side's rows that any of its own rows sees. Tiles that
all of its rows see whole are not masked. Scores are in units of log 2, and softmax is taken with exp2.

A tensor comes as ``(pointer, batch stride, row stride, head stride, column stride)``, compile-time sizes
as a ``Sizes``, ``bounds`` from ``intervals.py``, and ``terms`` as ``(pointer, length)``: for each batch row
and group lse and rowsum(dout * out) of the packed rows. ``few`` is None, or the end and the number of the keys
of ``few_keys.py``: they are walked over just before the others, so that they take no tile of their own.
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
def _scores(a, b, scale, cap, CAPPED: tl.constexpr):
    """Scores of the rows of ``a`` and ``b``, and the slope of the softcap at each."""
    s = tl.dot(a, tl.trans(b), input_precision="ieee") * scale
    slope = 1.0
    if CAPPED:
        t = _tanh(s)
        s, slope = t * cap, 1 - t * t
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
def _interval(bounds, layer, rows, count, G: tl.constexpr):
    """Each row's interval in a layer, times G."""
    exist = rows < count
    lo = tl.load(bounds + 2 * layer * count + rows, mask=exist, other=0) * G
    hi = tl.load(bounds + (2 * layer + 1) * count + rows, mask=exist, other=0) * G
    return lo, hi


@triton.jit
def _walk(bounds, layer, rows, count, before, G: tl.constexpr, ALIGN: tl.constexpr, STEP: tl.constexpr):
    """Each row's interval in a layer, times G, and the four edges of the tile's walk in steps of STEP.

    Between the second and the third edge every row sees all, and nothing has to be masked. The walk begins
    ``before`` places early, which are always masked.
    """
    exist = rows < count
    lo, hi = _interval(bounds, layer, rows, count, G)
    stop = tl.max(hi, 0)
    # If no row sees anything, an empty walk from 0: a pipelined loop adds steps to its start before it looks.
    start = tl.minimum(tl.min(tl.where(lo < hi, lo, _FAR), 0), stop) // ALIGN * ALIGN
    masked = tl.maximum(tl.max(lo, 0), start)
    start -= before
    inner = start + tl.cdiv(masked - start, STEP) * STEP
    outer = inner + (tl.min(tl.where(exist, hi, _FAR), 0) - inner) // STEP * STEP
    whole = outer > inner
    return lo, hi, (start, tl.where(whole, inner, start), tl.where(whole, outer, start), stop)


@triton.jit
def _few(bounds, layers, rows, count, few, start):
    """What is needed of few keys: where the walk has passed them, their end, each row's interval."""
    seen = None
    if few is not None:
        lo, hi = _interval(bounds, layers, rows, count, 1)
        seen = start + few[1], few[0], lo, hi
    return seen


@triton.jit
def _keys(
    x, batch, group, first, last, few, KEYS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """A tile of key rows of the walk."""
    start, at = first, tl.arange(0, KEYS)
    exist = first + at < last
    if MASKED and few is not None:
        start, at = 0, first + at
        at = tl.where(at < few[0], at - few[0] + few[1], at)
    return _load(x, _rows(x, batch, start, group, at, 0), exist, WIDTH, PADDED, MASKED)


@triton.jit
def _shown(first, lo, hi, few, KEYS: tl.constexpr):
    """Which places of a tile of the walk each row sees."""
    keys = first + tl.arange(0, KEYS)[None, :]
    shown = (keys >= lo[:, None]) & (keys < hi[:, None])
    if few is not None:
        at = keys - few[0] + few[1]
        shown = tl.where(keys < few[0], (at >= few[2][:, None]) & (at < few[3][:, None]), shown)
    return shown


@triton.jit(do_not_specialize=["M"])
def forward(q, k, v, sinks, out, lse, bounds, M, layers, few, scale, cap, S: tl.constexpr):
    """Write out and lse of one tile of packed query rows."""
    ROWS: tl.constexpr = S.ROWS
    WIDTH: tl.constexpr = S.PADDED_E
    # With a causal window the last tiles have the most to do, so they go first.
    packed = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS + tl.arange(0, ROWS)
    group, batch = tl.program_id(1), tl.cast(tl.program_id(2), tl.int64)
    row, head, exist = packed // S.G, packed % S.G, packed < M * S.G
    q_tile = _load(q, _rows(q, batch, 0, group * S.G, row, head), exist, S.D, S.PADDED_D, True)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if sinks is not None:
        top = tl.load(sinks + group * S.G + head).to(tl.float32) * _LOG2E
        total += 1
    for layer in range(layers):
        lo, hi, edges = _walk(bounds, layer, row, M, 0 if few is None else few[1], 1, 1, S.KEYS)
        also = _few(bounds, layers, row, M, few, edges[0])
        for part in tl.static_range(3):
            for first in tl.range(edges[part], edges[part + 1], S.KEYS):
                k_tile = _keys(k, batch, group, first, edges[part + 1], also, S.KEYS, S.D, S.PADDED_D, part != 1)
                s, _ = _scores(q_tile, k_tile, scale, cap, S.CAPPED)
                if part != 1:
                    s = tl.where(_shown(first, lo, hi, also, S.KEYS), s, float("-inf"))
                new = tl.maximum(top, tl.max(s, 1))
                # A row that has seen no key yet is at -inf, which must not be subtracted from itself.
                base = tl.where(new == float("-inf"), 0.0, new) if part != 1 else new
                p = tl.exp2(s - base[:, None])
                shrink = tl.exp2(top - base)
                total = total * shrink + tl.sum(p, 1)
                v_tile = _keys(v, batch, group, first, edges[part + 1], also, S.KEYS, S.E, S.PADDED_E, part != 1)
                acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * shrink[:, None], input_precision="ieee")
                top = new
    empty = total == 0
    divisor = tl.where(empty, 1.0, total)
    rows = _rows(out, batch, 0, group * S.G, row, head)
    _store(out, rows, acc / divisor[:, None], exist, S.E, S.PADDED_E)
    row_lse = tl.where(empty, float("-inf"), (top + tl.log2(divisor)) * _LN2)
    tl.store(_rows(lse, batch, 0, group * S.G, row, head), row_lse, mask=exist)


@triton.jit
def _through_keys(
    q_tile, dout_tile, row_lse, delta, k, v, batch, group, first, last, lo, hi, few, scale, cap, MASKED: tl.constexpr,
    S: tl.constexpr,
):  # fmt: skip
    """A tile of keys, and the weights and the slopes of the scores there."""
    k_tile = _keys(k, batch, group, first, last, few, S.KEYS, S.D, S.PADDED_D, MASKED)
    v_tile = _keys(v, batch, group, first, last, few, S.KEYS, S.E, S.PADDED_E, MASKED)
    s, slope = _scores(q_tile, k_tile, scale, cap, S.CAPPED)
    p = tl.exp2(s - row_lse[:, None])
    if MASKED:
        p = tl.where(_shown(first, lo, hi, few, S.KEYS), p, 0.0)
    dp = tl.dot(dout_tile, tl.trans(v_tile), input_precision="ieee")
    return k_tile, p, (p * (dp - delta[:, None]) * slope).to(k_tile.dtype)


@triton.jit(do_not_specialize=["M"])
def backward_queries(
    dout, q, k, v, out, lse, dq, terms, bounds, M, layers, few, dk_few, dv_few, scale, cap, dq_scale, S: tl.constexpr
):
    """Write dq of a tile of packed query rows, and lse and rowsum(dout * out) of each for ``backward_keys``.

    Of few keys also the tile's share of dk, without its factor, and of dv: ``[B, groups, tiles, few, D]``.
    """
    ROWS: tl.constexpr = S.ROWS
    WIDTH: tl.constexpr = S.PADDED_D
    packed = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS + tl.arange(0, ROWS)
    group, batch = tl.program_id(1), tl.cast(tl.program_id(2), tl.int64)
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
        lo, hi, edges = _walk(bounds, layer, row, M, 0 if few is None else few[1], 1, 1, S.KEYS)
        also = _few(bounds, layers, row, M, few, edges[0])
        if few is not None:
            # They lie in the first tile of the walk.
            k_tile, p, ds = _through_keys(
                q_tile, dout_tile, row_lse, delta, k, v, batch, group, edges[0], edges[3], lo, hi, also, scale, cap,
                True, S,
            )  # fmt: skip
            acc = tl.dot(ds, k_tile, acc, input_precision="ieee")
            slots = tl.arange(0, S.KEYS)
            share = (batch * tl.num_programs(1) + group) * tl.num_programs(0) + tl.program_id(0)
            dk_tile = tl.dot(tl.trans(ds), q_tile, input_precision="ieee")
            _store(dk_few, _rows(dk_few, 0, share, 0, 0, slots), dk_tile, slots < few[1], S.D, S.PADDED_D)
            dv_tile = tl.dot(tl.trans(p).to(dout_tile.dtype), dout_tile, input_precision="ieee")
            _store(dv_few, _rows(dv_few, 0, share, 0, 0, slots), dv_tile, slots < few[1], S.E, S.PADDED_E)
            start = edges[0] + S.KEYS
            edges = start, tl.maximum(edges[1], start), tl.maximum(edges[2], start), tl.maximum(edges[3], start)
        for part in tl.static_range(3):
            for first in tl.range(edges[part], edges[part + 1], S.KEYS):
                k_tile, p, ds = _through_keys(
                    q_tile, dout_tile, row_lse, delta, k, v, batch, group, first, edges[part + 1], lo, hi, also, scale,
                    cap, part != 1, S,
                )  # fmt: skip
                acc = tl.dot(ds, k_tile, acc, input_precision="ieee")
    _store(dq, _rows(dq, batch, 0, group * S.G, row, head), acc * dq_scale, exist, S.D, S.PADDED_D)


@triton.jit(do_not_specialize=["N"])
def backward_keys(dout, q, k, v, dk, dv, terms, bounds, N, layers, scale, cap, dk_scale, S: tl.constexpr):
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
        lo, hi, edges = _walk(bounds, layer, keys, N, 0, S.G, 4 * S.G, S.ROWS)
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
                s, slope = _scores(k_tile, q_tile, scale, cap, S.CAPPED)
                p = tl.exp2(s - row_lse[None, :])
                if part != 1:
                    p = tl.where((packed[None, :] >= lo[:, None]) & (packed[None, :] < hi[:, None]), p, 0.0)
                dv_acc = tl.dot(p.to(dout_tile.dtype), dout_tile, dv_acc, input_precision="ieee")
                dp = tl.dot(v_tile, tl.trans(dout_tile), input_precision="ieee")
                ds = p * (dp - delta[None, :]) * slope
                dk_acc = tl.dot(ds.to(q_tile.dtype), q_tile, dk_acc, input_precision="ieee")
    _store(dk, _rows(dk, batch, 0, group, keys, 0), dk_acc * dk_scale, keys < N, S.D, S.PADDED_D)
    _store(dv, _rows(dv, batch, 0, group, keys, 0), dv_acc, keys < N, S.E, S.PADDED_E)
