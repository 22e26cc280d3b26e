// The CRC32C of many buffers at the memory's speed, and their sampled elements.
//
// A buffer is cut into segments; a block takes one segment after another. Within a segment the
// 16-byte groups are dealt to the block's lanes in turn, so that loads are coalesced: lane t takes
// the groups at t * 16 + row * ROW. CRC is linear over GF(2), so each of a lane's four words keeps
// a state of its own, advanced by one whole row a step:
//
//     state = A(state ^ word),   A = multiplication by x^(8 * ROW) modulo the polynomial
//
// A is four look-ups in tables of 256 entries, one a byte of the state. The tables stand 32 times in
// shared memory (less often where it is small), once a bank, so that no two lanes of a warp conflict. What is left at the end is
// brought to the end of the segment's last row by constant powers of x and added up (exclusive or);
// a second kernel brings each segment to the end of its buffer. Zeros behind a buffer's end count as
// data here; the second kernel divides them out again, x being invertible modulo the polynomial.
//
// Polynomials are bit-reflected: 1 << 31 is 1, 1 << 30 is x.

typedef unsigned int u32;
typedef unsigned long long u64;

// Given by who compiles: SEGMENT, in bytes, a multiple of ROW; COPIES of the tables, a power of two
// up to 32, as many as shared memory has room for.
#define SHIFT (COPIES == 32 ? 7 : COPIES == 16 ? 6 : 5)
#define LANES 1024
#define ROW (LANES * 16ull)
#define FIRST (1ull << 63)
#define POLYNOMIAL 0x82F63B78u
#define X32 0x82F63B78u       // x^32: the polynomial without its leading term
#define ORDER 0x7FFFFFFFll    // of x in the field's group: x^ORDER is 1

__device__ u32 multiply(u32 a, u32 b) {
  u32 product = 0;
#pragma unroll
  for (int i = 0; i < 32; i++) {
    product ^= b & (u32)((int)a >> 31);
    a <<= 1;
    b = (b >> 1) ^ (POLYNOMIAL & (0u - (b & 1)));
  }
  return product;
}

// x^exponent, by all lanes of a warp together: lane i holds x^(2^i), squares are given.
__device__ u32 power(u64 exponent, const u32* squares) {
  int lane = threadIdx.x & 31;
  u32 factor = lane < 31 && (exponent >> lane & 1) ? squares[lane] : 1u << 31;
  for (int distance = 16; distance; distance >>= 1)
    factor = multiply(factor, __shfl_xor_sync(~0u, factor, distance));
  return factor;
}

// tables points at this lane's copy; an entry's copies stand side by side.
__device__ __forceinline__ u32 advance(const char* tables, u32 state) {
  const u32 byte = 0xFFu << SHIFT, table = 256u << SHIFT;
  const u32 a = *(const u32*)(tables + (state << SHIFT & byte));
  const u32 b = *(const u32*)(tables + table + (state >> (8 - SHIFT) & byte));
  const u32 c = *(const u32*)(tables + 2 * table + (state >> (16 - SHIFT) & byte));
  const u32 d = *(const u32*)(tables + 3 * table + (state >> (24 - SHIFT) & byte));
  return a ^ b ^ c ^ d;
}

// The group at an address, of which only the first `length` bytes are the buffer's.
__device__ uint4 partial(const unsigned char* at, long long length) {
  u32 word[4] = {0, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < 16; i++)
    if (i < length) word[i >> 2] |= (u32)at[i] << ((i & 3) * 8);
  return make_uint4(word[0], word[1], word[2], word[3]);
}

#define STEP(group)                          \
  s0 = advance(bank, s0 ^ (group).x);        \
  s1 = advance(bank, s1 ^ (group).y);        \
  s2 = advance(bank, s2 ^ (group).z);        \
  s3 = advance(bank, s3 ^ (group).w);

// Of each segment its address, a multiple of 16, and the bytes from there to its buffer's end.
// tables: 4 x 256, A's; lane_powers: x^(128 * (LANES - 1 - lane)); raw: a result a segment.
extern "C" __global__ void __launch_bounds__(LANES, 1)
crc32c_segments(const u64* addresses, const u64* to_end, u64 count, const u32* tables,
                const u32* lane_powers, u32* raw, u32* next_segment) {
  extern __shared__ u32 shared[];  // 4 * 256 * COPIES words
  __shared__ u32 sums[32];
  __shared__ u64 upcoming;
  const int lane = threadIdx.x;
  const u32 entry = tables[lane];
  for (int i = 0; i < COPIES; i++) shared[lane * COPIES + (lane + i) % COPIES] = entry;
  const char* bank = (const char*)(shared + lane % COPIES);
  const u32 lane_power = lane_powers[lane];
  u64 segment = blockIdx.x;
  __syncthreads();
  while (segment < count) {
    if (lane == 0) upcoming = gridDim.x + atomicAdd(next_segment, 1u);
    const unsigned char* at = (const unsigned char*)addresses[segment];
    const u64 nbytes = min(to_end[segment], (u64)SEGMENT);
    const u64 rows = (nbytes + ROW - 1) / ROW;
    const uint4* group = (const uint4*)at + lane;
    u32 s0 = 0, s1 = 0, s2 = 0, s3 = 0;
    u64 row = 0;
    if (rows > 4) {
      // The next four groups are on their way while these four are worked on.
      uint4 a = __ldcs(group), b = __ldcs(group + LANES);
      uint4 c = __ldcs(group + 2 * LANES), d = __ldcs(group + 3 * LANES);
      for (; row + 8 < rows; row += 4) {
        group += 4 * LANES;
        const uint4 e = __ldcs(group), f = __ldcs(group + LANES);
        const uint4 g = __ldcs(group + 2 * LANES), h = __ldcs(group + 3 * LANES);
        STEP(a) STEP(b) STEP(c) STEP(d)
        a = e, b = f, c = g, d = h;
      }
      STEP(a) STEP(b) STEP(c) STEP(d)
      row += 4;
      group += 4 * LANES;
    }
    for (; row + 1 < rows; row++, group += LANES) {
      const uint4 a = __ldcs(group);
      STEP(a)
    }
    const long long left = (long long)nbytes - (long long)(row * ROW + lane * 16ull);
    uint4 last = make_uint4(0, 0, 0, 0);
    if (left >= 16)
      last = __ldcs(group);
    else if (left > 0)
      last = partial((const unsigned char*)group, left);
    u32 sum = multiply(s0 ^ last.x, X32);
    sum = multiply(sum ^ s1 ^ last.y, X32);
    sum = multiply(sum ^ s2 ^ last.z, X32);
    sum = multiply(sum ^ s3 ^ last.w, X32);
    sum = __reduce_xor_sync(~0u, multiply(sum, lane_power));
    if ((lane & 31) == 0) sums[lane >> 5] = sum;
    __syncthreads();
    if (lane < 32) {
      sum = __reduce_xor_sync(~0u, sums[lane]);
      if (lane == 0) raw[segment] = sum;
    }
    segment = upcoming;
    __syncthreads();
  }
}

// One warp a segment; buffers: the segment's buffer, and whether it is that buffer's first (FIRST).
// squares: x^(2^i) for i below 31. crcs start at 0.
extern "C" __global__ void crc32c_buffers(const u64* to_end, const u64* buffers, u64 count,
                                          const u32* raw, const u32* squares, u32* crcs) {
  const u64 segment = ((u64)blockIdx.x * blockDim.x + threadIdx.x) / 32;
  if (segment >= count) return;
  const long long after = (long long)to_end[segment];
  const long long covered = (long long)((min((u64)after, (u64)SEGMENT) + ROW - 1) / ROW * ROW);
  // Negative where the last row reaches past the buffer's end: those zeros are divided out.
  const long long bits = (after - covered) * 8 % ORDER;
  u32 sum = multiply(raw[segment], power(bits < 0 ? bits + ORDER : bits, squares));
  // The register starts with ones, and is inverted at the end.
  const u32 start = multiply(~0u, power(after * 8 % ORDER, squares));
  if (buffers[segment] & FIRST) sum ^= ~start;
  if ((threadIdx.x & 31) == 0) atomicXor(crcs + (buffers[segment] & ~FIRST), sum);
}

// One block a buffer, whose row is (address, bytes an element, elements, its first place in
// `indices`, its first place in `out`): the elements at those indices, one after another.
extern "C" __global__ void gather(const u64* rows, const u64* indices, unsigned char* out) {
  const u64* row = rows + 5 * blockIdx.x;
  const u64 width = row[1];
  for (u64 i = threadIdx.x; i < row[2]; i += blockDim.x) {
    const unsigned char* from = (const unsigned char*)row[0] + indices[row[3] + i] * width;
    unsigned char* to = out + row[4] + i * width;
    for (u64 byte = 0; byte < width; byte++) to[byte] = from[byte];
  }
}
