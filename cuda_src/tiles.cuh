// Products of rows with small matrices in shared memory, by threads of which a few in a warp share each row.
//
// A thread has every so many columns of a row, and the same columns of several rows. So a number of the matrix is read
// once for all of them. Only its own warp uses these rows.

#pragma once

#include "items.cuh"

// Columns of a thread, and rows.
const int OWN = 4, ROUNDS = 4;

// For a tile with rows of up to P columns: threads that share a row, rows that a warp processes at once, numbers of a
// padded row, and rows of a block. The padding keeps threads out of each other's banks.
template <int P, int THREADS>
struct Layout {
    static const int lanes = P / OWN, together = 32 / lanes, row = P + lanes, nodes = THREADS / lanes * ROUNDS;
};

__device__ __forceinline__ float item(const float4 &four, int i)
{
    return i == 0 ? four.x : i == 1 ? four.y : i == 2 ? four.z : four.w;
}

__device__ __forceinline__ float4 four_of(const float *place) { return *reinterpret_cast<const float4 *>(place); }

__device__ __forceinline__ float sigmoid(float value) { return __fdividef(1.0f, 1.0f + expf(-value)); }

// Part of a thread, in a block of THREADS threads and P columns, for rows of `channels` columns.
template <int P, int THREADS>
struct Share {
    typedef Layout<P, THREADS> At;
    int first, lane, channels;
    long long base, num_nodes;

    __device__ __forceinline__ Share(int channels, long long num_nodes)
        : first(threadIdx.x / 32 * (At::together * ROUNDS) + threadIdx.x % 32 / At::lanes),
          lane(threadIdx.x % At::lanes), channels(channels), base(0), num_nodes(num_nodes)
    {
    }

    // Its row in a round, counted in the tile, and one of its columns.
    __device__ __forceinline__ int node(int round) const { return first + round * At::together; }
    __device__ __forceinline__ int channel(int i) const { return lane + i * At::lanes; }
    __device__ __forceinline__ bool has(int round, int i) const
    {
        return base + node(round) < num_nodes && channel(i) < channels;
    }
    __device__ __forceinline__ long long place(int round, int i) const
    {
        return (base + node(round)) * channels + channel(i);
    }

    __device__ __forceinline__ void read(const float *from, float (*to)[OWN]) const
    {
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r)
#pragma unroll
            for (int i = 0; i < OWN; ++i) to[r][i] = has(r, i) ? from[place(r, i)] : 0.0f;
    }

    // sums += rows @ matrix, of this thread's rows and columns, for each of COUNT matrices.
    template <int COUNT, int PITCH>
    __device__ __forceinline__ void multiply(const float (*rows)[At::row], const float (*matrices)[P][PITCH],
                                             float (*sums)[ROUNDS][OWN]) const
    {
#pragma unroll 2
        for (int k = 0; k < P; k += 4) {
            float4 row[ROUNDS];
#pragma unroll
            for (int r = 0; r < ROUNDS; ++r) row[r] = four_of(&rows[node(r)][k]);
#pragma unroll
            for (int j = 0; j < 4; ++j)
#pragma unroll
                for (int i = 0; i < OWN; ++i) {
                    float factors[COUNT];
#pragma unroll
                    for (int m = 0; m < COUNT; ++m) factors[m] = matrices[m][k + j][channel(i)];
#pragma unroll
                    for (int r = 0; r < ROUNDS; ++r)
#pragma unroll
                        for (int m = 0; m < COUNT; ++m) sums[m][r][i] += item(row[r], j) * factors[m];
                }
        }
    }

    // sums += rows @ matrix.T.
    template <int PITCH>
    __device__ __forceinline__ void multiply_back(const float (*rows)[At::row], const float (*matrix)[PITCH],
                                                  float (*sums)[OWN]) const
    {
#pragma unroll 2
        for (int k = 0; k < P; k += 4) {
            float4 row[ROUNDS];
#pragma unroll
            for (int r = 0; r < ROUNDS; ++r) row[r] = four_of(&rows[node(r)][k]);
#pragma unroll
            for (int i = 0; i < OWN; ++i) {
                const float4 factors = four_of(&matrix[channel(i)][k]);
#pragma unroll
                for (int j = 0; j < 4; ++j)
#pragma unroll
                    for (int r = 0; r < ROUNDS; ++r) sums[r][i] += item(row[r], j) * item(factors, j);
            }
        }
    }

    // Copies numbers of this thread's rows and columns into rows of a tile, and out of them.
    __device__ __forceinline__ void put(float (*rows)[At::row], const float (*from)[OWN]) const
    {
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r)
#pragma unroll
            for (int i = 0; i < OWN; ++i) rows[node(r)][channel(i)] = from[r][i];
    }

    __device__ __forceinline__ void take(const float (*rows)[At::row], float (*to)[OWN]) const
    {
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r)
#pragma unroll
            for (int i = 0; i < OWN; ++i) to[r][i] = rows[node(r)][channel(i)];
    }
};
