"""Triton kernels of attention by offset. The bias of the scores is computed, stored and used in tiles, never gathered.

A *pair matrix* holds one number for each pair of a row i and a column j, element (i, j) at i·ld + j. A table's entry
for the pair is in its row x = j − i + shift. So consecutive rows of the table are consecutive numbers in each row of
the matrix: with u = j − i, element (i, i + u) is at i·(ld + 1) + u. Only three kernels rely on this:

    table_product    M[i, j] = rows_i · T_x + t_x                 q·A and c; k·B; dO·V
    table_apply      out_i   = Σ_j M[i, j] T_x                    the value term; the A part of dq, the B part of dk
    table_gradient   dT_x    = Σ_pairs Σ_i M[i, j] rows_i         dA and dc; dB; dV

The key side is the same with keys as rows, queries as columns and the table read backwards. A table with fewer rows
than offsets comes with an index, the row of each offset x, and is read through it. `forward` and `backward` compute
attention in one pass over tiles of keys, or of queries, and add a tile of a pair matrix to the scores. No sum is
atomic, so results are the same in every run. Scores are multiplied by log₂ e, for exponentials to base 2.

Under a sliding window, only offsets u from `low` to `high` count. Loops over tiles go no further. Rows of a pair
matrix may then be closer in memory (a smaller ld), so that numbers of other offsets overlap. Those are never read
unmasked.

Pairs (batch, head) are numbered head · B + batch; a call sees `count` of them, from `first` on. Pair matrices have
rows and columns past those in use, and margins before and after, so that loads need no masks. Tiles at the end are
written whole, with finite numbers or zeros. What lies past them is never used.
"""

import triton
import triton.language as tl


# One build serves all values of these. There is none for 1, nor for multiples of 16, which only alignment needs.
PLAIN = "first count batch heads R C K P shift begin splits start row0 key0 dropout low high".split()


@triton.jit
def mix(x):
    """Hash 32 bits: two rounds of xorshift and multiply, with the constants of C. Wellons' hash prospector."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def kept(seed, pair, i, j, dropout):
    """Return which weights stay, (BM, BN) for vectors i and j, from (seed, pair, i, j) alone.

    dropout is in units of 2^−16.
    """
    word = tl.load(seed)
    key = mix(mix(word.to(tl.uint32)) ^ (word >> 32).to(tl.uint32))
    key = mix(key ^ pair.to(tl.uint32))
    row = mix(key ^ i.to(tl.uint32))
    column = mix(~key ^ j.to(tl.uint32))
    return (mix(row[:, None] ^ column[None, :]) >> 16).to(tl.int32) >= dropout


@triton.jit
def within(i, j, low, high):
    """Return which pairs have an offset from `low` to `high`, (BM, BN) for vectors i and j."""
    past = j[None, :] - (i + low)[:, None]  # negative numbers become large ones without a sign
    return past.to(tl.uint32) <= (high - low).to(tl.uint32)


@triton.jit(do_not_specialize=PLAIN)
def table_product(
    rows,
    table,
    index,
    scalars,
    out,
    first,
    batch,
    R,
    C,
    P,
    shift,
    factor,
    low,
    high,
    rows_b,
    rows_h,
    rows_i,
    table_h,
    table_x,
    index_x,
    scalars_h,
    scalars_x,
    ld,
    out_n,
    D: tl.constexpr,
    BM: tl.constexpr,
    BX: tl.constexpr,
    BAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """M[i, j] = factor · (rows_i · table_x + scalars_x). The only skewed store is here."""
    n = tl.program_id(2)
    head, row = (first + n) // batch, (first + n) % batch
    i0 = tl.program_id(1) * BM
    i, d = i0 + tl.arange(0, BM), tl.arange(0, D)
    x = shift + (low if BAND else 1 - i0 - BM) + tl.program_id(0) * BX + tl.arange(0, BX)
    there = (x >= 0) & (x < (tl.minimum(P, shift + high + 1) if BAND else P))
    acc = tl.zeros([BM, BX], tl.float32)
    if table is not None:
        left = tl.load(
            rows + row.to(tl.int64) * rows_b + head.to(tl.int64) * rows_h + i[:, None] * rows_i + d[None, :],
            mask=(i < R)[:, None],
            other=0.0,
        )
        at = x if index is None else tl.load(index + x * index_x, mask=there, other=0)
        right = tl.load(
            table + head.to(tl.int64) * table_h + at[:, None] * table_x + d[None, :], mask=there[:, None], other=0.0
        )
        acc = tl.dot(left, tl.trans(right), input_precision=PRECISION)
    if scalars is not None:
        acc += tl.load(scalars + head * scalars_h + x * scalars_x, mask=there, other=0.0).to(tl.float32)[None, :]
    j = x[None, :] - shift + i[:, None]
    used = (j >= 0) & (j < C)
    if BAND:
        used &= there[None, :]
    tl.store(out + n.to(tl.int64) * out_n + i[:, None] * ld + j, (acc * factor).to(out.dtype.element_ty), mask=used)


@triton.jit(do_not_specialize=PLAIN)
def table_apply(
    matrix,
    dense,
    table,
    index,
    initial,
    out,
    first,
    batch,
    R,
    C,
    P,
    shift,
    factor,
    low,
    high,
    dense_b,
    dense_h,
    dense_j,
    table_h,
    table_x,
    index_x,
    initial_b,
    initial_h,
    initial_i,
    out_b,
    out_h,
    out_i,
    ld,
    matrix_n,
    D: tl.constexpr,
    BM: tl.constexpr,
    BX: tl.constexpr,
    BAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """out_i = initial_i + factor · Σ_j M[i, j] dense_j + Σ_j M[i, j] table_x."""
    n = tl.program_id(1)
    head, row = ((first + n) // batch).to(tl.int64), ((first + n) % batch).to(tl.int64)
    i0 = tl.program_id(0) * BM
    i, d = i0 + tl.arange(0, BM), tl.arange(0, D)
    matrix += n.to(tl.int64) * matrix_n
    sum_ = tl.zeros([BM, D], tl.float32)
    if dense is not None:
        dense += row * dense_b + head * dense_h
        begin, end = 0, C
        if BAND:
            begin, end = span(i0, low, BM + high - low, C, BX)
        for j0 in range(begin, end, BX):
            j = j0 + tl.arange(0, BX)
            weights = tl.load(matrix + i[:, None] * ld + j[None, :])
            if BAND:
                weights = tl.where(within(i, j, low, high), weights, 0.0)
            vectors = tl.load(dense + j[:, None] * dense_j + d[None, :], mask=(j < C)[:, None], other=0.0)
            sum_ = tl.dot(weights.to(vectors.dtype), vectors, sum_, input_precision=PRECISION)
        sum_ = sum_ * factor
    if table is not None:
        table += head * table_h
        begin, end = -(i0 + BM), C - i0
        if BAND:
            begin, end = tl.maximum(begin, low), tl.minimum(end, high + 1)
        for u0 in range(begin, end, BX):
            u = u0 + tl.arange(0, BX)
            x = u + shift
            weights = tl.load(matrix + i[:, None] * (ld + 1) + u[None, :])
            j = i[:, None] + u[None, :]
            used = (j >= 0) & (j < C) & (i < R)[:, None]
            if BAND:
                used &= (u <= high)[None, :]
            weights = tl.where(used, weights, 0.0)
            there = (x >= 0) & (x < P)
            at = x if index is None else tl.load(index + x * index_x, mask=there, other=0)
            vectors = tl.load(table + at[:, None] * table_x + d[None, :], mask=there[:, None], other=0.0)
            sum_ = tl.dot(weights.to(vectors.dtype), vectors, sum_, input_precision=PRECISION)
    inside = (i < R)[:, None]
    if initial is not None:
        at = initial + row * initial_b + head * initial_h + i[:, None] * initial_i + d[None, :]
        sum_ += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    at = out + row * out_b + head * out_h + i[:, None] * out_i + d[None, :]
    tl.store(at, sum_.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=PLAIN)
def table_gradient(
    matrix,
    rows,
    out,
    out_scalars,
    first,
    count,
    batch,
    R,
    C,
    P,
    shift,
    begin,
    splits,
    low,
    high,
    rows_b,
    rows_h,
    rows_i,
    ld,
    matrix_n,
    D: tl.constexpr,
    BI: tl.constexpr,
    BX: tl.constexpr,
    BAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add Σ Σ_i M[i, i + u] rows_i to out[head · splits + split, x] (and Σ Σ_i M to out_scalars), float32.

    The first sum is over every `splits`-th pair of one head. u starts at `begin`, a multiple of BX.
    """
    head, split = first // batch + tl.program_id(1), tl.program_id(2)
    u0 = begin + tl.program_id(0) * BX
    u, d = u0 + tl.arange(0, BX), tl.arange(0, D)
    x = u + shift
    top = tl.maximum(-(u0 + BX - 1), 0) // BI * BI
    bottom = tl.minimum(R, C - u0)
    sum_ = tl.zeros([BX, D], tl.float32)
    sums = tl.zeros([BX], tl.float32)
    from_pair = tl.maximum(first, head * batch) - first
    to_pair = tl.minimum(first + count, (head + 1) * batch) - first
    for n in range(from_pair + split, to_pair, splits):
        pair = first + n
        row = (pair % batch).to(tl.int64)
        at = matrix + (pair - first).to(tl.int64) * matrix_n
        for i0 in range(top, bottom, BI):
            i = i0 + tl.arange(0, BI)
            weights = tl.load(at + i[:, None] * (ld + 1) + u[None, :])
            j = i[:, None] + u[None, :]
            used = (j >= 0) & (j < C) & (i < R)[:, None]
            if BAND:
                used &= ((u >= low) & (u <= high))[None, :]
            weights = tl.where(used, weights, 0.0)
            if out is not None:
                vectors = tl.load(
                    rows + row * rows_b + head.to(tl.int64) * rows_h + i[:, None] * rows_i + d[None, :],
                    mask=(i < R)[:, None],
                    other=0.0,
                )
                sum_ = tl.dot(tl.trans(weights.to(vectors.dtype)), vectors, sum_, input_precision=PRECISION)
            if out_scalars is not None:
                sums += tl.sum(weights.to(tl.float32), 0)
    there = (x >= 0) & (x < P)
    slot = (head * splits + split).to(tl.int64) * P
    if out is not None:
        at = out + (slot + x[:, None]) * D + d[None, :]
        tl.store(at, tl.load(at, mask=there[:, None], other=0.0) + sum_, mask=there[:, None])
    if out_scalars is not None:
        at = out_scalars + slot + x
        tl.store(at, tl.load(at, mask=there, other=0.0) + sums, mask=there)


@triton.jit
def scores(
    q,
    k,
    bias,
    key_bias,
    mask,
    i,
    j,
    start,
    R,
    K,
    scale,
    ld,
    key_ld,
    mask_i,
    low,
    high,
    CAUSAL: tl.constexpr,
    BAND: tl.constexpr,
    BY_KEY: tl.constexpr,
    EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute a tile of scores, times log₂ e, −∞ where i may not attend to j. Pointers are those of the pair.

    Args:
        start: index of row 0 among the keys.
        BY_KEY: whether the mask is by key, the same for every row.
        EVEN: whether R and K are multiples of the tile.
    """
    acc = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    if bias is not None:
        acc += tl.load(bias + i[:, None] * ld + j[None, :]).to(tl.float32)
    if key_bias is not None:
        at = key_bias + j[:, None] * key_ld + i[None, :]
        by_key = tl.load(at) if EVEN else tl.load(at, mask=(j < K)[:, None], other=0.0)
        if BAND:
            by_key = tl.where(within(j, i, -high, -low), by_key, 0.0)
        if by_key.dtype == tl.float32:
            acc += tl.trans(by_key)
        else:  # a product with the identity transposes exactly, in half the instructions
            n: tl.constexpr = j.shape[0]
            identity = (tl.arange(0, n)[:, None] == tl.arange(0, n)[None, :]).to(tl.float32).to(by_key.dtype)
            acc = tl.dot(tl.trans(by_key), identity, acc)
    if mask is not None:
        if BY_KEY:
            seen = tl.load(mask + j, mask=j < K, other=0) != 0
            acc = tl.where(seen[None, :], acc, float("-inf"))
        else:
            inside = (i < R)[:, None] & (j < K)[None, :]
            seen = tl.load(mask + i[:, None].to(tl.int64) * mask_i + j[None, :], mask=inside, other=0) != 0
            acc = tl.where(seen, acc, float("-inf"))
    elif not EVEN:
        acc = tl.where((j < K)[None, :], acc, float("-inf"))
    if CAUSAL:
        acc = tl.where(j[None, :] <= i[:, None] + start, acc, float("-inf"))
    if BAND:
        acc = tl.where(within(i, j, low, high), acc, float("-inf"))
    return acc


@triton.jit
def span(first, low, count, end, step: tl.constexpr):
    """Return begin and end of a loop in tiles of `step` over `count` places from first + low on, below `end`."""
    begin = tl.maximum(first + low, 0)
    return begin // step * step, tl.minimum(first + low + count, end)


@triton.jit
def vectors(at, i, step, R, D: tl.constexpr, EVEN: tl.constexpr):
    """Load rows i of a matrix of D columns, zeros from the R-th on. With EVEN, i never goes that far."""
    at += i[:, None] * step + tl.arange(0, D)[None, :]
    if EVEN:
        return tl.load(at)
    return tl.load(at, mask=(i < R)[:, None], other=0.0)


@triton.jit(do_not_specialize=PLAIN)
def forward(
    content,
    key,
    value,
    bias,
    key_bias,
    mask,
    visible_keys,
    seed,
    rest,
    rest_lse,
    out,
    lse,
    weights,
    first,
    batch,
    heads,
    R,
    K,
    start,
    row0,
    key0,
    low,
    high,
    scale,
    dropout,
    content_b,
    content_h,
    content_i,
    key_b,
    key_h,
    key_j,
    value_b,
    value_h,
    value_j,
    bias_n,
    bias_h,
    ld,
    key_bias_n,
    key_ld,
    mask_b,
    mask_h,
    mask_i,
    rest_b,
    rest_h,
    rest_i,
    out_b,
    out_h,
    out_i,
    lse_b,
    lse_h,
    weights_n,
    weights_ld,
    D: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    CAUSAL: tl.constexpr,
    BAND: tl.constexpr,
    BY_KEY: tl.constexpr,
    EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attention of R queries to K keys, and each row's log-sum-exp to base 2, 0 for a row that sees nothing.

    Args:
        bias: pair matrices; that of the n-th pair is at n · bias_n + (its head's number in the call) · bias_h.
        key_bias: pair matrices of the keys with the queries.
        mask: bytes, or None.
        visible_keys: number of keys up to the last visible one, for each row of the batch; or None.
        seed: seed of the dropout, or None.
        rest: output of attention to other keys, after dropout, or None.
        rest_lse: log-sum-exp of these keys, laid out like `lse`, which then covers all keys; −∞ where none is seen.
        weights: pair matrices that receive the weights, after dropout, or None.
        row0: number of row 0, for drawing the dropout; key0: that of key 0.
        low: with BAND, the first offset j − i that counts; `high` is the last.
    """
    i0, n = tl.program_id(0) * BM, tl.program_id(1)
    pair = first + n
    head, row = (pair // batch).to(tl.int64), (pair % batch).to(tl.int64)
    i, d = i0 + tl.arange(0, BM), tl.arange(0, D)
    inside = (i < R)[:, None]
    q = vectors(content + row * content_b + head * content_h, i, content_i, R, D, EVEN)
    key += row * key_b + head * key_h
    value += row * value_b + head * value_h
    if bias is not None:
        bias += n.to(tl.int64) * bias_n + (pair // batch - first // batch).to(tl.int64) * bias_h
    if key_bias is not None:
        key_bias += n.to(tl.int64) * key_bias_n
    if mask is not None:
        mask += row * mask_b + head * mask_h
    begin, stop = 0, K
    if BAND:
        begin, stop = span(i0, low, BM + high - low, K, BN)
    end = stop
    if visible_keys is not None:
        end = tl.minimum(end, tl.load(visible_keys + row))
    if CAUSAL:
        end = tl.minimum(end, i0 + BM + start)
    highest = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    sum_ = tl.zeros([BM, D], tl.float32)
    if rest is not None:
        highest = tl.load(rest_lse + row * lse_b + head * lse_h + i, mask=i < R, other=float("-inf"))
        total = tl.where(highest == float("-inf"), 0.0, 1.0)
        sum_ = vectors(rest + row * rest_b + head * rest_h, i, rest_i, R, D, EVEN).to(tl.float32)
        if seed is not None:
            sum_ = sum_ * ((65536 - dropout) / 65536.0)
    for j0 in range(begin, end, BN):
        j = j0 + tl.arange(0, BN)
        k = vectors(key, j, key_j, K, D, EVEN)
        s = scores(
            q,
            k,
            bias,
            key_bias,
            mask,
            i,
            j,
            start,
            R,
            K,
            scale,
            ld,
            key_ld,
            mask_i,
            low,
            high,
            CAUSAL,
            BAND,
            BY_KEY,
            EVEN,
            PRECISION,
        )
        now = tl.maximum(highest, tl.max(s, 1))
        base = tl.where(now == float("-inf"), 0.0, now)
        p = tl.exp2(s - base[:, None])
        shrink = tl.exp2(highest - base)
        total = total * shrink + tl.sum(p, 1)
        if seed is not None:
            p = tl.where(kept(seed, row * heads + head, i + row0, j + key0, dropout), p, 0.0)
        v = vectors(value, j, value_j, K, D, EVEN)
        sum_ = tl.dot(p.to(v.dtype), v, sum_ * shrink[:, None], input_precision=PRECISION)
        highest = now
    dead = total == 0.0
    inverse = tl.where(dead, 0.0, 1.0 / tl.where(dead, 1.0, total))
    log = tl.where(dead, 0.0, highest + tl.log2(tl.where(dead, 1.0, total)))
    if seed is not None:
        inverse = inverse * (65536.0 / (65536 - dropout))
    at = out + row * out_b + head * out_h + i[:, None] * out_i + d[None, :]
    tl.store(at, (sum_ * inverse[:, None]).to(out.dtype.element_ty), mask=inside)
    tl.store(lse + row * lse_b + head * lse_h + i, log, mask=i < R)
    if weights is not None:
        weights += n.to(tl.int64) * weights_n
        for j0 in range(begin, stop, BN):
            j = j0 + tl.arange(0, BN)
            k = vectors(key, j, key_j, K, D, EVEN)
            s = scores(
                q,
                k,
                bias,
                key_bias,
                mask,
                i,
                j,
                start,
                R,
                K,
                scale,
                ld,
                key_ld,
                mask_i,
                low,
                high,
                CAUSAL,
                BAND,
                BY_KEY,
                EVEN,
                PRECISION,
            )
            p = tl.exp2(s - log[:, None])
            if seed is not None:
                p = tl.where(kept(seed, row * heads + head, i + row0, j + key0, dropout), p, 0.0)
                p = p * (65536.0 / (65536 - dropout))
            tl.store(weights + i[:, None] * weights_ld + j[None, :], p.to(weights.dtype.element_ty))


@triton.jit(do_not_specialize=PLAIN)
def products(
    out,
    d_out,
    delta,
    R,
    out_b,
    out_h,
    out_i,
    d_out_b,
    d_out_h,
    d_out_i,
    delta_b,
    delta_h,
    D: tl.constexpr,
    BM: tl.constexpr,
):
    """delta_i = out_i · d_out_i, which is Σ_j α_ij ∂α_ij."""
    i, d = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, D)
    head, row = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    inside = (i < R)[:, None]
    one = tl.load(out + row * out_b + head * out_h + i[:, None] * out_i + d[None, :], inside, 0.0).to(tl.float32)
    other = tl.load(d_out + row * d_out_b + head * d_out_h + i[:, None] * d_out_i + d[None, :], inside, 0.0)
    acc = tl.sum(one * other.to(tl.float32), 1)
    tl.store(delta + row * delta_b + head * delta_h + i, acc, mask=i < R)


@triton.jit(do_not_specialize=PLAIN)
def backward(
    content,
    key,
    value,
    bias,
    key_bias,
    value_bias,
    mask,
    visible_keys,
    seed,
    d_out,
    lse,
    delta,
    d_key,
    d_value,
    d_scores,
    d_scores_by_key,
    weights,
    first,
    batch,
    heads,
    R,
    K,
    start,
    row0,
    key0,
    low,
    high,
    scale,
    factor,
    dropout,
    content_b,
    content_h,
    content_i,
    key_b,
    key_h,
    key_j,
    value_b,
    value_h,
    value_j,
    bias_n,
    bias_h,
    ld,
    key_bias_n,
    key_ld,
    value_bias_n,
    mask_b,
    mask_h,
    mask_i,
    d_out_b,
    d_out_h,
    d_out_i,
    lse_b,
    lse_h,
    d_key_b,
    d_key_h,
    d_key_j,
    d_scores_n,
    d_scores_ld,
    by_key_n,
    by_key_ld,
    D: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    CAUSAL: tl.constexpr,
    BAND: tl.constexpr,
    BY_KEY: tl.constexpr,
    EVEN: tl.constexpr,
    ADD: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients of a block of keys and their values, and of the scores, which are stored as pair matrices.

    Args:
        value_bias: pair matrices of d_out with V, with the `ld` of `bias`, or None.
        factor: s, for the gradient of the keys; `scale` includes log₂ e.
        d_scores_by_key: the same gradients for the key side, or None.
        weights: as in `forward`, with the strides of `d_scores`.
        ADD: whether to add to d_key and d_value, which have the same layout.
    """
    j0, n = tl.program_id(0) * BN, tl.program_id(1)
    pair = first + n
    head, row = (pair // batch).to(tl.int64), (pair % batch).to(tl.int64)
    j, d = j0 + tl.arange(0, BN), tl.arange(0, D)
    inside = (j < K)[:, None]
    k = vectors(key + row * key_b + head * key_h, j, key_j, K, D, EVEN)
    v = vectors(value + row * value_b + head * value_h, j, value_j, K, D, EVEN)
    content += row * content_b + head * content_h
    d_out += row * d_out_b + head * d_out_h
    lse += row * lse_b + head * lse_h
    delta += row * lse_b + head * lse_h
    d_scores += n.to(tl.int64) * d_scores_n
    if bias is not None:
        bias += n.to(tl.int64) * bias_n + (pair // batch - first // batch).to(tl.int64) * bias_h
    if key_bias is not None:
        key_bias += n.to(tl.int64) * key_bias_n
    if value_bias is not None:
        value_bias += n.to(tl.int64) * value_bias_n
    if weights is not None:
        weights += n.to(tl.int64) * d_scores_n
    if d_scores_by_key is not None:
        d_scores_by_key += n.to(tl.int64) * by_key_n
    if mask is not None:
        mask += row * mask_b + head * mask_h
    by_key = tl.zeros([BN, D], tl.float32)
    by_value = tl.zeros([BN, D], tl.float32)
    left = 1.0
    if seed is not None:
        left = 65536.0 / (65536 - dropout)
    begin, stop = 0, R
    if BAND:
        begin, stop = span(j0, -high, BN + high - low, R, BM)
    end = stop
    if visible_keys is not None:  # keys that no row sees still need zeros
        end = tl.where(j0 < tl.load(visible_keys + row), stop, begin)
    for i0 in range(begin, end, BM):
        i = i0 + tl.arange(0, BM)
        q = vectors(content, i, content_i, R, D, EVEN)
        s = scores(
            q,
            k,
            bias,
            key_bias,
            mask,
            i,
            j,
            start,
            R,
            K,
            scale,
            ld,
            key_ld,
            mask_i,
            low,
            high,
            CAUSAL,
            BAND,
            BY_KEY,
            EVEN,
            PRECISION,
        )
        log = tl.load(lse + i, mask=i < R, other=float("inf"))
        p = tl.exp2(s - log[:, None])
        g = vectors(d_out, i, d_out_i, R, D, EVEN)
        by_weight = tl.dot(g, tl.trans(v), input_precision=PRECISION)
        if value_bias is not None:
            by_weight += tl.load(value_bias + i[:, None] * ld + j[None, :]).to(tl.float32)
        dropped = p
        if seed is not None:
            stays = kept(seed, row * heads + head, i + row0, j + key0, dropout)
            dropped = tl.where(stays, p * left, 0.0)
            by_weight = tl.where(stays, by_weight * left, 0.0)
        by_value = tl.dot(tl.trans(dropped.to(g.dtype)), g, by_value, input_precision=PRECISION)
        mean = tl.load(delta + i, mask=i < R, other=0.0)
        by_score = p * (by_weight - mean[:, None])
        if BAND and value_bias is not None:  # value_bias may hold anything outside of the window
            by_score = tl.where(p > 0.0, by_score, 0.0)
        by_score = by_score.to(q.dtype)
        by_key = tl.dot(tl.trans(by_score), q, by_key, input_precision=PRECISION)
        tl.store(d_scores + i[:, None] * d_scores_ld + j[None, :], by_score)
        if d_scores_by_key is not None:
            tl.store(d_scores_by_key + j[:, None] * by_key_ld + i[None, :], tl.trans(by_score))
        if weights is not None:
            tl.store(weights + i[:, None] * d_scores_ld + j[None, :], dropped.to(q.dtype))
    if visible_keys is not None:
        nothing = tl.zeros([BM, BN], content.dtype.element_ty)
        for i0 in range(end, stop, BM):
            i = i0 + tl.arange(0, BM)
            tl.store(d_scores + i[:, None] * d_scores_ld + j[None, :], nothing)
            if d_scores_by_key is not None:
                tl.store(d_scores_by_key + j[:, None] * by_key_ld + i[None, :], tl.trans(nothing))
            if weights is not None:
                tl.store(weights + i[:, None] * d_scores_ld + j[None, :], nothing)
    at = row * d_key_b + head * d_key_h + j[:, None] * d_key_j + d[None, :]
    by_key = by_key * factor
    if ADD:
        by_key += tl.load(d_key + at, mask=inside, other=0.0)
        by_value += tl.load(d_value + at, mask=inside, other=0.0)
    tl.store(d_key + at, by_key.to(d_key.dtype.element_ty), mask=inside)
    tl.store(d_value + at, by_value.to(d_value.dtype.element_ty), mask=inside)
