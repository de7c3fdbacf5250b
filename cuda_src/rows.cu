// Copies of table rows in pieces of 16 bytes, of any alignment or widened to float32, which Numba cannot express.
//
// Called from pyg_direct/kernels/rows/gather.py. Functions follow Numba's calling convention: the first parameter is
// the address for a result, which is not used, and the return value 0 means success. All offsets count bytes of the
// output; a row at address 0 stands for zeros.

typedef unsigned int u32;
typedef unsigned long long u64;

// Ways to read a piece; the same numbers as in kernels/rows/gather.py.
enum Kind { ALIGNED, WORDS, BYTES, HALF, BFLOAT, FLOAT8 };

// Bytes that the link transfers at once.
constexpr int LINE = 128;

// Position of a piece: at `offset` of a row, and from its byte `cut` on at the start of the `next` row.
struct Place {
    u64 row, next;
    int offset, cut, exponent, next_exponent;
};

// Reads an address that is known to be global memory: a generic access takes longer.
template <typename T> __device__ T *at(u64 address)
{
    return static_cast<T *>(__cvta_global_to_generic(address));
}

__device__ float float_of_half(unsigned short bits)
{
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

// A float8_e4m3fn number times 2 ^ (exponent - 127). Its bits moved into a half mean its 256th part.
__device__ u32 widen_float8(u32 bits, int exponent)
{
    if ((bits & 0x7f) == 0x7f) return 0x7fffffff;
    const float part = float_of_half((bits & 0x80) << 8 | (bits & 0x7f) << 7);
    return __float_as_uint(part * __int_as_float((exponent + 8) << 23));
}

template <int KIND> __device__ u32 widen(u32 bits, int exponent)
{
    if (KIND == HALF) return __float_as_uint(float_of_half(bits));
    return KIND == BFLOAT ? bits << 16 : widen_float8(bits, exponent);
}

// Raw words that were read for a piece: using them waits for the read.
struct Raw {
    uint4 first, second;
};

// Read the aligned pieces around 16 bytes at any address that hold one of the bytes [low, high).
__device__ Raw load_bytes(u64 address, int low, int high)
{
    const int ahead = address & 15;
    const uint4 *from = at<const uint4>(address - ahead);
    Raw raw = {};
    if (low < min(high, 16 - ahead)) raw.first = from[0];
    if (high > max(low, 16 - ahead)) raw.second = from[1];
    return raw;
}

// The 16 bytes from `address` on.
__device__ uint4 align_bytes(const Raw &raw, u64 address)
{
    u32 word[8] = {raw.first.x, raw.first.y, raw.first.z, raw.first.w,
                   raw.second.x, raw.second.y, raw.second.z, raw.second.w};
    if (address & 8) {
#pragma unroll
        for (int k = 0; k < 6; ++k) word[k] = word[k + 2];
    }
    if (address & 4) {
#pragma unroll
        for (int k = 0; k < 5; ++k) word[k] = word[k + 1];
    }
    const int bits = 8 * (address & 3);
    return make_uint4(__funnelshift_r(word[0], word[1], bits), __funnelshift_r(word[1], word[2], bits),
                      __funnelshift_r(word[2], word[3], bits), __funnelshift_r(word[3], word[4], bits));
}

// The first `count` bytes of a word from `a`, the others from `b`.
__device__ u32 join(u32 a, u32 b, int count)
{
    const u32 mask = count >= 4 ? ~0u : count <= 0 ? 0u : (1u << 8 * count) - 1;
    return (a & mask) | (b & ~mask);
}

__device__ uint4 join(const uint4 &a, const uint4 &b, int count)
{
    return make_uint4(join(a.x, b.x, count), join(a.y, b.y, count - 4), join(a.z, b.z, count - 8),
                      join(a.w, b.w, count - 12));
}

template <int KIND> __device__ constexpr int shift_of()
{
    return KIND <= BYTES ? 0 : KIND == FLOAT8 ? 2 : 1;
}

// PACKED: the four stored numbers of a piece lie in one row, aligned, and are read in one access.
template <int KIND, bool PACKED> __device__ Raw load_piece(const Place &p)
{
    constexpr int shift = shift_of<KIND>();
    const u64 from = p.row + (p.offset >> shift);
    Raw raw = {};
    if (KIND == ALIGNED) {
        if (p.row) raw.first = *at<const uint4>(from);
    } else if (KIND == BYTES) {
        if (p.row) raw = load_bytes(from, 0, min(p.cut, 16));
    } else if (PACKED) {
        uint2 all = {};
        if (p.row && KIND == FLOAT8) all.x = *at<const u32>(from);
        else if (p.row) all = *at<const uint2>(from);
        raw.first.x = all.x, raw.first.y = all.y;
    } else {
        u32 word[4] = {};
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const bool in_row = 4 * k < p.cut;
            const u64 source = in_row ? from + (4 * k >> shift) : p.next + ((4 * k - p.cut) >> shift);
            if (in_row ? p.row : p.next) {
                if (KIND == WORDS) word[k] = *at<const u32>(source);
                else if (KIND == FLOAT8) word[k] = *at<const unsigned char>(source);
                else word[k] = *at<const unsigned short>(source);
            }
        }
        raw.first = make_uint4(word[0], word[1], word[2], word[3]);
    }
    return raw;
}

// The 16 bytes of the output for these words.
template <int KIND, bool PACKED> __device__ uint4 finish_piece(const Raw &raw, const Place &p)
{
    if (KIND == BYTES) return align_bytes(raw, p.row + p.offset);
    if (KIND < BYTES) return raw.first;
    u32 word[4] = {raw.first.x, raw.first.y, raw.first.z, raw.first.w};
    if (PACKED) {
#pragma unroll
        for (int k = 3; k >= 0; --k) {
            word[k] = KIND == FLOAT8 ? word[0] >> 8 * k & 0xff : word[k / 2] >> 16 * (k % 2) & 0xffff;
        }
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) word[k] = widen<KIND>(word[k], 4 * k < p.cut ? p.exponent : p.next_exponent);
    return make_uint4(word[0], word[1], word[2], word[3]);
}

// Stores the first `size` bytes of a piece, all if `size` is at least 16.
template <int KIND> __device__ void store_piece(u64 target, const uint4 &value, long long size)
{
    if (KIND == ALIGNED || (size >= 16 && target % 16 == 0)) {
        *at<uint4>(target) = value;
        return;
    }
    const u32 word[4] = {value.x, value.y, value.z, value.w};
#pragma unroll
    for (int k = 0; k < 16; k += KIND == BYTES ? 1 : 4) {
        if (k >= size) continue;
        if (KIND == BYTES) *at<unsigned char>(target + k) = word[k / 4] >> 8 * (k % 4);
        else *at<u32>(target + k) = word[k / 4];
    }
}

// Both pieces are read before the first is stored, so that twice as many reads are in flight.
template <int KIND, bool PACKED>
__device__ void copy_two(u64 target, long long left, const Place &a, const Place &b)
{
    const int step = 16 * blockDim.x;
    const Raw first = load_piece<KIND, PACKED>(a), second = load_piece<KIND, PACKED>(b);
    if (left > 0) store_piece<KIND>(target, finish_piece<KIND, PACKED>(first, a), left);
    if (left > step) store_piece<KIND>(target + step, finish_piece<KIND, PACKED>(second, b), left - step);
}

// Pieces at `target` and one block of threads further on; `left` bytes from `target` on belong to the output.
extern "C" __device__ int copy_two_pieces(int *, int kind, u64 target, long long left, int row_bytes, int offset_a,
                                          int offset_b, u64 row_a, u64 next_a, u64 row_b, u64 next_b,
                                          int exponent_a, int exponent_b)
{
    const Place a = {row_a, next_a, offset_a, row_bytes - offset_a, exponent_a, 0};
    const Place b = {row_b, next_b, offset_b, row_bytes - offset_b, exponent_b, 0};
    if (kind == ALIGNED) copy_two<ALIGNED, true>(target, left, a, b);
    else if (kind == WORDS) copy_two<WORDS, false>(target, left, a, b);
    else if (kind == HALF) copy_two<HALF, true>(target, left, a, b);
    else if (kind == BFLOAT) copy_two<BFLOAT, true>(target, left, a, b);
    else copy_two<FLOAT8, true>(target, left, a, b);
    return 0;
}

template <int KIND> __device__ void copy_one(u64 target, long long left, const Place &place)
{
    const Raw raw = load_piece<KIND, false>(place);
    if (left > 0) store_piece<KIND>(target, finish_piece<KIND, false>(raw, place), left);
}

// A piece of bytes of up to three rows; the others begin at `cut` and a row further on.
__device__ void copy_bytes(u64 target, long long left, int row_bytes, const Place &p, u64 third)
{
    const int end = p.cut + row_bytes;
    const Raw raw = load_piece<BYTES, false>(p);
    Raw after = {}, last = {};
    if (p.next) after = load_bytes(p.next - p.cut, p.cut, min(end, 16));
    if (third) last = load_bytes(third - end, end, 16);
    uint4 value = finish_piece<BYTES, false>(raw, p);
    if (p.cut < 16) value = join(value, align_bytes(after, p.next - p.cut), p.cut);
    if (end < 16) value = join(value, align_bytes(last, third - end), end);
    if (left > 0) store_piece<BYTES>(target, value, left);
}

// The piece at `target`; `left` bytes from there on belong to the output.
extern "C" __device__ int copy_piece(int *, int kind, u64 target, long long left, int row_bytes, int offset, u64 row,
                                     u64 next, u64 third, int exponent, int next_exponent)
{
    const Place place = {row, next, offset, row_bytes - offset, exponent, next_exponent};
    if (kind == BYTES) copy_bytes(target, left, row_bytes, place, third);
    else if (kind == HALF) copy_one<HALF>(target, left, place);
    else if (kind == BFLOAT) copy_one<BFLOAT>(target, left, place);
    else copy_one<FLOAT8>(target, left, place);
    return 0;
}

template <int KIND, bool PACKED> __device__ void copy_four(
    u64 target, long long step, int count, int row_bytes, int lane, int lanes, const u64 *row, const int *exponent)
{
    for (int offset = 16 * lane; offset < row_bytes; offset += 16 * lanes) {
        const int cut = row_bytes - offset;
        Raw raw[4];
#pragma unroll
        for (int u = 0; u < 4; ++u) {
            if (u < count) raw[u] = load_piece<KIND, PACKED>({row[u], 0, offset, cut, exponent[u], 0});
        }
#pragma unroll
        for (int u = 0; u < 4; ++u) {
            const Place place = {row[u], 0, offset, cut, exponent[u], 0};
            if (u < count) store_piece<KIND>(target + u * step + offset, finish_piece<KIND, PACKED>(raw[u], place), cut);
        }
    }
}

template <int KIND> __device__ void widen_four(
    u64 target, long long step, int count, int row_bytes, int lane, int lanes, const u64 *row, const int *exponent)
{
    const u64 alignment = row[0] | row[1] | row[2] | row[3];
    if (row_bytes % 16 == 0 && alignment % (16 >> shift_of<KIND>()) == 0) {
        copy_four<KIND, true>(target, step, count, row_bytes, lane, lanes, row, exponent);
    } else {
        copy_four<KIND, false>(target, step, count, row_bytes, lane, lanes, row, exponent);
    }
}

// As `copy_four`, in pieces that lie whole in lines of the table: a line is requested once, not by two accesses.
template <int KIND> __device__ void copy_four_by_lines(
    u64 target, long long step, int count, int row_bytes, int lane, int lanes, const u64 *row)
{
    const int end = row_bytes + LINE - 1;
    for (int begin = 16 * lane; begin < end; begin += 16 * lanes) {
        uint4 piece[4];
#pragma unroll
        for (int u = 0; u < 4; ++u) {
            const int offset = begin - static_cast<int>(row[u] % LINE);
            piece[u] = make_uint4(0, 0, 0, 0);
            if (u < count && row[u] && offset > -16 && offset < row_bytes) piece[u] = *at<const uint4>(row[u] + offset);
        }
#pragma unroll
        for (int u = 0; u < 4; ++u) {
            const int offset = begin - static_cast<int>(row[u] % LINE);
            if (u >= count || offset <= -16 || offset >= row_bytes) continue;
            const u64 place = target + u * step + offset;
            if (KIND == ALIGNED) {
                *at<uint4>(place) = piece[u];
                continue;
            }
            const u32 word[4] = {piece[u].x, piece[u].y, piece[u].z, piece[u].w};
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                if (offset + 4 * k >= 0 && offset + 4 * k < row_bytes) *at<u32>(place + 4 * k) = word[k];
            }
        }
    }
}

// Copies `count` (at most four) rows to `target` and every `step` bytes from there, shared by the lanes of a group. A
// row is requested at once, which the link serves best, and four are in flight.
extern "C" __device__ int copy_four_rows(
    int *, int kind, u64 target, long long step, int count, int row_bytes, int lane, int lanes, u64 row_a, u64 row_b,
    u64 row_c, u64 row_d, int exponent_a, int exponent_b, int exponent_c, int exponent_d)
{
    const u64 row[4] = {row_a, row_b, row_c, row_d};
    const int exponent[4] = {exponent_a, exponent_b, exponent_c, exponent_d};
    // One access requests each line of a shorter row.
    const bool by_lines = row_bytes > 16 * lanes;
    if (kind == ALIGNED && by_lines) copy_four_by_lines<ALIGNED>(target, step, count, row_bytes, lane, lanes, row);
    else if (kind == WORDS && by_lines) copy_four_by_lines<WORDS>(target, step, count, row_bytes, lane, lanes, row);
    else if (kind == ALIGNED) copy_four<ALIGNED, true>(target, step, count, row_bytes, lane, lanes, row, exponent);
    else if (kind == WORDS) copy_four<WORDS, false>(target, step, count, row_bytes, lane, lanes, row, exponent);
    else if (kind == BYTES) copy_four<BYTES, false>(target, step, count, row_bytes, lane, lanes, row, exponent);
    else if (kind == HALF) widen_four<HALF>(target, step, count, row_bytes, lane, lanes, row, exponent);
    else if (kind == BFLOAT) widen_four<BFLOAT>(target, step, count, row_bytes, lane, lanes, row, exponent);
    else widen_four<FLOAT8>(target, step, count, row_bytes, lane, lanes, row, exponent);
    return 0;
}

// Copies the rows that the lanes of a group have found, one each and at most `left`, to `target` on. All groups of a
// warp call this together.
extern "C" __device__ int copy_found_rows(int *, int kind, u64 target, long long left, int row_bytes, int lane_bits,
                                          u64 found, int exponent_of_found)
{
    const int lanes = 1 << lane_bits, lane = threadIdx.x & (lanes - 1);
    const bool by_lines = row_bytes > 16 * lanes;
#pragma unroll 1
    for (int k = 0; k < lanes; k += 4) {
        u64 row[4];
        int exponent[4] = {};
#pragma unroll
        for (int u = 0; u < 4; ++u) {
            row[u] = __shfl_sync(~0u, found, k + u, lanes);
            if (kind == FLOAT8) exponent[u] = __shfl_sync(~0u, exponent_of_found, k + u, lanes);
        }
        const int count = static_cast<int>(max(0ll, min(4ll, left - k)));
        const u64 to = target + static_cast<long long>(k) * row_bytes;
        if (kind == ALIGNED && by_lines) copy_four_by_lines<ALIGNED>(to, row_bytes, count, row_bytes, lane, lanes, row);
        else if (kind == WORDS && by_lines) copy_four_by_lines<WORDS>(to, row_bytes, count, row_bytes, lane, lanes, row);
        else if (kind == ALIGNED) copy_four<ALIGNED, true>(to, row_bytes, count, row_bytes, lane, lanes, row, exponent);
        else if (kind == WORDS) copy_four<WORDS, false>(to, row_bytes, count, row_bytes, lane, lanes, row, exponent);
        else if (kind == HALF) widen_four<HALF>(to, row_bytes, count, row_bytes, lane, lanes, row, exponent);
        else if (kind == BFLOAT) widen_four<BFLOAT>(to, row_bytes, count, row_bytes, lane, lanes, row, exponent);
        else widen_four<FLOAT8>(to, row_bytes, count, row_bytes, lane, lanes, row, exponent);
    }
    return 0;
}
