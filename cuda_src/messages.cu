// Sum and ReLU of rows of sources and of edges in 16-byte pieces, which Numba cannot express.
//
// Called from pyg_direct/kernels/aggregate/sum.py. Functions follow Numba's calling convention: the first
// parameter is the address for a result, and the return value 0 means success.

#include "items.cuh"

__device__ __forceinline__ void store_piece(Float32, u64 to, const float *value) { store_fp32<4>(to, 0, value); }
template <class Kind> __device__ __forceinline__ void store_piece(Kind kind, u64 to, const float *value)
{
    store(kind, to, 0, value);
}

template <class Kind, class Index>
__device__ __forceinline__ void sum_messages(u64 to, const uint4 *x, const uint4 *edge_rows, const Index *row,
                                             unsigned char *kept, int first, int last, unsigned pieces, float scale)
{
    // Edges whose rows are in flight at once.
    const int ROWS = 4;
    float total[Kind::items] = {};
    for (int e = first; e < last; e += ROWS) {
        uint4 source[ROWS], own[ROWS];
#pragma unroll
        for (int u = 0; u < ROWS; ++u) {
            const int edge = min(e + u, last - 1);
            source[u] = x[(u64)row[edge] * pieces];
            own[u] = edge_rows[(u64)edge * pieces];
        }
#pragma unroll
        for (int u = 0; u < ROWS; ++u) {
            if (e + u >= last) break;
            float a[Kind::items], b[Kind::items];
            unpack(Kind(), source[u], a), unpack(Kind(), own[u], b);
            unsigned bits = 0;
#pragma unroll
            for (int i = 0; i < Kind::items; ++i) {
                const float message = a[i] + b[i];
                // A NaN stays a NaN.
                const bool stays = !(message <= 0.0f);
                total[i] += stays ? message : 0.0f;
                bits |= (unsigned)stays << i;
            }
            if (kept != nullptr) kept[(u64)(e + u) * pieces] = (unsigned char)bits;
        }
    }
#pragma unroll
    for (int i = 0; i < Kind::items; ++i) total[i] *= scale;
    store_piece(Kind(), to, total);
}

// Writes `scale` times the sum of relu(x[row[e]] + edge_rows[e]) over the edges [first, last). Unless `kept` is zero,
// it gets a byte for each edge: bit i is set if item i of its message is above zero. All addresses but `row` are
// addresses of the piece. Kind 0 is fp32, 1 fp16, 2 bfloat16. Edges are fewer than 2^31.
extern "C" __device__ int sum_messages_16(int *, u64 to, u64 x, u64 edge_rows, u64 row, int index_bytes, u64 kept,
                                          long long first, long long last, int pieces, float scale, int kind)
{
    const uint4 *sources = reinterpret_cast<const uint4 *>(x), *own = reinterpret_cast<const uint4 *>(edge_rows);
    const int *narrow_ids = reinterpret_cast<const int *>(row);
    const long long *wide_ids = reinterpret_cast<const long long *>(row);
    unsigned char *bytes = reinterpret_cast<unsigned char *>(kept);
#define SUM(Kind, ids) sum_messages<Kind>(to, sources, own, ids, bytes, (int)first, (int)last, pieces, scale)
    if (kind == 0) {
        if (index_bytes == 8) SUM(Float32, wide_ids);
        else SUM(Float32, narrow_ids);
    } else if (kind == 1) {
        if (index_bytes == 8) SUM(Float16, wide_ids);
        else SUM(Float16, narrow_ids);
    } else {
        if (index_bytes == 8) SUM(Bfloat16, wide_ids);
        else SUM(Bfloat16, narrow_ids);
    }
#undef SUM
    return 0;
}

template <class Kind>
__device__ __forceinline__ void pull_message(u64 to_x, u64 to_edge, u64 grad, unsigned bits)
{
    float share[Kind::items];
    unpack(Kind(), *reinterpret_cast<const uint4 *>(grad), share);
#pragma unroll
    for (int i = 0; i < Kind::items; ++i) share[i] = bits >> i & 1 ? share[i] : 0.0f;
    if (to_edge != 0) store_piece(Kind(), to_edge, share);
    if (to_x != 0) {
#pragma unroll
        for (int i = 0; i < Kind::items; i += 4)
            add_4(reinterpret_cast<float *>(to_x) + i, share[i], share[i + 1], share[i + 2], share[i + 3]);
    }
}

// The adjoint for one edge: `grad` of its target, masked by the bits of `kept`, is written to `to_edge` and added to
// `to_x`, fp32, of its source. Zero stands for neither. All addresses are addresses of the piece.
extern "C" __device__ int pull_message_16(int *, u64 to_x, u64 to_edge, u64 grad, u64 kept, int kind)
{
    const unsigned bits = *reinterpret_cast<const unsigned char *>(kept);
    if (kind == 0) pull_message<Float32>(to_x, to_edge, grad, bits);
    else if (kind == 1) pull_message<Float16>(to_x, to_edge, grad, bits);
    else pull_message<Bfloat16>(to_x, to_edge, grad, bits);
    return 0;
}
