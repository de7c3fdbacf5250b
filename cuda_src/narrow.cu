// One item of a table, 1 to 16 bytes long, which Numba cannot read by address.
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

// Copies item `from` of a table to item `to` of its output; `from` < 0 stands for zeros.
extern "C" __device__ int copy_item(int *, long long to, long long from, u64 table, u64 out, int bits)
{
    store_item(out + (to << bits), bits, load_item(from < 0 ? 0 : table + (from << bits), bits));
    return 0;
}
