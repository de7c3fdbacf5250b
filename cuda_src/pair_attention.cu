// Attention whose scores are made of rows of both ends of an edge, in 16-byte pieces, and its gradients.
//
// Called from pyg_direct/kernels/aggregate/typed_attention.py, which has the formulas; see aggregate.cu for the calling
// convention.

#include "attention.cuh"
#include "items.cuh"

template <class Kind> __device__ __forceinline__ void store_row(Kind kind, u64 to, bool to_fp32, const float *value)
{
    if constexpr (Kind::items == 4) {
        store_fp32<4>(to, 0, value);
    } else {
        if (to_fp32) store_fp32<8>(to, 0, value);
        else store(kind, to, 0, value);
    }
}

template <class Kind, bool DOT>
__device__ __forceinline__ void attend_pair(u64 to, float *alpha, const uint4 *keys, const uint4 *query,
                                            const float *vector, const int *row, int first, int last, unsigned heads,
                                            unsigned pieces, Group group, float slope)
{
    const int ROWS = 2, items = Kind::items;
    const unsigned stride = DOT ? 2 * pieces : pieces;
    float own[items], direction[items] = {}, total[items] = {}, best = LEAST, sum = 0.0f;
    unpack(Kind(), *query, own);
    if (!DOT) load_fp32<items>(vector, direction);
    for (int e = first; e < last; e += ROWS) {
        uint4 key[ROWS], value[ROWS];
        float score[ROWS], largest = best;
#pragma unroll
        for (int u = 0; u < ROWS; ++u) {
            const uint4 *from = keys + (u64)(unsigned)row[min(e + u, last - 1)] * stride;
            key[u] = from[0];
            value[u] = DOT ? from[pieces] : key[u];
        }
#pragma unroll
        for (int u = 0; u < ROWS; ++u) {
            float part[items], product = 0.0f;
            unpack(Kind(), key[u], part);
#pragma unroll
            for (int i = 0; i < items; ++i)
                product += DOT ? part[i] * own[i] : direction[i] * bend(part[i] + own[i], slope);
            score[u] = group.sum(product);
            if (e + u >= last) score[u] = NO_SCORE;
            else if (alpha != nullptr && group.lane == 0) alpha[(unsigned)(e + u) * heads] = score[u];
            largest = fmaxf(largest, score[u]);
        }
        const float shrink = __expf(best - largest);
        best = largest, sum *= shrink;
#pragma unroll
        for (int i = 0; i < items; ++i) total[i] *= shrink;
#pragma unroll
        for (int u = 0; u < ROWS; ++u) {
            const float share = __expf(score[u] - best);
            float part[items];
            unpack(Kind(), value[u], part);
            sum += share;
#pragma unroll
            for (int i = 0; i < items; ++i) total[i] += share * part[i];
        }
    }
    // If all scores are minus infinity, the result is a NaN, as in the softmax.
    const float scale = sum == 0.0f && first < last ? NOT_A_NUMBER : 1.0f / (sum + TINY);
    if (alpha != nullptr) {
        __syncwarp(group.mask);
        for (int e = first + group.lane; e < last; e += group.lanes) {
            float *at = alpha + (unsigned)e * heads;
            *at = __expf(*at - best) * scale;
        }
    }
#pragma unroll
    for (int i = 0; i < items; ++i) total[i] *= scale;
    store_fp32<items>(to, 0, total);
}

// A source's part of the gradients of keys and of values, from its edges in the order by source.
template <class Kind, bool DOT>
__device__ __forceinline__ void pull_key(u64 to, bool to_fp32, float *to_edges, const uint4 *keys, const uint4 *query,
                                         const uint4 *grad, const float *vector, const int *target, const int *edge,
                                         const float *alpha, const float *totals, int first, int last, int shift,
                                         unsigned heads, unsigned pieces, Group group, float slope)
{
    const int EDGES = 2, items = Kind::items;
    float key[items], value[items], direction[items] = {}, to_key[items] = {}, to_value[items] = {};
    unpack(Kind(), keys[0], key);
    unpack(Kind(), DOT ? keys[pieces] : keys[0], value);
    if (!DOT) load_fp32<items>(vector, direction);
    for (int i = first; i < last; i += EDGES) {
        uint4 raw[EDGES], other[EDGES];
        unsigned at[EDGES];
        float weight[EDGES], mean[EDGES];
#pragma unroll
        for (int u = 0; u < EDGES; ++u) {
            const int place = min(i + u, last - 1);
            const unsigned goal = (unsigned)target[place];
            at[u] = (unsigned)edge[place] * heads;
            raw[u] = grad[(u64)(goal + (unsigned)shift) * pieces];
            other[u] = query[(u64)goal * pieces];
            weight[u] = i + u < last ? alpha[at[u]] : 0.0f;
            mean[u] = totals[goal * heads];
        }
#pragma unroll
        for (int u = 0; u < EDGES; ++u) {
            float pulled[items], own[items], product = 0.0f;
            unpack(Kind(), raw[u], pulled), unpack(Kind(), other[u], own);
#pragma unroll
            for (int k = 0; k < items; ++k) {
                product += value[k] * pulled[k];
                to_value[k] += weight[u] * pulled[k];
            }
            const float share = weight[u] * (group.sum(product) - mean[u]);
            if (group.lane == 0 && i + u < last) to_edges[at[u]] = share;
#pragma unroll
            for (int k = 0; k < items; ++k)
                to_key[k] += share * (DOT ? own[k] : direction[k] * (key[k] + own[k] > 0.0f ? 1.0f : slope));
        }
    }
    if (DOT) {
        store_row(Kind(), to, to_fp32, to_key);
        store_row(Kind(), to + (u64)pieces * (to_fp32 ? items * 4 : 16), to_fp32, to_value);
    } else {
#pragma unroll
        for (int k = 0; k < items; ++k) to_key[k] += to_value[k];
        store_row(Kind(), to, to_fp32, to_key);
    }
}

// A target's gradient of its query, and its part of the gradient of the vector.
template <class Kind, bool DOT>
__device__ __forceinline__ void pull_query(u64 to, float *to_vector, const float *shares, const uint4 *keys,
                                           const uint4 *query, const float *vector, const int *row, int first,
                                           int last, unsigned heads, unsigned pieces, float slope)
{
    const int ROWS = 4, items = Kind::items;
    const unsigned stride = DOT ? 2 * pieces : pieces;
    float own[items], direction[items] = {}, to_own[items] = {}, along[items] = {};
    unpack(Kind(), *query, own);
    if (!DOT) load_fp32<items>(vector, direction);
    for (int e = first; e < last; e += ROWS) {
        uint4 raw[ROWS];
        float share[ROWS];
#pragma unroll
        for (int u = 0; u < ROWS; ++u) {
            raw[u] = keys[(u64)(unsigned)row[min(e + u, last - 1)] * stride];
            share[u] = e + u < last ? shares[(unsigned)(e + u) * heads] : 0.0f;
        }
#pragma unroll
        for (int u = 0; u < ROWS; ++u) {
            float key[items];
            unpack(Kind(), raw[u], key);
#pragma unroll
            for (int k = 0; k < items; ++k) {
                const float both = key[k] + own[k];
                to_own[k] += share[u] * (DOT ? key[k] : direction[k] * (both > 0.0f ? 1.0f : slope));
                if (!DOT) along[k] += share[u] * bend(both, slope);
            }
        }
    }
    store_row(Kind(), to, false, to_own);
    if (!DOT) store_fp32<items>(reinterpret_cast<u64>(to_vector), 0, along);
}

#define CHOOSE(CALL)                                                                                                 \
    if (kind == 0) {                                                                                                 \
        if (vector == 0) CALL(Float32, true);                                                                        \
        else CALL(Float32, false);                                                                                   \
    } else if (kind == 1) {                                                                                          \
        if (vector == 0) CALL(Float16, true);                                                                        \
        else CALL(Float16, false);                                                                                   \
    } else {                                                                                                         \
        if (vector == 0) CALL(Bfloat16, true);                                                                       \
        else CALL(Bfloat16, false);                                                                                  \
    }

// One piece of the sum of a target with the edges [first, last), and raw weights of its edges in `alpha`, unless it is
// zero. `to`, `keys`, `query` and `vector` are addresses of the piece, `alpha` of the head's first number. If `vector`
// is zero, a score is the product of key and query, and values follow the keys in each row. Kind 0 is fp32, 1 fp16, 2
// bfloat16; sums are fp32.
extern "C" __device__ int attend_pair_16(int *, u64 to, u64 alpha, u64 keys, u64 query, u64 vector, u64 row,
                                         long long first, long long last, int heads, int pieces, int lane, int lanes,
                                         unsigned mask, float slope, int kind)
{
    const Group group = {lane, lanes, mask};
#define ATTEND(Kind, DOT)                                                                                            \
    attend_pair<Kind, DOT>(to, reinterpret_cast<float *>(alpha), reinterpret_cast<const uint4 *>(keys),            \
                           reinterpret_cast<const uint4 *>(query), reinterpret_cast<const float *>(vector),          \
                           reinterpret_cast<const int *>(row), (int)first, (int)last, (unsigned)heads,               \
                           (unsigned)pieces, group, slope)
    CHOOSE(ATTEND)
#undef ATTEND
    return 0;
}

// One piece of the gradients of a source's key and value from its edges [first, last) in the order by source, and
// gradients of their scores in `to_edges`. Gradient target[i] + shift belongs to edge i. `to`, `keys` and `vector` are
// addresses of the piece, `query` and `grad` of the piece of the first row, and the rest of the head's first number.
extern "C" __device__ int pull_key_16(int *, u64 to, int to_kind, u64 to_edges, u64 keys, u64 query, u64 grad,
                                      u64 vector, u64 target, u64 edge, u64 alpha, u64 totals, long long first,
                                      long long last, long long shift, int heads, int pieces, int lane, int lanes,
                                      unsigned mask, float slope, int kind)
{
    const Group group = {lane, lanes, mask};
#define PULL(Kind, DOT)                                                                                              \
    pull_key<Kind, DOT>(to, to_kind == 0, reinterpret_cast<float *>(to_edges), reinterpret_cast<const uint4 *>(keys),\
                        reinterpret_cast<const uint4 *>(query), reinterpret_cast<const uint4 *>(grad),               \
                        reinterpret_cast<const float *>(vector), reinterpret_cast<const int *>(target),              \
                        reinterpret_cast<const int *>(edge), reinterpret_cast<const float *>(alpha),                 \
                        reinterpret_cast<const float *>(totals), (int)first, (int)last, (int)shift, (unsigned)heads, \
                        (unsigned)pieces, group, slope)
    CHOOSE(PULL)
#undef PULL
    return 0;
}

// One piece of the gradient of a target's query from the gradients `shares` of its scores, and of its part in the
// gradient of the vector, fp32. `to`, `to_vector`, `query` and `vector` are addresses of the piece, `keys` of the piece
// of the first row, and `shares` of the head's first number.
extern "C" __device__ int pull_query_16(int *, u64 to, u64 to_vector, u64 shares, u64 keys, u64 query, u64 vector,
                                        u64 row, long long first, long long last, int heads, int pieces, float slope,
                                        int kind)
{
#define PULL(Kind, DOT)                                                                                              \
    pull_query<Kind, DOT>(to, reinterpret_cast<float *>(to_vector), reinterpret_cast<const float *>(shares),         \
                          reinterpret_cast<const uint4 *>(keys), reinterpret_cast<const uint4 *>(query),             \
                          reinterpret_cast<const float *>(vector), reinterpret_cast<const int *>(row), (int)first,   \
                          (int)last, (unsigned)heads, (unsigned)pieces, slope)
    CHOOSE(PULL)
#undef PULL
    return 0;
}
