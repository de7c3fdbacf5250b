// Sums of table rows in 16-byte pieces over the edges of a target, which Numba cannot express.
//
// Called from pyg_direct/kernels/aggregate.py. Functions follow Numba's calling convention: the first parameter is
// the place for a result, and the return value 0 means success.

typedef unsigned long long u64;

// Kinds of items, as in pyg_direct/ops/aggregate.py.
struct Float32 { static const int items = 4; };
struct Float16 { static const int items = 8; };
struct Bfloat16 { static const int items = 8; };

__device__ __forceinline__ void unpack(Float32, uint4 raw, float *value)
{
    value[0] = __uint_as_float(raw.x), value[1] = __uint_as_float(raw.y);
    value[2] = __uint_as_float(raw.z), value[3] = __uint_as_float(raw.w);
}

__device__ __forceinline__ float widen(Float16, unsigned bits)
{
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"((unsigned short)bits));
    return value;
}

__device__ __forceinline__ float widen(Bfloat16, unsigned bits) { return __uint_as_float(bits << 16); }

template <class Kind>
__device__ __forceinline__ void unpack(Kind kind, uint4 raw, float *value)
{
    const unsigned word[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        value[2 * i] = widen(kind, word[i] & 0xffff);
        value[2 * i + 1] = widen(kind, word[i] >> 16);
    }
}

__device__ __forceinline__ unsigned narrow(Float16, float value)
{
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

// To the nearest, ties to even; what is not a number stays so.
__device__ __forceinline__ unsigned narrow(Bfloat16, float value)
{
    const unsigned bits = __float_as_uint(value);
    return value != value ? 0x7fff : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

template <class Kind>
__device__ __forceinline__ void store(Kind kind, u64 to, int piece, const float *value)
{
    unsigned word[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) word[i] = narrow(kind, value[2 * i]) | narrow(kind, value[2 * i + 1]) << 16;
    reinterpret_cast<uint4 *>(to)[piece] = make_uint4(word[0], word[1], word[2], word[3]);
}

template <int items>
__device__ __forceinline__ void store_fp32(u64 to, int piece, const float *value)
{
    float4 *at = reinterpret_cast<float4 *>(to) + piece * (items / 4);
#pragma unroll
    for (int i = 0; i < items / 4; ++i)
        at[i] = make_float4(value[4 * i], value[4 * i + 1], value[4 * i + 2], value[4 * i + 3]);
}

// What is done with the rows of a target's edges.
enum Step { SUM, WEIGHTED, LARGEST, SMALLEST };

// What no item is better than, two of 16 bits or one of 32.
__device__ __forceinline__ unsigned worst(Float32, Step step) { return step == LARGEST ? 0xff800000 : 0x7f800000; }
__device__ __forceinline__ unsigned worst(Float16, Step step) { return step == LARGEST ? 0xfc00fc00 : 0x7c007c00; }
__device__ __forceinline__ unsigned worst(Bfloat16, Step step) { return step == LARGEST ? 0xff80ff80 : 0x7f807f80; }

// As `take_larger` of pyg_direct/kernels/extreme.py: the first of equals stays, and what is not a number wins.
template <Step STEP>
__device__ __forceinline__ float take_better(float best, float value)
{
    const bool is_no_better = STEP == LARGEST ? value <= best : value >= best;
    return best == best && !is_no_better ? value : best;
}

// Writes one piece of what comes of the rows of `count` targets in a row, one after the other. Their edges lie in a row
// too, so that ids of the next edges are asked for while rows of these are on their way. Counters are 32 bits wide,
// which leaves more registers to rows.
template <class Kind, class Index, Step STEP>
__device__ __forceinline__ void reduce_run(u64 to, const uint4 *x, const Index *ends, const Index *row,
                                           const float *weight, int num_edges, int e, int last, int count, int longest,
                                           int heads, unsigned pieces, int piece, float scale, bool to_fp32)
{
    // Rows that are asked for before the first is added: as many as registers hold without a detour over memory.
    const int ROWS = STEP == WEIGHTED ? 4 : 5;
    const bool IS_SUM = STEP == SUM || STEP == WEIGHTED;
    const unsigned none = IS_SUM ? 0 : worst(Kind(), STEP);
    const float start = IS_SUM ? 0.0f : __uint_as_float(worst(Float32(), STEP));
    const u64 row_bytes = (u64)pieces * Kind::items * (to_fp32 ? 4 : 2);
    int degree = last - e, after = last;
    if (count > 1) after = (int)min((long long)ends[2], (long long)num_edges);
    if (degree > longest) e = last;
    unsigned source[ROWS];
#pragma unroll
    for (int u = 0; u < ROWS; ++u)
        if (e + u < last) source[u] = row == nullptr ? e + u : (unsigned)row[e + u];
    float total[Kind::items];
#pragma unroll
    for (int i = 0; i < Kind::items; ++i) total[i] = start;
    while (true) {
        uint4 raw[ROWS];
        float share[ROWS];
#pragma unroll
        for (int u = 0; u < ROWS; ++u) {
            raw[u] = make_uint4(none, none, none, none);
            if (e + u < last) raw[u] = x[(u64)source[u] * pieces];
            share[u] = 1.0f;
            if (STEP == WEIGHTED && e + u < last) share[u] = weight[(long long)(e + u) * heads];
        }
        const bool ends_here = e + ROWS >= last;
        int next = e + ROWS, next_last = last, next_degree = degree;
        if (ends_here) {
            next = last, next_last = after, next_degree = next_last - next;
            if (next_degree > longest) next = next_last;
            if (count > 2) after = (int)min((long long)ends[3], (long long)num_edges);
        }
#pragma unroll
        for (int u = 0; u < ROWS; ++u)
            if (next + u < next_last) source[u] = row == nullptr ? next + u : (unsigned)row[next + u];
#pragma unroll
        for (int u = 0; u < ROWS; ++u) {
            float value[Kind::items];
            unpack(Kind(), raw[u], value);
#pragma unroll
            for (int i = 0; i < Kind::items; ++i) {
                if constexpr (STEP == WEIGHTED) total[i] += share[u] * value[i];
                else if constexpr (STEP == SUM) total[i] += value[i];
                else total[i] = take_better<STEP>(total[i], value[i]);
            }
        }
        if (ends_here) {
            const float factor = scale != 0.0f ? scale : 1.0f / (float)max(degree, 1);
#pragma unroll
            for (int i = 0; i < Kind::items; ++i) {
                if constexpr (IS_SUM) total[i] *= factor;
                else if (degree == 0) total[i] = 0.0f;
            }
            // Long rows are others'.
            if (degree <= longest) {
                if constexpr (Kind::items == 4) {
                    store_fp32<4>(to, piece, total);
                } else {
                    if (to_fp32) store_fp32<8>(to, piece, total);
                    else store(Kind(), to, piece, total);
                }
            }
            if (--count == 0) break;
            to += row_bytes, ++ends;
#pragma unroll
            for (int i = 0; i < Kind::items; ++i) total[i] = start;
        }
        e = next, last = next_last, degree = next_degree;
    }
}

#define REDUCE_RUN(Kind, Index, STEP)                                                                               \
    reduce_run<Kind, Index, STEP>(to, reinterpret_cast<const uint4 *>(x) + piece,                                   \
                                  reinterpret_cast<const Index *>(ends), reinterpret_cast<const Index *>(row),      \
                                  shares, num_edges, first, last, count, longest, heads, pieces, piece, scale,      \
                                  Kind::items == 4 || to_kind == 0)

template <class Kind>
__device__ __forceinline__ void sum_run_of(u64 to, u64 x, u64 ends, u64 row, int index_bytes, u64 weight,
                                           int num_edges, int first, int last, int count, int longest, int heads,
                                           int pieces, int piece, float scale, int to_kind)
{
    // A piece never spans two heads.
    const int head = heads == 1 ? 0 : piece / (pieces / heads);
    const float *shares = reinterpret_cast<const float *>(weight) + head;
    if (index_bytes == 8) {
        if (weight == 0) REDUCE_RUN(Kind, long long, SUM);
        else REDUCE_RUN(Kind, long long, WEIGHTED);
    } else {
        if (weight == 0) REDUCE_RUN(Kind, int, SUM);
        else REDUCE_RUN(Kind, int, WEIGHTED);
    }
}

// Piece `piece` of the weighted sums of rows row[e] of `x` for `count` targets: over edges [first, last) for the first,
// whose offsets are ends[0] and ends[1], times `scale`; a `scale` of zero stands for their mean. Rows with more than
// `longest` edges are left out. Kind 0 is fp32, 1 fp16, 2 bfloat16. A null `row` stands for row[e] = e, a null `weight` for ones.
// Rows and edges are fewer than 2^31.
extern "C" __device__ int sum_run_16(int *, u64 to, u64 x, u64 ends, u64 row, int index_bytes, u64 weight,
                                     long long num_edges, long long first, long long last, int count, int longest,
                                     int heads, int pieces, int piece, float scale, int kind, int to_kind)
{
    if (kind == 0)
        sum_run_of<Float32>(to, x, ends, row, index_bytes, weight, num_edges, first, last, count, longest, heads,
                            pieces, piece, scale, to_kind);
    else if (kind == 1)
        sum_run_of<Float16>(to, x, ends, row, index_bytes, weight, num_edges, first, last, count, longest, heads,
                            pieces, piece, scale, to_kind);
    else
        sum_run_of<Bfloat16>(to, x, ends, row, index_bytes, weight, num_edges, first, last, count, longest, heads,
                             pieces, piece, scale, to_kind);
    return 0;
}

template <class Kind>
__device__ __forceinline__ void extreme_run_of(u64 to, u64 x, u64 ends, u64 row, int index_bytes, int num_edges,
                                               int first, int last, int count, int longest, int pieces, int piece,
                                               bool largest, int to_kind)
{
    const float *shares = nullptr;
    const int heads = 1;
    const float scale = 1.0f;
    if (index_bytes == 8) {
        if (largest) REDUCE_RUN(Kind, long long, LARGEST);
        else REDUCE_RUN(Kind, long long, SMALLEST);
    } else {
        if (largest) REDUCE_RUN(Kind, int, LARGEST);
        else REDUCE_RUN(Kind, int, SMALLEST);
    }
}
#undef REDUCE_RUN

// As `sum_run_16`, of the largest items (`sign` 1) or of the smallest; zeros for a target without edges.
extern "C" __device__ int extreme_run_16(int *, u64 to, u64 x, u64 ends, u64 row, int index_bytes, long long num_edges,
                                         long long first, long long last, int count, int longest, int pieces,
                                         int piece, int sign, int kind, int to_kind)
{
    if (kind == 0)
        extreme_run_of<Float32>(to, x, ends, row, index_bytes, num_edges, first, last, count, longest, pieces, piece,
                                sign > 0, to_kind);
    else if (kind == 1)
        extreme_run_of<Float16>(to, x, ends, row, index_bytes, num_edges, first, last, count, longest, pieces, piece,
                                sign > 0, to_kind);
    else
        extreme_run_of<Bfloat16>(to, x, ends, row, index_bytes, num_edges, first, last, count, longest, pieces, piece,
                                 sign > 0, to_kind);
    return 0;
}

// Item `at` of 16-bit items becomes `value`; kind 1 is fp16, 2 bfloat16.
extern "C" __device__ int store_narrowed(int *, u64 to, long long at, float value, int kind)
{
    reinterpret_cast<unsigned short *>(to)[at] = kind == 1 ? narrow(Float16(), value) : narrow(Bfloat16(), value);
    return 0;
}

// *result = number / divisor, in 32 bits where they do.
extern "C" __device__ int quotient(int *result, u64 number, int divisor)
{
    *result = number >> 32 == 0 ? (unsigned)number / (unsigned)divisor : (int)(number / (u64)divisor);
    return 0;
}

// Four neighboring numbers of a slice's sum in several snapshots, see pyg_direct/kernels/sliced.py. ONE: they belong to
// one snapshot.
template <bool ONE>
__device__ __forceinline__ void add_slice(const uint4 *z, const int *col, const float *weight, int num_weights,
                                          const unsigned char *presence, const int *snapshot, int count,
                                          unsigned pieces, float *total)
{
    const int IN_FLIGHT = 4;
    unsigned mask = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) mask |= 1u << snapshot[i];
    for (int e = 0; e < count; e += IN_FLIGHT) {
        unsigned source[IN_FLIGHT], bits[IN_FLIGHT];
        uint4 raw[IN_FLIGHT];
#pragma unroll
        for (int u = 0; u < IN_FLIGHT; ++u) {
            bits[u] = 0;
            if (e + u < count) {
                source[u] = (unsigned)col[e + u];
                bits[u] = presence == nullptr ? mask : presence[e + u] & mask;
            }
        }
#pragma unroll
        for (int u = 0; u < IN_FLIGHT; ++u) {
            raw[u] = make_uint4(0, 0, 0, 0);
            if (bits[u]) raw[u] = z[(u64)source[u] * pieces];
        }
#pragma unroll
        for (int u = 0; u < IN_FLIGHT; ++u) {
            if (!bits[u]) continue;
            float value[4];
            unpack(Float32(), raw[u], value);
            const float *shares = weight + (long long)(e + u) * num_weights;
            if (ONE) {
                const float share = num_weights == 0 ? 1.0f : shares[num_weights > 1 ? snapshot[0] : 0];
                if (share != 0.0f) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) total[i] += share * value[i];
                }
            } else {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float share = num_weights == 0 ? 1.0f : shares[num_weights > 1 ? snapshot[i] : 0];
                    if ((bits[u] >> snapshot[i] & 1) && share != 0.0f) total[i] += share * value[i];
                }
            }
        }
    }
}

// Adds four items to a row of fp32, whoever else adds to it.
__device__ __forceinline__ void add_4(float *to, float a, float b, float c, float d)
{
#if __CUDA_ARCH__ >= 900
    atomicAdd(reinterpret_cast<float4 *>(to), make_float4(a, b, c, d));
#else
    atomicAdd(to, a), atomicAdd(to + 1, b), atomicAdd(to + 2, c), atomicAdd(to + 3, d);
#endif
}

// Adds numbers [number, number + 4) of a slice's sum to its row `to`; `col`, `weight` and `presence` begin at the first
// of `count` edges, `scale` at the target's; a null `weight`, `presence` or `scale` stands for ones. `write` is 1 where
// others add to the same numbers, 2 where nobody does and they are zero.
extern "C" __device__ int sum_slice_16(int *, u64 to, u64 z, u64 col, u64 weight, int num_weights, u64 presence,
                                       u64 scale, int count, int items, int number, int channels, int low, int write)
{
    float total[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    int snapshot[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) snapshot[i] = (number + i) / channels + low;
    const uint4 *table = reinterpret_cast<const uint4 *>(z) + number / 4;
    const int *cols = reinterpret_cast<const int *>(col);
    const float *weights = reinterpret_cast<const float *>(weight);
    const unsigned char *bits = reinterpret_cast<const unsigned char *>(presence);
    if (snapshot[0] == snapshot[3])
        add_slice<true>(table, cols, weights, num_weights, bits, snapshot, count, items / 4, total);
    else
        add_slice<false>(table, cols, weights, num_weights, bits, snapshot, count, items / 4, total);
    if (scale != 0) {
#pragma unroll
        for (int i = 0; i < 4; ++i) total[i] *= reinterpret_cast<const float *>(scale)[snapshot[i] - low];
    }
    float *at = reinterpret_cast<float *>(to) + number;
    if (write == 1) {
        add_4(at, total[0], total[1], total[2], total[3]);
    } else {
        float4 *row = reinterpret_cast<float4 *>(at);
        const float4 before = write == 2 ? make_float4(0.0f, 0.0f, 0.0f, 0.0f) : *row;
        *row = make_float4(before.x + total[0], before.y + total[1], before.z + total[2], before.w + total[3]);
    }
    return 0;
}

template <class Kind, class Index>
__device__ __forceinline__ void spread_span(u64 out, u64 grad, const Index *row, const float *weight, int count,
                                            int heads, unsigned pieces, float scale)
{
    float value[Kind::items];
    unpack(Kind(), *reinterpret_cast<const uint4 *>(grad), value);
#pragma unroll
    for (int i = 0; i < Kind::items; ++i) value[i] *= scale;
#pragma unroll 4
    for (int e = 0; e < count; ++e) {
        float *to = reinterpret_cast<float *>(out) + (u64)(unsigned)row[e] * pieces * Kind::items;
        const float share = weight != nullptr ? weight[(long long)e * heads] : 1.0f;
#pragma unroll
        for (int i = 0; i < Kind::items; i += 4)
            add_4(to + i, share * value[i], share * value[i + 1], share * value[i + 2], share * value[i + 3]);
    }
}

// The adjoint: adds piece `piece` of row `target` of `grad`, times weight[e] and `scale`, to rows row[e] of `out`, fp32,
// for the edges [first, last).
extern "C" __device__ int spread_span_16(int *, u64 out, u64 grad, u64 row, int index_bytes, u64 weight,
                                         long long first, long long last, long long target, int heads, int pieces,
                                         int piece, float scale, int kind)
{
    const int count = (int)(last - first), head = heads == 1 ? 0 : piece / (pieces / heads);
    const int items = kind == 0 ? 4 : 8;
    const float *shares = weight == 0 ? nullptr : reinterpret_cast<const float *>(weight) + first * heads + head;
    const u64 from = grad + ((u64)target * pieces + piece) * 16, to = out + (u64)piece * items * 4;
    const u64 ids = row + first * index_bytes;
    const int *narrow_ids = reinterpret_cast<const int *>(ids);
    const long long *wide_ids = reinterpret_cast<const long long *>(ids);
    if (kind == 0) {
        if (index_bytes == 8) spread_span<Float32>(to, from, wide_ids, shares, count, heads, pieces, scale);
        else spread_span<Float32>(to, from, narrow_ids, shares, count, heads, pieces, scale);
    } else if (kind == 1) {
        if (index_bytes == 8) spread_span<Float16>(to, from, wide_ids, shares, count, heads, pieces, scale);
        else spread_span<Float16>(to, from, narrow_ids, shares, count, heads, pieces, scale);
    } else {
        if (index_bytes == 8) spread_span<Bfloat16>(to, from, wide_ids, shares, count, heads, pieces, scale);
        else spread_span<Bfloat16>(to, from, narrow_ids, shares, count, heads, pieces, scale);
    }
    return 0;
}

// As `is_best` of pyg_direct/kernels/extreme.py: equal to the best, or not to be compared with it.
__device__ __forceinline__ bool is_best(float value, float best) { return !(value < best) && !(value > best); }

// Rows of `x` that are asked for at once; those behind `last` are the row before.
template <int ROWS, class Index>
__device__ __forceinline__ void load_rows(const uint4 *x, const Index *row, int e, int last, unsigned pieces,
                                          unsigned *source, uint4 *raw)
{
#pragma unroll
    for (int u = 0; u < ROWS; ++u) {
        const int edge = min(e + u, last - 1);
        source[u] = row == nullptr ? edge : (unsigned)row[edge];
    }
#pragma unroll
    for (int u = 0; u < ROWS; ++u) raw[u] = x[(u64)source[u] * pieces];
}

template <class Kind, class Index>
__device__ __forceinline__ void spread_equals(u64 out, const uint4 *x, u64 best, u64 grad, const Index *row,
                                              int *equals, int first, int last, unsigned pieces, int what,
                                              bool to_edges)
{
    const int ROWS = 4;
    float top[Kind::items], share[Kind::items];
    int same[Kind::items];
    unpack(Kind(), *reinterpret_cast<const uint4 *>(best), top);
    if (what == 2) {
#pragma unroll
        for (int i = 0; i < Kind::items; ++i) same[i] = equals[i];
    } else {
#pragma unroll
        for (int i = 0; i < Kind::items; ++i) same[i] = 0;
        for (int e = first; e < last; e += ROWS) {
            unsigned source[ROWS];
            uint4 raw[ROWS];
            load_rows<ROWS>(x, row, e, last, pieces, source, raw);
#pragma unroll
            for (int u = 0; u < ROWS; ++u) {
                float value[Kind::items];
                unpack(Kind(), raw[u], value);
#pragma unroll
                for (int i = 0; i < Kind::items; ++i) same[i] += e + u < last && is_best(value[i], top[i]) ? 1 : 0;
            }
        }
    }
    if (what == 1) {
#pragma unroll
        for (int i = 0; i < Kind::items; ++i) equals[i] = same[i];
        return;
    }
    unpack(Kind(), *reinterpret_cast<const uint4 *>(grad), share);
#pragma unroll
    for (int i = 0; i < Kind::items; ++i)
        share[i] = top[i] != top[i] ? top[i] : share[i] / (float)(same[i] + (top[i] == 0.0f ? 1 : 0));
    for (int e = first; e < last; e += ROWS) {
        unsigned source[ROWS];
        uint4 raw[ROWS];
        load_rows<ROWS>(x, row, e, last, pieces, source, raw);
#pragma unroll
        for (int u = 0; u < ROWS; ++u) {
            if (e + u >= last) break;
            float value[Kind::items];
            unpack(Kind(), raw[u], value);
            const u64 line = to_edges ? (u64)(e + u) : (u64)source[u];
            float *to = reinterpret_cast<float *>(out) + line * pieces * Kind::items;
#pragma unroll
            for (int i = 0; i < Kind::items; i += 4) {
                bool brings[4];
#pragma unroll
                for (int k = 0; k < 4; ++k) brings[k] = is_best(value[i + k], top[i + k]);
                if (brings[0] || brings[1] || brings[2] || brings[3])
                    add_4(to + i, brings[0] ? share[i] : 0.0f, brings[1] ? share[i + 1] : 0.0f,
                          brings[2] ? share[i + 2] : 0.0f, brings[3] ? share[i + 3] : 0.0f);
            }
        }
    }
}

// The adjoint of the largest or smallest items `best` of target `target`: adds piece `piece` of row `target` of `grad`,
// shared out among those that bring the item, to rows row[e] of `out`, fp32, for the edges [first, last); with
// `to_edges` to rows e. `what` 0: of a whole row. Of a slice, 1 writes to `equals`, of int32, how many bring each item,
// and 2 reads from there how many do in all slices.
extern "C" __device__ int spread_equals_16(int *, u64 out, u64 x, u64 best, u64 grad, u64 row, int index_bytes,
                                           u64 equals, long long first, long long last, long long target, int pieces,
                                           int piece, int kind, int what, int to_edges)
{
    const int items = kind == 0 ? 4 : 8;
    const u64 at = ((u64)target * pieces + piece) * 16, to = out + (u64)piece * items * 4;
    const uint4 *rows = reinterpret_cast<const uint4 *>(x) + piece;
    int *counts = reinterpret_cast<int *>(equals) + (u64)piece * items;
    const int *narrow_ids = reinterpret_cast<const int *>(row);
    const long long *wide_ids = reinterpret_cast<const long long *>(row);
#define SPREAD(Kind, ids) \
    spread_equals<Kind>(to, rows, best + at, grad + at, ids, counts, (int)first, (int)last, pieces, what, to_edges != 0)
    if (kind == 0) {
        if (index_bytes == 8) SPREAD(Float32, wide_ids);
        else SPREAD(Float32, narrow_ids);
    } else if (kind == 1) {
        if (index_bytes == 8) SPREAD(Float16, wide_ids);
        else SPREAD(Float16, narrow_ids);
    } else {
        if (index_bytes == 8) SPREAD(Bfloat16, wide_ids);
        else SPREAD(Bfloat16, narrow_ids);
    }
#undef SPREAD
    return 0;
}

// Scalar products of a head's part of the rows at both ends of `count` edges from `e` on, which `lanes` threads share;
// all of them call it. `mean` divides by the edges of the target.
template <class Kind, class Index>
__device__ __forceinline__ void dot_edges(float *out, const uint4 *grad, const uint4 *x, const Index *ends,
                                          const Index *row, const Index *target, int num_edges, int e, int heads,
                                          int head, unsigned pieces, int part, int lane, int lanes, unsigned mask,
                                          bool mean)
{
    const int EDGES = 4;
    u64 source[EDGES], goal[EDGES];
    float total[EDGES];
#pragma unroll
    for (int u = 0; u < EDGES; ++u) {
        const int edge = min(e + u, num_edges - 1);
        source[u] = (u64)(row == nullptr ? (unsigned)edge : (unsigned)row[edge]) * pieces;
        goal[u] = (u64)(unsigned)target[edge] * pieces;
        total[u] = 0.0f;
    }
    for (int piece = head * part + lane; piece < (head + 1) * part; piece += lanes) {
        uint4 left[EDGES], right[EDGES];
#pragma unroll
        for (int u = 0; u < EDGES; ++u) left[u] = x[source[u] + piece], right[u] = grad[goal[u] + piece];
#pragma unroll
        for (int u = 0; u < EDGES; ++u) {
            float a[Kind::items], b[Kind::items];
            unpack(Kind(), left[u], a);
            unpack(Kind(), right[u], b);
#pragma unroll
            for (int i = 0; i < Kind::items; ++i) total[u] += a[i] * b[i];
        }
    }
    for (int step = lanes >> 1; step > 0; step >>= 1)
#pragma unroll
        for (int u = 0; u < EDGES; ++u) total[u] += __shfl_xor_sync(mask, total[u], step);
#pragma unroll
    for (int u = 0; u < EDGES; ++u) {
        if (lane != u % lanes || e + u >= num_edges) continue;
        float scale = 1.0f;
        if (mean) {
            const Index *own = ends + (u64)(unsigned)target[e + u];
            scale /= (float)max((int)(min((long long)own[1], (long long)num_edges) - (long long)own[0]), 1);
        }
        out[(u64)(e + u) * heads + head] = total[u] * scale;
    }
}

// The products of four edges from `e` on, or of those that there are; see `dot_wide_rows_gpu`.
extern "C" __device__ int dot_edges_16(int *, u64 out, u64 grad, u64 x, u64 ends, u64 row, u64 target, int index_bytes,
                                       long long num_edges, long long e, int heads, int head, int pieces, int lane,
                                       int lanes, unsigned mask, int mean, int kind)
{
#define DOT(Kind, Index)                                                                                            \
    dot_edges<Kind>(reinterpret_cast<float *>(out), reinterpret_cast<const uint4 *>(grad),                          \
                    reinterpret_cast<const uint4 *>(x), reinterpret_cast<const Index *>(ends),                      \
                    reinterpret_cast<const Index *>(row), reinterpret_cast<const Index *>(target), (int)num_edges,  \
                    (int)e, heads, head, pieces, pieces / heads, lane, lanes, mask, mean != 0)
    if (kind == 0) {
        if (index_bytes == 8) DOT(Float32, long long);
        else DOT(Float32, int);
    } else if (kind == 1) {
        if (index_bytes == 8) DOT(Float16, long long);
        else DOT(Float16, int);
    } else {
        if (index_bytes == 8) DOT(Bfloat16, long long);
        else DOT(Bfloat16, int);
    }
#undef DOT
    return 0;
}
