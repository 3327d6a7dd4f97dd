// The products of tensor_cores.cuh where the widest integer product is of 8 x 16 by 16 x 8 bytes: rows g and
// g + 8 of a have products of their own, as have the first and the last sixteen inputs. A lane's registers
// are the same.
#pragma once

namespace coldstream {

// d += a b over 32 signed bytes.
__device__ __forceinline__ void add_product(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
#pragma unroll
    for (int i = 0; i < 2; i++) add_narrow_product(d[2 * i], d[2 * i + 1], a[2 * half + i], half ? b1 : b0);
  }
}

// d += a b over 32 bytes, those of b unsigned.
__device__ __forceinline__ void add_product_of_unsigned(int (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                                        uint32_t b1) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
#pragma unroll
    for (int i = 0; i < 2; i++)
      add_narrow_product_of_unsigned(d[2 * i], d[2 * i + 1], a[2 * half + i], half ? b1 : b0);
  }
}

// d = a b + c over 32 signed bytes; every accumulator starts at c.
__device__ __forceinline__ void multiply_bytes(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                               int c) {
#pragma unroll
  for (int i = 0; i < 4; i++) d[i] = c;
  add_product(d, a, b0, b1);
}

// d = a b over 16 signed bytes.
__device__ __forceinline__ void multiply_16_bytes(int (&d)[4], uint32_t a0, uint32_t a1, uint32_t b) {
#pragma unroll
  for (int i = 0; i < 4; i++) d[i] = 0;
  add_narrow_product(d[0], d[1], a0, b);
  add_narrow_product(d[2], d[3], a1, b);
}

}  // namespace coldstream
