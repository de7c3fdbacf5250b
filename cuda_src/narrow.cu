// One item of each of up to four tables, 1 to 16 bytes long, which Numba cannot read by address; numbers with a shift.
//
// Called from pyg_direct/kernels/rows/gather.py, by Numba's calling convention (see rows.cu).

typedef unsigned long long u64;

template <typename T> __device__ T *at(u64 address)
{
    return static_cast<T *>(__cvta_global_to_generic(address));
}

// An item of 2^bits bytes; zeros if `from` is 0.
__device__ uint4 load_item(u64 from, int bits)
{
    uint4 item = {};
    if (from == 0) return item;
    if (bits == 0) item.x = *at<const unsigned char>(from);
    else if (bits == 1) item.x = *at<const unsigned short>(from);
    else if (bits == 2) item.x = *at<const unsigned int>(from);
    else if (bits == 3) {
        const uint2 both = *at<const uint2>(from);
        item.x = both.x, item.y = both.y;
    } else item = *at<const uint4>(from);
    return item;
}

__device__ void store_item(u64 to, int bits, const uint4 &item)
{
    if (bits == 0) *at<unsigned char>(to) = item.x;
    else if (bits == 1) *at<unsigned short>(to) = item.x;
    else if (bits == 2) *at<unsigned int>(to) = item.x;
    else if (bits == 3) *at<uint2>(to) = make_uint2(item.x, item.y);
    else *at<uint4>(to) = item;
}

// Copies item `from` of each table to item `to` of its output; `from` < 0 stands for zeros, an output at 0 for none.
// All are requested before the first is stored.
extern "C" __device__ int copy_items(int *, long long to, long long from, u64 table_a, u64 table_b, u64 table_c,
                                     u64 table_d, u64 out_a, u64 out_b, u64 out_c, u64 out_d, int bits_a, int bits_b,
                                     int bits_c, int bits_d)
{
    const u64 table[4] = {table_a, table_b, table_c, table_d}, out[4] = {out_a, out_b, out_c, out_d};
    const int bits[4] = {bits_a, bits_b, bits_c, bits_d};
    uint4 item[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) item[k] = load_item(from < 0 || !out[k] ? 0 : table[k] + (from << bits[k]), bits[k]);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        if (out[k]) store_item(out[k] + (to << bits[k]), bits[k], item[k]);
    }
    return 0;
}

// Writes number `from` of a table plus `shift` to number `to` of `out`; a table at 0 holds zeros.
extern "C" __device__ int shift_number(int *, u64 out, long long to, u64 table, long long from, long long shift)
{
    at<long long>(out)[to] = (table ? at<const long long>(table)[from] : 0) + shift;
    return 0;
}
