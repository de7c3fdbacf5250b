// Two LSTM layers, one after the other, each from a state of zeros, in one pass over rows, and their gradient in
// another; see pyg_direct/kernels/snapshots/recurrent_cells.py.
//
// Such a step forgets nothing: three of four gates count, numbered here without the forget gate. Functions follow
// Numba's calling convention: the first parameter is the address for a result, and the return value 0 means success.

#include "tiles.cuh"

// As in pyg_direct/kernels/snapshots/recurrent_cells.py: threads of a block, forward and backward.
const int OPEN_THREADS = 128, PULL_THREADS = 64;
// Numbers of weights that a thread has in flight at once.
const int AHEAD = 8;

// For up to P numbers of a state; numbers beyond are zero. Rows are padded, so that threads meet in few banks; by four
// numbers if they are read four at a time. Matrices map the left half of a row, the right half, and states of the first
// layer to three gates: admit, content and expose.
template <int P, int PITCH>
struct Weights {
    float part[3][3][P][PITCH], bias[2][3][P];
};

// Addresses of a layer's parameters as torch has them: weights of inputs, and both biases.
struct Parameters {
    const float *weight, *bias, *state_bias;
};

// Rows of W snapshots of N nodes; the S snapshots from `begin` on are processed, a node's side by side.
struct Rows {
    const float *half[2];
    unsigned window, begin, seen;
    int size;

    __device__ __forceinline__ long long source(unsigned row) const
    {
        return ((long long)(row / seen) * window + begin + row % seen) * size;
    }
};

// A gate's first row in parameters.
__device__ __forceinline__ int row_of(int gate, int size) { return gate == 0 ? 0 : (gate + 1) * size; }

template <int P, int PITCH, int THREADS>
__device__ __forceinline__ void read_weights(Weights<P, PITCH> &weights, const Parameters &first,
                                             const Parameters &second, int size)
{
    for (int base = threadIdx.x; base < 9 * P * P; base += AHEAD * THREADS) {
        float ahead[AHEAD];
#pragma unroll
        for (int a = 0; a < AHEAD; ++a) {
            const int i = base + a * THREADS, part = i / (3 * P * P), gate = i / (P * P) % 3, c = i / P % P, k = i % P;
            const int width = part == 2 ? size : 2 * size, column = part == 1 ? size + k : k;
            const bool is_one = i < 9 * P * P && k < size && c < size;
            const float *from = part == 2 ? second.weight : first.weight;
            ahead[a] = is_one ? from[(row_of(gate, size) + c) * width + column] : 0.0f;
        }
#pragma unroll
        for (int a = 0; a < AHEAD; ++a) {
            const int i = base + a * THREADS;
            if (i < 9 * P * P) weights.part[i / (3 * P * P)][i / (P * P) % 3][i % P][i / P % P] = ahead[a];
        }
    }
    for (int i = threadIdx.x; i < 6 * P; i += THREADS) {
        const int layer = i / (3 * P), gate = i / P % 3, at = row_of(gate, size) + i % P;
        const float *bias = layer == 0 ? first.bias : second.bias;
        const float *state_bias = layer == 0 ? first.state_bias : second.state_bias;
        weights.bias[layer][gate][i % P] = i % P < size ? bias[at] + state_bias[at] : 0.0f;
    }
}

template <int P, int THREADS, int PITCH>
struct Memory {
    typedef Layout<P, THREADS> At;
    float rows[At::nodes][At::row];
    Weights<P, PITCH> weights;
};

template <int P, int THREADS>
struct RowShare : Share<P, THREADS> {
    typedef Layout<P, THREADS> At;
    using Share<P, THREADS>::base;
    using Share<P, THREADS>::node;
    using Share<P, THREADS>::channel;
    using Share<P, THREADS>::has;

    __device__ __forceinline__ RowShare(int size, long long count) : Share<P, THREADS>(size, count) {}

    // Sums that begin with the biases of the gates.
    __device__ __forceinline__ void begin(const float (*bias)[P], float (*gates)[ROUNDS][OWN]) const
    {
#pragma unroll
        for (int gate = 0; gate < 3; ++gate)
#pragma unroll
            for (int i = 0; i < OWN; ++i)
#pragma unroll
                for (int r = 0; r < ROUNDS; ++r) gates[gate][r][i] = bias[gate][channel(i)];
    }

    // Gates of both halves of the rows; unless `seen` is null, they are also left there, `[rows, 2 * H]`.
    template <int PITCH>
    __device__ __forceinline__ void open(Memory<P, THREADS, PITCH> &memory, const Rows &given, float *seen,
                                         float (*gates)[ROUNDS][OWN]) const
    {
        begin(memory.weights.bias[0], gates);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float own[ROUNDS][OWN];
#pragma unroll
            for (int r = 0; r < ROUNDS; ++r) {
                const long long source = given.source(base + node(r));
#pragma unroll
                for (int i = 0; i < OWN; ++i) {
                    own[r][i] = has(r, i) ? given.half[half][source + channel(i)] : 0.0f;
                    if (seen != nullptr && has(r, i))
                        seen[((base + node(r)) * 2 + half) * given.size + channel(i)] = own[r][i];
                }
            }
            fill(memory.rows, own);
            this->template multiply<3>(memory.rows, memory.weights.part[half], gates);
        }
        bend(gates);
    }

    // Gates of the second layer.
    template <int PITCH>
    __device__ __forceinline__ void open_second(Memory<P, THREADS, PITCH> &memory, const float (*states)[OWN],
                                                float (*gates)[ROUNDS][OWN]) const
    {
        begin(memory.weights.bias[1], gates);
        fill(memory.rows, states);
        this->template multiply<3>(memory.rows, memory.weights.part[2], gates);
        bend(gates);
    }

    // Copies numbers into the rows of a warp, with barriers before and after. Zeros beyond the last: an infinity or NaN
    // would not give zero with a weight of zero.
    __device__ __forceinline__ void fill(float (*rows)[At::row], const float (*from)[OWN]) const
    {
        __syncwarp();
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r)
#pragma unroll
            for (int i = 0; i < OWN; ++i)
                rows[node(r)][channel(i)] = channel(i) < this->channels ? from[r][i] : 0.0f;
        __syncwarp();
    }

    __device__ __forceinline__ void bend(float (*gates)[ROUNDS][OWN]) const
    {
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r)
#pragma unroll
            for (int i = 0; i < OWN; ++i) {
                gates[0][r][i] = sigmoid(gates[0][r][i]), gates[2][r][i] = sigmoid(gates[2][r][i]);
                gates[1][r][i] = tanhf(gates[1][r][i]);
            }
    }

    // The states from the gates.
    __device__ __forceinline__ void expose(const float (*gates)[ROUNDS][OWN], float (*states)[OWN]) const
    {
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r)
#pragma unroll
            for (int i = 0; i < OWN; ++i) states[r][i] = gates[2][r][i] * tanhf(gates[0][r][i] * gates[1][r][i]);
    }

    // Turns gates into the gradients before their activations, from the gradients of the states.
    __device__ __forceinline__ void pull(const float (*grad)[OWN], float (*gates)[ROUNDS][OWN]) const
    {
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r)
#pragma unroll
            for (int i = 0; i < OWN; ++i) {
                const float admitted = gates[0][r][i], content = gates[1][r][i], exposed = gates[2][r][i];
                const float cell = tanhf(admitted * content);
                const float of_cell = grad[r][i] * exposed * (1.0f - cell * cell);
                gates[0][r][i] = of_cell * content * admitted * (1.0f - admitted);
                gates[1][r][i] = of_cell * admitted * (1.0f - content * content);
                gates[2][r][i] = grad[r][i] * cell * exposed * (1.0f - exposed);
            }
    }

    // Gradients of all four gates, `[rows, 4 * H]`; the forget gate gets none.
    __device__ __forceinline__ void write(const float (*gates)[ROUNDS][OWN], float *out) const
    {
        const int size = this->channels;
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r)
#pragma unroll
            for (int i = 0; i < OWN; ++i)
                if (has(r, i)) {
                    float *place = out + (base + node(r)) * 4 * size + channel(i);
                    place[0] = gates[0][r][i], place[size] = 0.0f;
                    place[2 * size] = gates[1][r][i], place[3 * size] = gates[2][r][i];
                }
    }
};

// States of both layers, followed by features `[W, N, F]`, to `out` `[W, N, 2 * H + F]`.
template <int P>
__device__ __forceinline__ void open(Memory<P, OPEN_THREADS, P + 1> &memory, const Rows &given,
                                     const Parameters &layer, const Parameters &layer_2,
                                     const float *x, unsigned num_nodes, int features,
                                     float *out)
{
    typedef Layout<P, OPEN_THREADS> At;
    const long long count = (long long)num_nodes * given.window;
    const int size = given.size, width = 2 * size + features;
    RowShare<P, OPEN_THREADS> own(size, count);
    read_weights<P, P + 1, OPEN_THREADS>(memory.weights, layer, layer_2, size);
    __syncthreads();
    for (own.base = (long long)blockIdx.x * At::nodes; own.base < count;
         own.base += (long long)gridDim.x * At::nodes) {
        float gates[3][ROUNDS][OWN], states[2][ROUNDS][OWN];
        own.open(memory, given, nullptr, gates);
        own.expose(gates, states[0]);
        own.open_second(memory, states[0], gates);
        own.expose(gates, states[1]);
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r) {
            const unsigned row = own.base + own.node(r);
            if (row >= count) continue;
            const long long to = (long long)(row % given.window) * num_nodes + row / given.window;
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int i = 0; i < OWN; ++i)
                    if (own.channel(i) < size)
                        out[to * width + half * size + own.channel(i)] = states[half][r][i];
            for (int f = own.lane; f < features; f += At::lanes) out[to * width + 2 * size + f] = x[to * features + f];
        }
    }
}

// Addresses for gradients of both layers' gates, and of both halves of the rows; for the rows and states that the
// layers saw.
struct Pulled {
    float *gates[2], *half[2], *rows, *states;
};

template <int P>
__device__ __forceinline__ void pull(Memory<P, PULL_THREADS, P + 4> &memory, const Rows &given,
                                     const Parameters &layer, const Parameters &layer_2,
                                     const float *grad, unsigned num_nodes, int features,
                                     const Pulled &to)
{
    typedef Layout<P, PULL_THREADS> At;
    const long long count = (long long)num_nodes * given.seen;
    const int size = given.size, width = 2 * size + features;
    RowShare<P, PULL_THREADS> own(size, count);
    read_weights<P, P + 4, PULL_THREADS>(memory.weights, layer, layer_2, size);
    __syncthreads();
    for (own.base = (long long)blockIdx.x * At::nodes; own.base < count;
         own.base += (long long)gridDim.x * At::nodes) {
        float gates[3][ROUNDS][OWN], second[3][ROUNDS][OWN], states[ROUNDS][OWN];
        own.open(memory, given, to.rows, gates);
        own.expose(gates, states);
        own.open_second(memory, states, second);
        float of_states[2][ROUNDS][OWN];
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r)
#pragma unroll
            for (int i = 0; i < OWN; ++i) {
                const float *place = grad + (own.base + own.node(r)) * width + own.channel(i);
                of_states[0][r][i] = own.has(r, i) ? place[0] : 0.0f;
                of_states[1][r][i] = own.has(r, i) ? place[size] : 0.0f;
                if (own.has(r, i)) to.states[own.place(r, i)] = states[r][i];
            }
        own.pull(of_states[1], second);
        own.write(second, to.gates[1]);
#pragma unroll
        for (int gate = 0; gate < 3; ++gate) {
            own.fill(memory.rows, second[gate]);
            own.multiply_back(memory.rows, memory.weights.part[2][gate], of_states[0]);
        }
        own.pull(of_states[0], gates);
        own.write(gates, to.gates[0]);
        float of_rows[2][ROUNDS][OWN] = {};
#pragma unroll
        for (int gate = 0; gate < 3; ++gate) {
            own.fill(memory.rows, gates[gate]);
#pragma unroll
            for (int half = 0; half < 2; ++half)
                own.multiply_back(memory.rows, memory.weights.part[half][gate], of_rows[half]);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int r = 0; r < ROUNDS; ++r)
#pragma unroll
                for (int i = 0; i < OWN; ++i)
                    if (own.has(r, i)) to.half[half][own.place(r, i)] = of_rows[half][r][i];
    }
}

__device__ __forceinline__ const float *at(u64 place) { return reinterpret_cast<const float *>(place); }
__device__ __forceinline__ float *to(u64 place) { return reinterpret_cast<float *>(place); }

extern "C" __device__ int open_two(int *, u64 first, u64 second, u64 x, u64 weight, u64 bias, u64 state_bias,
                                   u64 weight_2, u64 bias_2, u64 state_bias_2, int num_nodes, int window, int size,
                                   int features, u64 out)
{
    __shared__ __align__(16) unsigned char memory[sizeof(Memory<32, OPEN_THREADS, 33>)];
    const Rows given = {{at(first), at(second)}, (unsigned)window, 0, (unsigned)window, size};
    const Parameters layer = {at(weight), at(bias), at(state_bias)};
    const Parameters layer_2 = {at(weight_2), at(bias_2), at(state_bias_2)};
    if (size <= 16)
        open(*reinterpret_cast<Memory<16, OPEN_THREADS, 17> *>(memory), given, layer, layer_2, at(x), num_nodes,
             features, to(out));
    else
        open(*reinterpret_cast<Memory<32, OPEN_THREADS, 33> *>(memory), given, layer, layer_2, at(x), num_nodes,
             features, to(out));
    return 0;
}

extern "C" __device__ int pull_two(int *, u64 grad, u64 first, u64 second, u64 weight, u64 bias, u64 state_bias,
                                   u64 weight_2, u64 bias_2, u64 state_bias_2, int num_nodes, int window, int begin,
                                   int seen, int size, int features, u64 gates, u64 gates_2, u64 rows, u64 states,
                                   u64 to_first, u64 to_second)
{
    __shared__ __align__(16) unsigned char memory[sizeof(Memory<32, PULL_THREADS, 36>)];
    const Rows given = {{at(first), at(second)}, (unsigned)window, (unsigned)begin, (unsigned)seen, size};
    const Parameters layer = {at(weight), at(bias), at(state_bias)};
    const Parameters layer_2 = {at(weight_2), at(bias_2), at(state_bias_2)};
    const Pulled places = {{to(gates), to(gates_2)}, {to(to_first), to(to_second)}, to(rows), to(states)};
    if (size <= 16)
        pull(*reinterpret_cast<Memory<16, PULL_THREADS, 20> *>(memory), given, layer, layer_2, at(grad), num_nodes,
             features, places);
    else
        pull(*reinterpret_cast<Memory<32, PULL_THREADS, 36> *>(memory), given, layer, layer_2, at(grad), num_nodes,
             features, places);
    return 0;
}
