// Integer matrix products of one warp, as PTX names them. In all of them lane = 4 * g + t: A has rows g and
// g + 8, B has the columns g, and an accumulator holds (row g, columns 2t and 2t + 1), then row g + 8.
#pragma once

#include "cuda/common.cuh"

namespace coldstream {

// Four 8 x 16-byte matrices. Lane l names row l % 8 of matrix l / 8; lane 4g + t gets bytes 4t … 4t + 3 of
// row g of each.
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

// Four 8 x 8 matrices of pairs of bytes, transposed: lane 4g + t gets pair g of rows 2t and 2t + 1 of each.
__device__ __forceinline__ void load_transposed_pairs(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

__device__ __forceinline__ void load_two_matrices(uint32_t (&r)[2], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(address));
}

__device__ __forceinline__ void store_shared_16(uint32_t address, int a, int b, int c, int d) {
  asm volatile("st.shared.v4.s32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

__device__ __forceinline__ void store_shared_4(uint32_t address, int value) {
  asm volatile("st.shared.s32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

#if COLDSTREAM_WIDE_PRODUCTS

// d = a b + c over 32 signed bytes; every accumulator starts at c.
__device__ __forceinline__ void multiply_bytes(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                               int c) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%10, %10, %10, %10};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c));
}

// d += a b over 32 signed bytes.
__device__ __forceinline__ void add_product(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// d += a b over 32 bytes, those of b unsigned.
__device__ __forceinline__ void add_product_of_unsigned(int (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                                        uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// d = a b over 16 signed bytes.
__device__ __forceinline__ void multiply_16_bytes(int (&d)[4], uint32_t a0, uint32_t a1, uint32_t b) {
  asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %7, %7, %7};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a0), "r"(a1), "r"(b), "r"(0));
}

#else

// d += a b over 16 signed bytes. Of eight rows and eight columns a lane has row g of a and column g of b,
// four bytes of each, and of d row g and the columns 2t and 2t + 1.
__device__ __forceinline__ void add_narrow_product(int& d0, int& d1, uint32_t a, uint32_t b) {
  asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
      : "+r"(d0), "+r"(d1)
      : "r"(a), "r"(b));
}

// The same with bytes of b that are unsigned.
__device__ __forceinline__ void add_narrow_product_of_unsigned(int& d0, int& d1, uint32_t a, uint32_t b) {
  asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.u8.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
      : "+r"(d0), "+r"(d1)
      : "r"(a), "r"(b));
}

#endif

#if COLDSTREAM_ASYNC_COPIES

// Barriers in shared memory. A phase ends when as many threads have arrived as `init_barrier` said; waiting
// for phase 1 of a fresh barrier returns at once.
__device__ __forceinline__ void init_barrier(uint32_t barrier, int count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

__device__ __forceinline__ void arrive_barrier(uint32_t barrier) {
  asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(barrier) : "memory");
}

// How often a thread arrives that copies: for what it stores itself, and when its copies are complete.
__device__ constexpr int arrivals_of_copier() { return 2; }

// This thread arrives when its copies so far are complete.
__device__ __forceinline__ void arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void wait_barrier(uint32_t barrier, int phase) {
  uint32_t is_over;
  do {
#if COLDSTREAM_CLUSTERS
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(is_over)
                 : "r"(barrier), "r"(phase)
                 : "memory");
#else
    asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(is_over)
                 : "r"(barrier), "r"(phase)
                 : "memory");
#endif
  } while (!is_over);
}

#else

// Numbers in shared memory that the block's threads agree by: what was written before a release is seen after
// the acquire that reads it.
__device__ __forceinline__ uint32_t load_acquire_shared(uint32_t from) {
  uint32_t value;
  asm volatile("ld.acquire.cta.shared.u32 %0, [%1];" : "=r"(value) : "r"(from) : "memory");
  return value;
}

__device__ __forceinline__ void store_release_shared(uint32_t to, uint32_t value) {
  asm volatile("st.release.cta.shared.u32 [%0], %1;" ::"r"(to), "r"(value) : "memory");
}

// Acquires and releases. Returns the old value.
__device__ __forceinline__ uint32_t add_to_shared(uint32_t to, uint32_t value) {
  uint32_t before;
  asm volatile("atom.acq_rel.cta.shared.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "r"(to), "r"(value)
               : "memory");
  return before;
}

// Between two looks at such a number.
__device__ __forceinline__ void look_again() { __nanosleep(20); }

#endif

}  // namespace coldstream

#if !COLDSTREAM_WIDE_PRODUCTS
#include "cuda/narrow_products.cuh"
#endif
#if !COLDSTREAM_ASYNC_COPIES
#include "cuda/counted_barriers.cuh"
#endif
