// Scalar products of rows in 16-byte pieces, which Numba cannot express.
//
// Called from pyg_direct/kernels/aggregate/sum.py. Functions follow Numba's calling convention: the first parameter is
// the address for a result, and the return value 0 means success.

#include "items.cuh"

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

// The products of four edges from `e` on, or of the remaining ones; see `dot_wide_rows_gpu`.
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
