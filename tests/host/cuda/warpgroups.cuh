// Stands for the package's cuda/warpgroups.cuh where its kernels are compiled for the host: the same products, by loops.
// What is multiplied is read when the products are waited for, as late as a GPU may read it.
#pragma once

#include "cuda/tensor_cores.cuh"

namespace coldstream {

constexpr int swizzled_rows = 8, swizzled_row_bytes = 128;
constexpr int swizzle_bytes = swizzled_rows * swizzled_row_bytes;

template <int num_rows>
constexpr int swizzled_place(int row, int chunk) {
  return (chunk / 8 * num_rows + row) * swizzled_row_bytes + ((chunk ^ row) & 7) * 16;
}

inline uint64_t describe_swizzled(uint32_t address) { return address; }

inline uint32_t same_for_warp(uint32_t address) { return address / 16; }
inline uint64_t describe_swizzled_from(uint32_t sixteens, int offset) { return 16 * sixteens + offset; }

// Of kernels that do not run on the host.
uint64_t describe_plain(uint32_t address);
int plain_place(int row, int half);
uint32_t subtract_halves(uint32_t a, uint32_t b);
uint32_t halves_of(uint32_t pair);
template <int nt>
void take_products(float (&)[nt][4]) {}
template <int nt>
void multiply_halves_by_four(float (&)[nt][4], const uint32_t (&)[4], uint64_t) {}

// Byte k of row `row` of what `matrix` describes: bits 4 … 6 of an address are swizzled by bits 7 … 9.
inline uint8_t* described_byte(uint64_t matrix, int row, int k) {
  const uint32_t address = uint32_t(matrix) + row * swizzled_row_bytes + k;
  return shared_at(address ^ (address >> 7 & 7) << 4);
}

inline void see_copies() {}
inline void begin_products() {}

template <int count>
void give_registers() {}
template <int count>
void take_registers() {}

// Products that were begun and not waited for, of the thread that runs.
struct late_product {
  int* d;
  uint32_t a[4];
  uint64_t rows, matrix;
  int tiles;
  bool is_shared, add;
};

inline void compute(const late_product& own) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, warp = threadIdx.x / 32 % 4;
  const all_of_warp<late_product> all(own);
  for (int n = 0; n < own.tiles; n++) {
    for (int i = 0; i < 4; i++) {
      unsigned int sum = own.add ? own.d[4 * n + i] : 0;
      for (int k = 0; k < 32; k++) {
        const int row = g + i / 2 * 8;
        const uint32_t word = all[4 * g + k / 4 % 4].a[k / 16 * 2 + i / 2];
        const int x = own.is_shared ? int8_t(*described_byte(own.rows, 16 * warp + row, k)) : int8_t(word >> k % 4 * 8);
        sum += static_cast<unsigned int>(x * int8_t(*described_byte(own.matrix, 8 * n + 2 * t + i % 2, k)));
      }
      own.d[4 * n + i] = int(sum);
    }
  }
}

inline void commit_products() { begin_product_group(); }

template <int pending>
void wait_for_products() {
  while (auto* next = static_cast<late_product*>(take_product(pending))) {
    compute(*next);
    delete next;
  }
}

template <int nt>
void take_products(int (&)[nt][4]) {}

template <bool is_unsigned, int nt>
void multiply_by_four(int (&d)[nt][4], const uint32_t (&a)[4], uint64_t matrix, bool add) {
  static_assert(!is_unsigned, "no kernel that runs on the host has unsigned bytes here");
  keep_product(new late_product{d[0], {a[0], a[1], a[2], a[3]}, 0, matrix, nt, false, add});
}

inline void multiply_shared_by_four(int (&d)[4][4], uint64_t a, uint64_t matrix, bool add) {
  keep_product(new late_product{d[0], {}, a, matrix, 4, true, add});
}

}  // namespace coldstream
