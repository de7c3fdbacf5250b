// Sums over CSR of fp32 rows that several snapshots hold side by side, scaled before and after, in pieces of 16 bytes.
//
// Called from pyg_direct/kernels/snapshots/sliced_csr.py, which has the formula; see aggregate.cu for the calling
// convention.

typedef unsigned long long u64;

// Multiplies four neighboring numbers by the factors of their snapshots, `channels` numbers each.
__device__ __forceinline__ float4 scale_4(float4 value, const float *scale, int number, int channels)
{
    int snapshot = number / channels, rest = number - snapshot * channels;
    value.x *= scale[snapshot];
    if (++rest == channels) rest = 0, ++snapshot;
    value.y *= scale[snapshot];
    if (++rest == channels) rest = 0, ++snapshot;
    value.z *= scale[snapshot];
    if (++rest == channels) rest = 0, ++snapshot;
    value.w *= scale[snapshot];
    return value;
}

// Arguments of a kernel: addresses stay in its constant memory, because registers are for rows in flight.
struct Given {
    float4 *out, *partials;
    const float4 *x, *own;
    const int *ends, *row;
    const float *weight, *column, *scale, *diagonal;
    int num_weights, size, channels, pieces, piece, longest, adds, shift, low;
};

// Snapshots whose edge bits are tested: none, the one snapshot that a piece belongs to, or the snapshots of its
// numbers.
enum Mask { ALL, ONE, SEVERAL };

// Ids of the next edges are requested while rows of these are in flight, as in aggregate.cu.
template <bool WEIGHTED, int MASK>
__device__ __forceinline__ void sum_scaled(const Given &given, int place, int target, int e, int last, int count)
{
    const int ROWS = WEIGHTED ? 4 : 5;
    // The snapshot of the piece, and the bits of its numbers' snapshots.
    const int head = WEIGHTED || MASK ? 4 * given.piece / given.channels : 0;
    unsigned bit[4] = {}, bits = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (MASK == SEVERAL) bit[i] = 1u << (4 * given.piece + i) / given.channels - head;
        bits |= bit[i];
    }
    if (MASK == ONE) bits = 1;
    int degree = last - e, after = last;
    if (count > 1) after = given.ends[target + 2];
    if (place < 0 && degree > given.longest) e = last;
    unsigned source[ROWS];
#pragma unroll
    for (int u = 0; u < ROWS; ++u) {
        source[u] = 0;
        if (e + u < last) source[u] = (unsigned)given.row[e + u];
    }
    float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    while (true) {
        float4 value[ROWS];
        float share[ROWS];
        // Four bits an edge.
        unsigned present = 0;
#pragma unroll
        for (int u = 0; u < ROWS; ++u) {
            value[u] = make_float4(0.0f, 0.0f, 0.0f, 0.0f), share[u] = 1.0f;
            const unsigned there = MASK ? source[u] >> given.shift + given.low + head & bits : e + u < last;
            if (there) {
                const u64 from = MASK ? source[u] & (1u << given.shift) - 1 : source[u];
                value[u] = given.x[from * (unsigned)given.pieces + (unsigned)given.piece];
                if (WEIGHTED && given.weight != nullptr)
                    share[u] = given.weight[(long long)(e + u) * given.num_weights + (given.num_weights > 1 ? head : 0)];
                if (WEIGHTED && given.column != nullptr) share[u] *= given.column[from * (unsigned)given.size + head];
            }
            if (MASK == SEVERAL) present |= there << 4 * u;
        }
        const bool ends_here = e + ROWS >= last;
        int next = e + ROWS, next_last = last, next_degree = degree;
        if (ends_here) {
            next = last, next_last = after, next_degree = next_last - next;
            if (next_degree > given.longest) next = next_last;
            if (count > 2) after = given.ends[target + 3];
        }
#pragma unroll
        for (int u = 0; u < ROWS; ++u) {
            source[u] = 0;
            if (next + u < next_last) source[u] = (unsigned)given.row[next + u];
        }
#pragma unroll
        for (int u = 0; u < ROWS; ++u) {
            if (MASK == SEVERAL) {
                // An absent edge adds nothing, not even a NaN.
                const unsigned there = present >> 4 * u;
                if (there & bit[0]) total.x += share[u] * value[u].x;
                if (there & bit[1]) total.y += share[u] * value[u].y;
                if (there & bit[2]) total.z += share[u] * value[u].z;
                if (there & bit[3]) total.w += share[u] * value[u].w;
            } else if (WEIGHTED) {
                total.x += share[u] * value[u].x, total.y += share[u] * value[u].y;
                total.z += share[u] * value[u].z, total.w += share[u] * value[u].w;
            } else {
                total.x += value[u].x, total.y += value[u].y, total.z += value[u].z, total.w += value[u].w;
            }
        }
        if (ends_here) {
            // Other threads compute long rows, and a target without additions stays unchanged.
            if (place >= 0) {
                given.partials[(long long)place * given.pieces + given.piece] = total;
            } else if (degree <= given.longest && (degree > 0 || !given.adds)) {
                const long long at = (long long)target * given.pieces + given.piece;
                const long long factor = (long long)target * given.size;
                if (given.scale != nullptr) total = scale_4(total, given.scale + factor, 4 * given.piece, given.channels);
                float4 before = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                if (given.adds) before = given.out[at];
                else if (given.diagonal != nullptr)
                    before = scale_4(given.own[at], given.diagonal + factor, 4 * given.piece, given.channels);
                given.out[at] = make_float4(before.x + total.x, before.y + total.y, before.z + total.z,
                                            before.w + total.w);
            }
            if (--count == 0) break;
            ++target;
            total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
        e = next, last = next_last, degree = next_degree;
    }
}

// Piece `piece` of the sums of `count` consecutive targets; the first, `target`, has edges [first, last). Targets with
// more than `longest` edges are left out. A `place` of zero or more is the position in `partials` for the plain sum of
// a slice, of any length. Null addresses stand for ones, a null `diagonal` for zeros. `size` times `channels` numbers
// are `pieces` pieces. If there are weights for each snapshot or a `column`, no piece belongs to two snapshots. With a
// `shift`, the bits of `row` from there on mark the snapshots that have an edge; bit `low` of these stands for the
// first. Without it, all have all edges. With `adds`, the sums are added to `out`.
extern "C" __device__ int sum_scaled_16(int *, u64 out, u64 partials, u64 x, u64 own, u64 ends, u64 row, u64 weight,
                                        u64 column, u64 scale, u64 diagonal, int num_weights, int size, int channels,
                                        int pieces, int piece, int longest, int adds, int shift, int low, int place,
                                        int target, int first, int last, int count)
{
    const Given given = {
        reinterpret_cast<float4 *>(out),           reinterpret_cast<float4 *>(partials),
        reinterpret_cast<const float4 *>(x),       reinterpret_cast<const float4 *>(own),
        reinterpret_cast<const int *>(ends),       reinterpret_cast<const int *>(row),
        reinterpret_cast<const float *>(weight),   reinterpret_cast<const float *>(column),
        reinterpret_cast<const float *>(scale),    reinterpret_cast<const float *>(diagonal),
        num_weights, size, channels, pieces, piece, longest, adds, shift, low};
    const bool weighted = weight != 0 || column != 0;
    if (shift == 0) {
        if (weighted) sum_scaled<true, ALL>(given, place, target, first, last, count);
        else sum_scaled<false, ALL>(given, place, target, first, last, count);
    } else if (channels % 4 == 0) {
        if (weighted) sum_scaled<true, ONE>(given, place, target, first, last, count);
        else sum_scaled<false, ONE>(given, place, target, first, last, count);
    } else {
        if (weighted) sum_scaled<true, SEVERAL>(given, place, target, first, last, count);
        else sum_scaled<false, SEVERAL>(given, place, target, first, last, count);
    }
    return 0;
}
