// Sums over edges of functions of both ends' rows, four fp32 items at a time, which Numba cannot express.
//
// Called from pyg_direct/kernels/aggregate/pairs.py, which has the table of functions. Functions follow Numba's calling
// convention: the first parameter is the address for a result, and the return value 0 means success.

#include "items.cuh"

enum Function { GATE, AFFINE, PULL_AFFINE, SOFTMAX, PULL_SOFTMAX };

// Adds the shares of one item of an edge, as `share_pair` of pyg_direct/kernels/aggregate/pairs.py.
template <Function FUNCTION>
__device__ __forceinline__ void add_shares(float a, float b, float x, float y, float z, float slope, float &total,
                                           float &other)
{
    if (FUNCTION == GATE) {
        const float gate = 1.0f / (1.0f + expf(-(a + x))), share = gate * y;
        total += share, other += share * (1.0f - gate);
    } else if (FUNCTION == AFFINE) {
        const float weight = a * x + b > 0.0f ? 1.0f : slope;
        total += weight, other += weight * x;
    } else if (FUNCTION == PULL_AFFINE) {
        total += (x * a + y > 0.0f ? 1.0f : slope) * z;
    } else if (FUNCTION == SOFTMAX) {
        const float weight = expf(x - a);
        total += weight, other += weight * y;
    } else {
        const float share = expf(a - x) * y;
        total += share, other += share * (b - z);
    }
}

__device__ __forceinline__ void read_piece(u64 from, float *value)
{
    unpack(Float32(), from == 0 ? uint4{} : *reinterpret_cast<const uint4 *>(from), value);
}

template <Function FUNCTION, class Index>
__device__ __forceinline__ void sum_pairs(u64 to, u64 to_other, u64 a, u64 b, const uint4 *x, const uint4 *y,
                                          const uint4 *z, const Index *row, int first, int last, unsigned pieces,
                                          float slope)
{
    const bool HAS_Y = FUNCTION != AFFINE, HAS_Z = FUNCTION == PULL_AFFINE || FUNCTION == PULL_SOFTMAX;
    // Edges whose rows are in flight at once. Adjoints run over the edges of sources, most of which have few.
    const int ROWS = HAS_Z ? 2 : 4;
    float own[4], beside[4], total[4] = {}, other[4] = {};
    read_piece(a, own), read_piece(b, beside);
    for (int e = first; e < last; e += ROWS) {
        uint4 at_x[ROWS], at_y[ROWS] = {}, at_z[ROWS] = {};
#pragma unroll
        for (int u = 0; u < ROWS; ++u) {
            // The last edge is read again where there is no next one.
            const u64 line = (u64)row[min(e + u, last - 1)] * pieces;
            at_x[u] = x[line];
            if (HAS_Y) at_y[u] = y[line];
            if (HAS_Z) at_z[u] = z[line];
        }
#pragma unroll
        for (int u = 0; u < ROWS; ++u) {
            if (e + u >= last) break;
            float p[4], q[4], r[4];
            unpack(Float32(), at_x[u], p), unpack(Float32(), at_y[u], q), unpack(Float32(), at_z[u], r);
#pragma unroll
            for (int i = 0; i < 4; ++i)
                add_shares<FUNCTION>(own[i], beside[i], p[i], q[i], r[i], slope, total[i], other[i]);
        }
    }
    store_fp32<4>(to, 0, total), store_fp32<4>(to_other, 0, other);
}

// Writes one piece of both sums over the edges [first, last), fewer than 2^31. `a`, `b` and both results are addresses of
// the piece of the target, `x`, `y` and `z` those of the piece of the first source; `b`, `y` and `z` may be zero.
extern "C" __device__ int sum_pairs_16(int *, int function, u64 to, u64 to_other, u64 a, u64 b, u64 x, u64 y, u64 z,
                                       u64 row, int index_bytes, long long first, long long last, int pieces,
                                       float slope)
{
    const uint4 *of_x = reinterpret_cast<const uint4 *>(x), *of_y = reinterpret_cast<const uint4 *>(y);
    const uint4 *of_z = reinterpret_cast<const uint4 *>(z);
    const int *narrow_ids = reinterpret_cast<const int *>(row);
    const long long *wide_ids = reinterpret_cast<const long long *>(row);
#define SUM(FUNCTION)                                                                                               \
    case FUNCTION:                                                                                                  \
        if (index_bytes == 8)                                                                                       \
            sum_pairs<FUNCTION>(to, to_other, a, b, of_x, of_y, of_z, wide_ids, (int)first, (int)last, pieces, slope);   \
        else                                                                                                        \
            sum_pairs<FUNCTION>(to, to_other, a, b, of_x, of_y, of_z, narrow_ids, (int)first, (int)last, pieces, slope); \
        break;
    switch (function) {
        SUM(GATE) SUM(AFFINE) SUM(PULL_AFFINE) SUM(SOFTMAX) SUM(PULL_SOFTMAX)
    }
#undef SUM
    return 0;
}
