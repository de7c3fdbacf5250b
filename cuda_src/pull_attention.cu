// Gradients of sums of table rows in 16-byte pieces, weighted by a softmax over the edges of targets.
//
// Called from pyg_direct/kernels/aggregate/typed_attention.py, which has the formulas; see aggregate.cu for the calling
// convention.

#include "items.cuh"

__device__ __forceinline__ float sum_lanes(float value, int lanes, unsigned mask)
{
    for (int step = lanes >> 1; step > 0; step >>= 1) value += __shfl_xor_sync(mask, value, step);
    return value;
}

template <class Kind> __device__ __forceinline__ float dot_piece(u64 grad, u64 out)
{
    float a[Kind::items], b[Kind::items], total = 0.0f;
    unpack(Kind(), *reinterpret_cast<const uint4 *>(grad), a);
    load_fp32<Kind::items>(reinterpret_cast<const float *>(out), b);
#pragma unroll
    for (int i = 0; i < Kind::items; ++i) total += a[i] * b[i];
    return total;
}

// *to = the scalar product of a head of a gradient and of a sum, fp32, of which each of `lanes` threads has a piece.
extern "C" __device__ int dot_head_16(int *, u64 to, u64 grad, u64 out, int lane, int lanes, unsigned mask, int kind)
{
    float total = kind == 0   ? dot_piece<Float32>(grad, out)
                  : kind == 1 ? dot_piece<Float16>(grad, out)
                              : dot_piece<Bfloat16>(grad, out);
    total = sum_lanes(total, lanes, mask);
    if (lane == 0) *reinterpret_cast<float *>(to) = total;
    return 0;
}

template <class Kind>
__device__ __forceinline__ void pull_row(u64 to, bool to_fp32, float *to_edges, const uint4 *x, const uint4 *grad,
                                         const int *target, const int *edge, const float *alpha, const float *totals,
                                         float own, const float *by_target, const float *vector, int first, int last,
                                         int shift, unsigned heads, unsigned pieces, int lane, int lanes,
                                         unsigned mask, float slope)
{
    const int EDGES = 2;
    float row[Kind::items], result[Kind::items] = {}, along = 0.0f;
    unpack(Kind(), *x, row);
    for (int i = first; i < last; i += EDGES) {
        uint4 raw[EDGES];
        unsigned at[EDGES];
        float weight[EDGES], mean[EDGES], score[EDGES];
#pragma unroll
        for (int u = 0; u < EDGES; ++u) {
            const int place = min(i + u, last - 1);
            const unsigned goal = (unsigned)target[place];
            at[u] = (unsigned)edge[place] * heads;
            raw[u] = grad[(u64)(goal + (unsigned)shift) * pieces];
            weight[u] = i + u < last ? alpha[at[u]] : 0.0f;
            mean[u] = totals[goal * heads];
            score[u] = own + by_target[goal * heads];
        }
#pragma unroll
        for (int u = 0; u < EDGES; ++u) {
            float value[Kind::items], product = 0.0f;
            unpack(Kind(), raw[u], value);
#pragma unroll
            for (int k = 0; k < Kind::items; ++k) {
                product += row[k] * value[k];
                result[k] += weight[u] * value[k];
            }
            float share = weight[u] * (sum_lanes(product, lanes, mask) - mean[u]);
            share = score[u] > 0.0f ? share : share * slope;
            along += share;
            if (lane == 0 && i + u < last) to_edges[at[u]] = share;
        }
    }
    float direction[Kind::items];
    load_fp32<Kind::items>(vector, direction);
#pragma unroll
    for (int k = 0; k < Kind::items; ++k) result[k] += along * direction[k];
    if constexpr (Kind::items == 4) {
        store_fp32<4>(to, 0, result);
    } else {
        if (to_fp32) store_fp32<8>(to, 0, result);
        else store(Kind(), to, 0, result);
    }
}

// Gradient of a piece of a source's row from its edges [first, last) in the order by source, and of their scores, in
// `to_edges`. `to`, `x` and `vector` are addresses of the piece; `grad` of the piece of the first row, which row
// target[i] + shift follows; `alpha`, `totals`, `by_target` and `to_edges` are addresses of the head's first number.
// Kind 0 is fp32, 1 fp16, 2 bfloat16; the result is of kind `to_kind`, that of rows or fp32.
extern "C" __device__ int pull_row_16(int *, u64 to, int to_kind, u64 to_edges, u64 x, u64 grad, u64 target, u64 edge,
                                      u64 alpha, u64 totals, float own, u64 by_target, u64 vector, long long first,
                                      long long last, long long shift, int heads, int pieces, int lane, int lanes,
                                      unsigned mask, float slope, int kind)
{
#define PULL(Kind)                                                                                                   \
    pull_row<Kind>(to, to_kind == 0, reinterpret_cast<float *>(to_edges), reinterpret_cast<const uint4 *>(x),        \
                   reinterpret_cast<const uint4 *>(grad), reinterpret_cast<const int *>(target),                     \
                   reinterpret_cast<const int *>(edge), reinterpret_cast<const float *>(alpha),                      \
                   reinterpret_cast<const float *>(totals), own, reinterpret_cast<const float *>(by_target),         \
                   reinterpret_cast<const float *>(vector), (int)first, (int)last, (int)shift, (unsigned)heads,      \
                   (unsigned)pieces, lane, lanes, mask, slope)
    if (kind == 0) PULL(Float32);
    else if (kind == 1) PULL(Float16);
    else PULL(Bfloat16);
#undef PULL
    return 0;
}

template <class Kind>
__device__ __forceinline__ void weigh_rows(float *to, const uint4 *x, const float *weights, int first, int last,
                                           unsigned heads, unsigned pieces)
{
    const int ROWS = 4;
    float total[Kind::items] = {};
    for (int i = first; i < last; i += ROWS) {
        uint4 raw[ROWS];
        float weight[ROWS];
#pragma unroll
        for (int u = 0; u < ROWS; ++u) {
            const u64 row = (u64)min(i + u, last - 1);
            raw[u] = x[row * pieces];
            weight[u] = i + u < last ? weights[row * heads] : 0.0f;
        }
#pragma unroll
        for (int u = 0; u < ROWS; ++u) {
            float value[Kind::items];
            unpack(Kind(), raw[u], value);
#pragma unroll
            for (int k = 0; k < Kind::items; ++k) total[k] += weight[u] * value[k];
        }
    }
    store_fp32<Kind::items>((u64)to, 0, total);
}

// Sum of a piece of the rows [first, last), times numbers of their head: fp32. `x` is the address of the piece of row
// 0, and `weights` of the head's number there.
extern "C" __device__ int weigh_rows_16(int *, u64 to, u64 x, u64 weights, long long first, long long last, int heads,
                                        int pieces, int kind)
{
#define WEIGH(Kind)                                                                                                  \
    weigh_rows<Kind>(reinterpret_cast<float *>(to), reinterpret_cast<const uint4 *>(x),                              \
                     reinterpret_cast<const float *>(weights), (int)first, (int)last, (unsigned)heads,              \
                     (unsigned)pieces)
    if (kind == 0) WEIGH(Float32);
    else if (kind == 1) WEIGH(Float16);
    else WEIGH(Bfloat16);
#undef WEIGH
    return 0;
}

__device__ __forceinline__ void store_as(Float32, u64 to, const float *value) { store_fp32<4>(to, 0, value); }
template <class Kind> __device__ __forceinline__ void store_as(Kind kind, u64 to, const float *value)
{
    store(kind, to, 0, value);
}

template <class Kind>
__device__ __forceinline__ void join_rows(u64 to, u64 total_at, const float *grad, int first, int last, int kept,
                                          unsigned pieces)
{
    const int ROWS = 2;
    float total[Kind::items] = {};
    for (int i = first; i < last; i += ROWS) {
        float value[ROWS][Kind::items];
#pragma unroll
        for (int u = 0; u < ROWS; ++u)
            load_fp32<Kind::items>(grad + (u64)min(i + u, last - 1) * pieces * Kind::items, value[u]);
#pragma unroll
        for (int u = 0; u < ROWS; ++u) {
            if (i + u >= last) break;
#pragma unroll
            for (int k = 0; k < Kind::items; ++k) total[k] += value[u][k];
            if (i + u < kept) store_as(Kind(), to + (u64)(i + u) * pieces * 16, value[u]);
        }
    }
    store_fp32<Kind::items>(total_at, 0, total);
}

// Sum of a piece of the fp32 rows [first, last) of a gradient, fp32 at `total`. Rows below `kept` are written to `to`,
// of kind `kind`. Addresses are of the piece of row 0.
extern "C" __device__ int join_rows_16(int *, u64 to, u64 total, u64 grad, long long first, long long last,
                                       long long kept, int pieces, int kind)
{
#define JOIN(Kind)                                                                                                   \
    join_rows<Kind>(to, total, reinterpret_cast<const float *>(grad), (int)first, (int)last, (int)kept,              \
                    (unsigned)pieces)
    if (kind == 0) JOIN(Float32);
    else if (kind == 1) JOIN(Float16);
    else JOIN(Bfloat16);
#undef JOIN
    return 0;
}

// Four numbers of a sum of fp32 rows: those of `bias`, unless it is zero, and of row `row` of each part [first, last)
// that has it. Part k begins at row starts[k] of `out`, whose address is that of the piece of row 0.
extern "C" __device__ int add_parts_4(int *, u64 to, u64 out, u64 bias, u64 starts, u64 sizes, long long first,
                                      long long last, long long row, int pieces)
{
    float total[4] = {};
    if (bias != 0) load_fp32<4>(reinterpret_cast<const float *>(bias), total);
    for (long long k = first; k < last; ++k) {
        if (row >= reinterpret_cast<const long long *>(sizes)[k]) continue;
        float value[4];
        const u64 at = (u64)(reinterpret_cast<const long long *>(starts)[k] + row) * (unsigned)pieces * 4;
        load_fp32<4>(reinterpret_cast<const float *>(out) + at, value);
#pragma unroll
        for (int i = 0; i < 4; ++i) total[i] += value[i];
    }
    store_fp32<4>(to, 0, total);
    return 0;
}
