// Rows of targets in 16-byte pieces, added to the rows of their sources, which Numba cannot express.
//
// Called from pyg_direct/kernels/aggregate/sum.py and max_min.py. Functions follow Numba's calling convention: the
// first parameter is the address for a result, and the return value 0 means success.

#include "items.cuh"

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

// The adjoint: adds piece `piece` of row `target` of `grad`, times weight[e] and `scale`, to rows row[e] of `out`,
// fp32, for the edges [first, last).
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

// As `is_best` of pyg_direct/kernels/aggregate/max_min.py: equal to the best, or not comparable with it.
__device__ __forceinline__ bool is_best(float value, float best) { return !(value < best) && !(value > best); }

// Rows of `x` that are requested at once; rows after `last` repeat the row before.
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

// The adjoint of the largest or smallest items `best` of target `target`, for the edges [first, last). It adds piece
// `piece` of row `target` of `grad`, shared among the rows that hold the item, to rows row[e] of `out`, fp32; with
// `to_edges` to rows e. `what` 0: of a whole row. For a slice, 1 writes to `equals`, of int32, how many rows hold each
// item, and 2 reads from there how many do in all slices.
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
