// Integer products of four warps and shared memory, which only sm_90 has (PTX calls them wgmma). A warp has
// 16 rows of A in registers, as for a product of its own, or in shared memory. B is 8 * nt rows of 32 bytes
// in shared memory, within rows of 128 whose chunks of 16 are swizzled.
#pragma once

#include "cuda/matrix_places.cuh"
#include "cuda/tensor_cores.cuh"

namespace coldstream {

// Start of a warp's matrices in units of 16 bytes, known to the compiler to be the same for all lanes, so
// that descriptors at constant distances need no register per lane.
__device__ __forceinline__ uint32_t same_for_warp(uint32_t address) {
  return __shfl_sync(all_lanes, (address & 0x3ffff) / 16, 0);
}

// B at `offset` from there. In sixteens of bytes: bits 0 … 13 the address, 16 … 29 the distance of the two
// sixteens of a row if not swizzled, 32 … 45 the distance of eights of rows; from bit 62 on the kind of
// swizzle.
__device__ __forceinline__ uint64_t describe_swizzled_from(uint32_t sixteens, int offset) {
  return uint64_t(sixteens + offset / 16) | uint64_t(swizzle_bytes / 16) << 32 | uint64_t(1) << 62;
}

__device__ __forceinline__ uint64_t describe_swizzled(uint32_t address) {
  return describe_swizzled_from((address & 0x3ffff) / 16, 0);
}

__device__ __forceinline__ uint64_t describe_plain(uint32_t address) {
  return uint64_t((address & 0x3ffff) / 16) | uint64_t(plain_half_bytes / 16) << 16 |
         uint64_t(plain_bytes / 16) << 32;
}

// Makes writes of the generic proxy, visible to this thread after barriers, visible to the products.
__device__ __forceinline__ void see_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Before products that read registers which were written since the last ones.
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void commit_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Until all but the last `pending` commits are done.
template <int pending>
__device__ __forceinline__ void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// Keeps the compiler from reading accumulators before the preceding wait.
template <int nt>
__device__ __forceinline__ void take_products(int (&d)[nt][4]) {
#pragma unroll
  for (int n = 0; n < nt; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) asm volatile("" : "+r"(d[n][i])::"memory");
}

template <int nt>
__device__ __forceinline__ void take_products(float (&d)[nt][4]) {
#pragma unroll
  for (int n = 0; n < nt; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) asm volatile("" : "+f"(d[n][i])::"memory");
}

// Registers of a multiprocessor move from some warpgroups to others; every thread of a warpgroup calls this.
template <int count>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}

template <int count>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}

// clang-format off
// The operands of nt tiles of eight rows of B: accumulators, then A, B and whether to add.
#define COLDSTREAM_TILE(kind, n) kind(d[n][0]), kind(d[n][1]), kind(d[n][2]), kind(d[n][3])
#define COLDSTREAM_TILES_2(kind) COLDSTREAM_TILE(kind, 0), COLDSTREAM_TILE(kind, 1)
#define COLDSTREAM_TILES_4(kind) COLDSTREAM_TILES_2(kind), COLDSTREAM_TILE(kind, 2), COLDSTREAM_TILE(kind, 3)
#define COLDSTREAM_TILES_8(kind) COLDSTREAM_TILES_4(kind), COLDSTREAM_TILE(kind, 4), COLDSTREAM_TILE(kind, 5), \
                                 COLDSTREAM_TILE(kind, 6), COLDSTREAM_TILE(kind, 7)
#define COLDSTREAM_NAMES_2 "%0, %1, %2, %3, %4, %5, %6, %7"
#define COLDSTREAM_NAMES_4 COLDSTREAM_NAMES_2 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define COLDSTREAM_NAMES_8 COLDSTREAM_NAMES_4 ", %16, %17, %18, %19, %20, %21, %22, %23, " \
                                              "%24, %25, %26, %27, %28, %29, %30, %31"
#define COLDSTREAM_PRODUCT(nt, width, inputs, flag, types, options, kind)                                 \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, " flag ", 0; "                                             \
               "wgmma.mma_async.sync.aligned.m64n" width types " {" COLDSTREAM_NAMES_##nt "}, " inputs    \
               ", p" options "; }"                                                                        \
               : COLDSTREAM_TILES_##nt(kind)                                                              \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(matrix), "r"(int(add)) : "memory")
#define COLDSTREAM_PRODUCTS(types, options, kind)                                                         \
  if constexpr (nt == 2)                                                                                  \
    COLDSTREAM_PRODUCT(2, "16", "{%8, %9, %10, %11}, %12", "%13", types, options, kind);                  \
  else if constexpr (nt == 4)                                                                             \
    COLDSTREAM_PRODUCT(4, "32", "{%16, %17, %18, %19}, %20", "%21", types, options, kind);                \
  else                                                                                                    \
    COLDSTREAM_PRODUCT(8, "64", "{%32, %33, %34, %35}, %36", "%37", types, options, kind)
// clang-format on

// d = a b, or with `add` d += a b, over 32 bytes, those of a unsigned or not; 2, 4 or 8 tiles of eight rows
// of B. Accumulators and a belong to the product until it is waited for.
template <bool is_unsigned, int nt>
__device__ __forceinline__ void multiply_by_four(int (&d)[nt][4], const uint32_t (&a)[4], uint64_t matrix,
                                                 bool add) {
  static_assert(nt == 2 || nt == 4 || nt == 8);
  if constexpr (is_unsigned) {
    COLDSTREAM_PRODUCTS("k32.s32.u8.s8", "", "+r");
  } else {
    COLDSTREAM_PRODUCTS("k32.s32.s8.s8", "", "+r");
  }
}

// The same with 64 rows of a in shared memory, laid out like B, and 4 tiles of eight rows of B.
__device__ __forceinline__ void multiply_shared_by_four(int (&d)[4][4], uint64_t a, uint64_t matrix,
                                                        bool add) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %18, 0; wgmma.mma_async.sync.aligned.m64n32k32.s32.s8.s8 "
      "{" COLDSTREAM_NAMES_4 "}, %16, %17, p; }"
      : COLDSTREAM_TILES_4("+r")
      : "l"(a), "l"(matrix), "r"(int(add))
      : "memory");
}

// d = a b over 16 values of float16.
template <int nt>
__device__ __forceinline__ void multiply_halves_by_four(float (&d)[nt][4], const uint32_t (&a)[4],
                                                        uint64_t matrix) {
  constexpr bool add = false;
  COLDSTREAM_PRODUCTS("k16.f32.f16.f16", ", 1, 1, 0", "+f");
}

#undef COLDSTREAM_PRODUCTS
#undef COLDSTREAM_PRODUCT
#undef COLDSTREAM_NAMES_8
#undef COLDSTREAM_NAMES_4
#undef COLDSTREAM_NAMES_2
#undef COLDSTREAM_TILES_8
#undef COLDSTREAM_TILES_4
#undef COLDSTREAM_TILES_2
#undef COLDSTREAM_TILE

__device__ __forceinline__ uint32_t subtract_halves(uint32_t a, uint32_t b) {
  uint32_t difference;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(difference) : "r"(a), "r"(b));
  return difference;
}

// Two int16, of magnitudes up to 2048, as float16.
__device__ __forceinline__ uint32_t halves_of(uint32_t pair) {
  uint32_t halves;
  asm("{ .reg .s16 a, b; .reg .f16 x, y; mov.b32 {a, b}, %1; cvt.rn.f16.s16 x, a; cvt.rn.f16.s16 y, b; "
      "mov.b32 %0, {x, y}; }"
      : "=r"(halves)
      : "r"(pair));
  return halves;
}

}  // namespace coldstream
