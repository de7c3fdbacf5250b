// Shared memory of a block for the nodes of a gated step, and code for its forward and backward.

#pragma once

#include "tiles.cuh"

// As in pyg_direct/kernels/snapshots/recurrent_cells.py: threads of a block, forward and backward.
const int STEP_THREADS = 256, PULL_THREADS = 64;
// Features at most.
const int INPUTS = 8;

// For up to P channels; channels beyond are zero. States go to update, reset and proposal. Rows are padded, so that
// threads meet in no bank.
template <int P>
struct Weights {
    float state[3][P][P + 4], input[INPUTS][3 * P], bias[3 * P];
};

// Addresses of inputs. Weights are `[C + F + 1, 3 * C]`: rows of states, of features, and the bias.
struct Given {
    const float *x, *state, *weights;
    long long num_nodes;
    int channels, features;
};

template <int P, int THREADS>
__device__ __forceinline__ void read_weights(Weights<P> &weights, const Given &given)
{
    const int channels = given.channels, features = given.features;
    for (int i = threadIdx.x; i < P * P; i += THREADS) {
        const int k = i / P, c = i % P;
        const bool is_one = k < channels && c < channels;
        const float *row = given.weights + 3 * channels * k + c;
        for (int gate = 0; gate < 3; ++gate) weights.state[gate][k][c] = is_one ? row[gate * channels] : 0.0f;
    }
    for (int i = threadIdx.x; i < 3 * P; i += THREADS) {
        const bool is_channel = i % P < channels;
        const float *rows = given.weights + 3 * channels * channels + i / P * channels + i % P;
        weights.bias[i] = is_channel ? rows[3 * channels * features] : 0.0f;
        for (int f = 0; f < INPUTS; ++f)
            weights.input[f][i] = is_channel && f < features ? rows[3 * channels * f] : 0.0f;
    }
}

// A thread's part of a gated step.
template <int P, int THREADS>
struct GatedShare : Share<P, THREADS> {
    typedef Layout<P, THREADS> At;
    using Share<P, THREADS>::base;
    using Share<P, THREADS>::channels;
    using Share<P, THREADS>::num_nodes;
    using Share<P, THREADS>::node;
    using Share<P, THREADS>::channel;

    __device__ __forceinline__ GatedShare(const Given &given) : Share<P, THREADS>(given.channels, given.num_nodes) {}

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

    // Both gates and the proposal, in `gates`, and reset * state, in `shown`, which may be `rows`.
    __device__ __forceinline__ void open(const float (*rows)[At::row], float (*shown)[At::row],
                                         const float (*x)[INPUTS], const Weights<P> &weights, int features,
                                         float (*gates)[ROUNDS][OWN]) const
    {
#pragma unroll
        for (int gate = 0; gate < 3; ++gate)
#pragma unroll
            for (int i = 0; i < OWN; ++i)
#pragma unroll
                for (int r = 0; r < ROUNDS; ++r) gates[gate][r][i] = weights.bias[gate * P + channel(i)];
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
                    for (int r = 0; r < ROUNDS; ++r)
#pragma unroll
                        for (int gate = 0; gate < 3; ++gate) gates[gate][r][i] += item(row[r], j) * factors[gate * P];
                }
        }
        this->template multiply<2>(rows, weights.state, gates);
        __syncwarp();
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r)
#pragma unroll
            for (int i = 0; i < OWN; ++i) {
                gates[0][r][i] = sigmoid(gates[0][r][i]), gates[1][r][i] = sigmoid(gates[1][r][i]);
                const float state = rows[node(r)][channel(i)];
                shown[node(r)][channel(i)] = channel(i) < channels ? gates[1][r][i] * state : 0.0f;
            }
        __syncwarp();
        this->template multiply<1>(shown, weights.state + 2, gates + 2);
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r)
#pragma unroll
            for (int i = 0; i < OWN; ++i) gates[2][r][i] = tanhf(gates[2][r][i]);
    }
};
