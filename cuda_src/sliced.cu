// Sums of rows of several snapshots in 16-byte pieces, which Numba cannot express.
//
// Called from pyg_direct/kernels/snapshots/sliced_csr.py. Functions follow Numba's calling convention: the first
// parameter is the address for a result, and the return value 0 means success.

#include "items.cuh"

// Four neighboring numbers of a slice's sum in several snapshots, see pyg_direct/kernels/snapshots/sliced_csr.py. ONE: they belong to
// one snapshot.
template <bool ONE>
__device__ __forceinline__ void add_slice(const uint4 *z, const int *col, const float *weight, int num_weights,
                                          const unsigned char *presence, const int *snapshot, int count,
                                          unsigned pieces, float *total)
{
    const int IN_FLIGHT = 4;
    unsigned mask = 0, bit[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) mask |= bit[i] = 1u << snapshot[i];
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
                    if (!(bits[u] & bit[i])) continue;
                    if (num_weights == 0) {
                        total[i] += value[i];
                        continue;
                    }
                    const float share = shares[num_weights > 1 ? snapshot[i] : 0];
                    if (share != 0.0f) total[i] += share * value[i];
                }
            }
        }
    }
}

// Adds numbers [number, number + 4) of a slice's sum to its row `to`. `col`, `weight` and `presence` begin at the first
// of `count` edges, `scale` at the target's; a null `weight`, `presence` or `scale` stands for ones. `write` is 1 if
// other threads add to the same numbers, and 2 if none does and they are zero.
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
