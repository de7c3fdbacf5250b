// What threads of a block share of the nodes of a gated step, and the products that both ways of it need.
//
// A few threads of a warp share a node, each with every so many of its channels; a thread does the same for several
// nodes, so that what it reads of weights in shared memory serves all of them.

#pragma once

#include "items.cuh"

// As in pyg_direct/kernels/gated.py: threads of a block on the way to the next state, and back.
const int STEP_THREADS = 256, PULL_THREADS = 64;
// Features at most; channels of a thread, and nodes.
const int INPUTS = 8, OWN = 4, ROUNDS = 4;

// For up to P channels; what is beyond is zero. Rows have room behind them, so that threads meet in no bank.
template <int P>
struct Weights {
    float update[P][P + 4], reset[P][P + 4], proposal[P][P + 4], input[INPUTS][3 * P], bias[3 * P];
};

template <int P, int THREADS>
struct Layout {
    static const int lanes = P / OWN, together = 32 / lanes, row = P + lanes, nodes = THREADS / lanes * ROUNDS;
};

// Places of what goes in. Weights are `[C + F + 1, 3 * C]`: rows of states, of features, and the bias.
struct Given {
    const float *x, *state, *weights;
    long long num_nodes;
    int channels, features;
};

__device__ __forceinline__ float item(const float4 &four, int i)
{
    return i == 0 ? four.x : i == 1 ? four.y : i == 2 ? four.z : four.w;
}

__device__ __forceinline__ float4 four_of(const float *place) { return *reinterpret_cast<const float4 *>(place); }

__device__ __forceinline__ float sigmoid(float value) { return __fdividef(1.0f, 1.0f + expf(-value)); }

template <int P, int THREADS>
__device__ __forceinline__ void read_weights(Weights<P> &weights, const Given &given)
{
    const int channels = given.channels, features = given.features;
    for (int i = threadIdx.x; i < P * P; i += THREADS) {
        const int k = i / P, c = i % P;
        const bool is_one = k < channels && c < channels;
        const float *row = given.weights + 3 * channels * k + c;
        weights.update[k][c] = is_one ? row[0] : 0.0f;
        weights.reset[k][c] = is_one ? row[channels] : 0.0f;
        weights.proposal[k][c] = is_one ? row[2 * channels] : 0.0f;
    }
    for (int i = threadIdx.x; i < 3 * P; i += THREADS) {
        const bool is_channel = i % P < channels;
        const float *rows = given.weights + 3 * channels * channels + i / P * channels + i % P;
        weights.bias[i] = is_channel ? rows[3 * channels * features] : 0.0f;
        for (int f = 0; f < INPUTS; ++f)
            weights.input[f][i] = is_channel && f < features ? rows[3 * channels * f] : 0.0f;
    }
}

// What a thread of a block for THREADS threads and P channels sees to.
template <int P, int THREADS>
struct Share {
    typedef Layout<P, THREADS> At;
    int first, lane, channels;
    long long base, num_nodes;

    __device__ __forceinline__ Share(const Given &given)
        : first(threadIdx.x / 32 * (At::together * ROUNDS) + threadIdx.x % 32 / At::lanes),
          lane(threadIdx.x % At::lanes), channels(given.channels), base(0), num_nodes(given.num_nodes)
    {
    }

    // Its node in a round, counted in the tile, and one of its channels.
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

    // Features of this warp's nodes.
    __device__ __forceinline__ void read_features(float (*x)[INPUTS], const Given &given) const
    {
        const int inputs = (given.features + 3) & ~3, begin = threadIdx.x / 32 * (At::together * ROUNDS);
        for (int i = threadIdx.x % 32; i < At::together * ROUNDS * inputs; i += 32) {
            const int n = begin + i / inputs, f = i % inputs;
            const bool is_one = f < given.features && base + n < num_nodes;
            x[n][f] = is_one ? given.x[(base + n) * given.features + f] : 0.0f;
        }
    }

    // sums += rows @ weights, of this thread's nodes and channels.
    __device__ __forceinline__ void multiply(const float (*rows)[At::row], const float (*weights)[P + 4],
                                             float (*sums)[OWN]) const
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
                    const float factor = weights[k + j][channel(i)];
#pragma unroll
                    for (int r = 0; r < ROUNDS; ++r) sums[r][i] += item(row[r], j) * factor;
                }
        }
    }

    // The same of two matrices.
    __device__ __forceinline__ void multiply_two(const float (*rows)[At::row], const float (*left)[P + 4],
                                                 const float (*right)[P + 4], float (*sums)[OWN],
                                                 float (*others)[OWN]) const
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
                    const float factor = left[k + j][channel(i)], other = right[k + j][channel(i)];
#pragma unroll
                    for (int r = 0; r < ROUNDS; ++r) {
                        sums[r][i] += item(row[r], j) * factor;
                        others[r][i] += item(row[r], j) * other;
                    }
                }
        }
    }

    // sums += rows @ weights.T.
    __device__ __forceinline__ void multiply_back(const float (*rows)[At::row], const float (*weights)[P + 4],
                                                  float (*sums)[OWN]) const
    {
#pragma unroll 2
        for (int k = 0; k < P; k += 4) {
            float4 row[ROUNDS];
#pragma unroll
            for (int r = 0; r < ROUNDS; ++r) row[r] = four_of(&rows[node(r)][k]);
#pragma unroll
            for (int i = 0; i < OWN; ++i) {
                const float4 factors = four_of(&weights[channel(i)][k]);
#pragma unroll
                for (int j = 0; j < 4; ++j)
#pragma unroll
                    for (int r = 0; r < ROUNDS; ++r) sums[r][i] += item(row[r], j) * item(factors, j);
            }
        }
    }

    // Numbers of this thread's nodes and channels into rows of a tile, and out of them.
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

    // Both gates, what the reset lets through of the state, in `shown`, and the proposal; `shown` may be `rows`.
    __device__ __forceinline__ void open(const float (*rows)[At::row], float (*shown)[At::row],
                                         const float (*x)[INPUTS], const Weights<P> &weights, int features,
                                         float (*update)[OWN], float (*reset)[OWN], float (*proposal)[OWN]) const
    {
#pragma unroll
        for (int i = 0; i < OWN; ++i)
#pragma unroll
            for (int r = 0; r < ROUNDS; ++r) {
                update[r][i] = weights.bias[channel(i)];
                reset[r][i] = weights.bias[P + channel(i)], proposal[r][i] = weights.bias[2 * P + channel(i)];
            }
        for (int f = 0; f < features; f += 4) {
            float4 row[ROUNDS];
#pragma unroll
            for (int r = 0; r < ROUNDS; ++r) row[r] = four_of(&x[node(r)][f]);
#pragma unroll
            for (int j = 0; j < 4; ++j)
#pragma unroll
                for (int i = 0; i < OWN; ++i) {
                    const float *factors = weights.input[f + j] + channel(i);
#pragma unroll
                    for (int r = 0; r < ROUNDS; ++r) {
                        update[r][i] += item(row[r], j) * factors[0];
                        reset[r][i] += item(row[r], j) * factors[P];
                        proposal[r][i] += item(row[r], j) * factors[2 * P];
                    }
                }
        }
        multiply_two(rows, weights.update, weights.reset, update, reset);
        __syncwarp();
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r)
#pragma unroll
            for (int i = 0; i < OWN; ++i) {
                update[r][i] = sigmoid(update[r][i]), reset[r][i] = sigmoid(reset[r][i]);
                const float state = rows[node(r)][channel(i)];
                shown[node(r)][channel(i)] = channel(i) < channels ? reset[r][i] * state : 0.0f;
            }
        __syncwarp();
        multiply(shown, weights.proposal, proposal);
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r)
#pragma unroll
            for (int i = 0; i < OWN; ++i) proposal[r][i] = tanhf(proposal[r][i]);
    }
};
