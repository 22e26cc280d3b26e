// The CRC32C of many buffers at the memory's speed, and their sampled elements.
//
// crc32c_list cuts each buffer into segments; a block of crc32c_segments takes one segment after
// another; crc32c_buffers brings them together. Within a segment the 16-byte groups are dealt to the
// block's lanes in turn, so that loads are coalesced: lane t takes the groups at t * 16 + row * ROW.
// CRC is linear over GF(2), so each of a lane's four words keeps a state of its own, advanced by one
// whole row a step:
//
//     state = A(state ^ word),   A = multiplication by x^(8 * ROW) modulo the polynomial
//
// A is four look-ups in tables of 256 entries, one a byte of the state. The tables stand 32 times in
// shared memory (less often where it is small), once a bank, so that no two lanes of a warp conflict.
// What is left at the end is brought to the end of the segment's last row by constant powers of x and
// added up (exclusive or); crc32c_buffers brings each segment to the end of its buffer. Zeros behind
// a buffer's end count as data until then; there they are divided out again, x being invertible
// modulo the polynomial. Bytes before a buffer's beginning, which its first group has where the
// address is no multiple of 16, are cancelled by a state that begins with them.
//
// Polynomials are bit-reflected: 1 << 31 is 1, 1 << 30 is x.

typedef unsigned int u32;
typedef unsigned long long u64;

// Given by who compiles: SEGMENT, in bytes, a multiple of ROW; COPIES of the tables, a power of two
// up to 32, as many as shared memory has room for; SAMPLES of a tensor.
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

// A batch's memory, in 64-bit words: how many segments are listed and how many were taken, both 0 at
// first; of each buffer its address and its length in bytes; then what crc32c_list fills in, of each
// segment its address, the bytes from there to its buffer's end, and its buffer, marked where the
// segment is that buffer's first; and the segments' results.
struct Batch {
  u64 *listed, *taken;
  const u64 *rows;
  u64 *addresses, *to_end, *owners;
  u32* raw;

  // capacity: of segments, at least as many as the buffers are cut into.
  __device__ Batch(u64* memory, u64 buffers, u64 capacity)
      : listed(memory), taken(memory + 1), rows(memory + 2), addresses(memory + 2 + 2 * buffers),
        to_end(addresses + capacity), owners(to_end + capacity), raw((u32*)(owners + capacity)) {}
};

// One block a buffer. All segments but a buffer's first begin at a multiple of 16.
extern "C" __global__ void crc32c_list(u64* memory, u64 buffers, u64 capacity, u32* crcs) {
  const Batch batch(memory, buffers, capacity);
  const u64 buffer = blockIdx.x, address = batch.rows[buffer];
  const u64 skip = address & 15, nbytes = batch.rows[buffers + buffer];
  const u64 segments = nbytes ? (skip + nbytes + SEGMENT - 1) / SEGMENT : 0;
  __shared__ u64 first;
  if (threadIdx.x == 0) {
    first = atomicAdd(batch.listed, segments);
    crcs[buffer] = 0;
  }
  __syncthreads();
  for (u64 i = threadIdx.x; i < segments; i += blockDim.x) {
    const u64 begin = i ? i * SEGMENT - skip : 0;
    batch.addresses[first + i] = address + begin;
    batch.to_end[first + i] = nbytes - begin;
    batch.owners[first + i] = i ? buffer : buffer | FIRST;
  }
}

// constants: tables, 4 x 256, A's; lane powers, x^(128 * (LANES - 1 - lane)); squares, x^(2^i) for i
// below 31.
extern "C" __global__ void __launch_bounds__(LANES, 1)
crc32c_segments(u64* memory, u64 buffers, u64 capacity, const u32* constants) {
  extern __shared__ u32 shared[];  // 4 * 256 * COPIES words
  __shared__ u32 sums[32];
  __shared__ u64 upcoming;
  const Batch batch(memory, buffers, capacity);
  const u64 count = *batch.listed;
  const int lane = threadIdx.x;
  const u32 entry = constants[lane];
  for (int i = 0; i < COPIES; i++) shared[lane * COPIES + (lane + i) % COPIES] = entry;
  const char* bank = (const char*)(shared + lane % COPIES);
  const u32 lane_power = constants[1024 + lane];
  u64 segment = blockIdx.x;
  __syncthreads();
  while (segment < count) {
    if (lane == 0) upcoming = gridDim.x + atomicAdd(batch.taken, 1ull);
    const u64 address = batch.addresses[segment];
    const u64 skip = address & 15;
    const unsigned char* at = (const unsigned char*)(address - skip);
    const u64 nbytes = min(batch.to_end[segment] + skip, (u64)SEGMENT);
    const u64 rows = (nbytes + ROW - 1) / ROW;
    const uint4* group = (const uint4*)at + lane;
    u32 s0 = 0, s1 = 0, s2 = 0, s3 = 0;
    if (skip && lane == 0) {
      const uint4 before = partial(at, skip);
      s0 = before.x, s1 = before.y, s2 = before.z, s3 = before.w;
    }
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
      if (lane == 0) batch.raw[segment] = sum;
    }
    segment = upcoming;
    __syncthreads();
  }
}

// One warp a segment.
extern "C" __global__ void crc32c_buffers(u64* memory, u64 buffers, u64 capacity,
                                          const u32* constants, u32* crcs) {
  const Batch batch(memory, buffers, capacity);
  const u32* squares = constants + 2048;
  const u64 segment = ((u64)blockIdx.x * blockDim.x + threadIdx.x) / 32;
  if (segment >= *batch.listed) return;
  const u64 to_end = batch.to_end[segment], owner = batch.owners[segment];
  const long long after = (long long)(to_end + (batch.addresses[segment] & 15));
  const long long covered = (long long)((min((u64)after, (u64)SEGMENT) + ROW - 1) / ROW * ROW);
  // Negative where the last row reaches past the buffer's end: those zeros are divided out.
  const long long bits = (after - covered) * 8 % ORDER;
  u32 sum = multiply(batch.raw[segment], power(bits < 0 ? bits + ORDER : bits, squares));
  // The register starts with ones, and is inverted at the end.
  if (owner & FIRST) sum ^= ~multiply(~0u, power(to_end * 8 % ORDER, squares));
  if ((threadIdx.x & 31) == 0) atomicXor(crcs + (owner & ~FIRST), sum);
}

// One block a tensor, whose row is (address, bytes an element, elements, its first draw): its
// sampled elements, one after another, at `stride` bytes times its number in `out`. A tensor of up
// to SAMPLES elements is taken whole; of another one element is drawn from each of SAMPLES strata.
extern "C" __global__ void gather(const u64* rows, const u64* draws, unsigned char* out,
                                  u64 stride) {
  const u64* row = rows + 4 * blockIdx.x;
  const u64 width = row[1], count = row[2], i = threadIdx.x;
  if (i >= min(count, (u64)SAMPLES)) return;
  u64 element = i;
  if (count > SAMPLES) {
    const u64 begin = i * count / SAMPLES, end = (i + 1) * count / SAMPLES;
    element = begin + __umul64hi(draws[row[3] + i], end - begin);
  }
  const unsigned char* from = (const unsigned char*)row[0] + element * width;
  unsigned char* to = out + blockIdx.x * stride + i * width;
  for (u64 byte = 0; byte < width; byte++) to[byte] = from[byte];
}
