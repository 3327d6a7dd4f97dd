// Stands for the package's cuda/tensor_cores.cuh where its kernels are compiled for the host: the same products, by
// loops. A warp's lanes meet with what they have of the operands, read each other's, and meet again before they go on.
#pragma once

#include "cuda/common.cuh"

namespace coldstream {

// What all lanes have given, by lane.
template <class T>
struct all_of_warp {
  const unsigned long long* addresses;

  explicit all_of_warp(const T& own)
      : addresses(reinterpret_cast<const unsigned long long*>(
            meet_in_warp(meeting::gather, 0xffffffffu, reinterpret_cast<unsigned long long>(&own), 0))) {}
  ~all_of_warp() { __syncwarp(); }
  const T& operator[](int lane) const { return *reinterpret_cast<const T*>(addresses[lane]); }
};

template <int count>
void load_matrices_of(uint32_t (&r)[count], uint32_t address) {
  const int lane = threadIdx.x % 32;
  uint32_t loaded[count];
  {
    const all_of_warp<uint32_t> rows(address);
    for (int i = 0; i < count; i++) {
      const uint8_t* row = reinterpret_cast<const uint8_t*>(dynamic_shared) + rows[8 * i + lane / 4];
      __builtin_memcpy(&loaded[i], row + lane % 4 * 4, 4);
    }
  }
  for (int i = 0; i < count; i++) r[i] = loaded[i];
}

inline void load_matrices(uint32_t (&r)[4], uint32_t address) { load_matrices_of(r, address); }
inline void load_two_matrices(uint32_t (&r)[2], uint32_t address) { load_matrices_of(r, address); }

inline void load_transposed_pairs(uint32_t (&r)[4], uint32_t address) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  uint32_t loaded[4] = {};
  {
    const all_of_warp<uint32_t> rows(address);
    for (int i = 0; i < 4; i++) {
      for (int k = 0; k < 2; k++) {
        uint16_t pair;
        const uint8_t* row = reinterpret_cast<const uint8_t*>(dynamic_shared) + rows[8 * i + 2 * t + k];
        __builtin_memcpy(&pair, row + 2 * g, 2);
        loaded[i] |= uint32_t(pair) << 16 * k;
      }
    }
  }
  for (int i = 0; i < 4; i++) r[i] = loaded[i];
}

struct product_operands {
  uint32_t a[4], b[2];
};

// d[i] += row i / 2 times column i % 2, whose sum fits an int. On its own with vectors of the compiler's, because tests of
// whole models spent a fifth of their time here.
template <class B>
__attribute__((noinline, optimize("O3")))
void add_dots(int (&d)[4], const int8_t (&rows)[2][32], const B (&columns)[2][32]) {
  for (int i = 0; i < 4; i++) {
    int sum = 0;
    for (int k = 0; k < 32; k++) sum += rows[i / 2][k] * columns[i % 2][k];
    d[i] = int(static_cast<unsigned int>(d[i]) + static_cast<unsigned int>(sum));
  }
}

// d += a b over 32 bytes, those of a signed.
template <class B>
void add_product_of_bytes(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const product_operands own = {{a[0], a[1], a[2], a[3]}, {b0, b1}};
  const all_of_warp<product_operands> all(own);
  int8_t rows[2][32];
  B columns[2][32];
  for (int i = 0; i < 2; i++) {
    for (int word = 0; word < 8; word++) {
      __builtin_memcpy(&rows[i][4 * word], &all[4 * g + word % 4].a[word / 4 * 2 + i], 4);
      __builtin_memcpy(&columns[i][4 * word], &all[(2 * t + i) * 4 + word % 4].b[word / 4], 4);
    }
  }
  add_dots(d, rows, columns);
}

inline void add_product(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  add_product_of_bytes<int8_t>(d, a, b0, b1);
}

inline void multiply_bytes(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, int c) {
  d[0] = d[1] = d[2] = d[3] = c;
  add_product(d, a, b0, b1);
}

// The other sixteen bytes are zeros.
inline void multiply_16_bytes(int (&d)[4], uint32_t a0, uint32_t a1, uint32_t b) {
  multiply_bytes(d, {a0, a1, 0, 0}, b, 0, 0);
}

inline void add_product_of_unsigned(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  add_product_of_bytes<uint8_t>(d, a, b0, b1);
}

inline void store_shared_16(uint32_t address, int a, int b, int c, int d) {
  *reinterpret_cast<int4*>(shared_at(address)) = {a, b, c, d};
}
inline void store_shared_4(uint32_t address, int value) { *reinterpret_cast<int*>(shared_at(address)) = value; }

// A barrier in shared memory: how many have yet to arrive in this phase, of how many, and the phase.
struct shared_barrier {
  int missing;
  short count, phase;
};
inline shared_barrier& barrier_at(uint32_t address) { return *reinterpret_cast<shared_barrier*>(shared_at(address)); }
inline void init_barrier(uint32_t barrier, int count) { barrier_at(barrier) = {count, short(count), 0}; }
inline void arrive_barrier(uint32_t barrier) {
  shared_barrier& at = barrier_at(barrier);
  if (--at.missing == 0) at = {at.count, at.count, short(at.phase ^ 1)};
  note_change();
}
inline void arrive_after_copies(uint32_t barrier) {
  commit_copies();
  wait_for_copies<0>();
  arrive_barrier(barrier);
}
inline void wait_barrier(uint32_t barrier, int phase) {
  while (barrier_at(barrier).phase == phase) wait_for_change();
}

}  // namespace coldstream
