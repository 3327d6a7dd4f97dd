// Stands for the package's cuda/warpgroups.cuh where its kernels are compiled for the host: the same products, by loops.
// What is multiplied is read when the products are waited for, as late as a GPU may read it.
#pragma once

#include "cuda/matrix_places.cuh"
#include "cuda/tensor_cores.cuh"

namespace coldstream {

inline uint64_t describe_swizzled(uint32_t address) { return address; }

inline uint32_t same_for_warp(uint32_t address) { return address / 16; }
inline uint64_t describe_swizzled_from(uint32_t sixteens, int offset) { return 16 * sixteens + offset; }

// Of kernels that do not run on the host.
uint64_t describe_plain(uint32_t address);
uint32_t subtract_halves(uint32_t a, uint32_t b);
uint32_t halves_of(uint32_t pair);
template <int nt>
void take_products(float (&)[nt][4]) {}
template <int nt>
void multiply_halves_by_four(float (&)[nt][4], const uint32_t (&)[4], uint64_t) {}

// The sixteen bytes `half` of row `row` of what `matrix` describes: bits 4 … 6 of an address are swizzled by bits 7 … 9.
inline const uint32_t* described_sixteen(uint64_t matrix, int row, int half) {
  const uint32_t address = uint32_t(matrix) + row * swizzled_row_bytes + half * 16;
  return reinterpret_cast<const uint32_t*>(shared_at(address ^ (address >> 7 & 7) << 4));
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

struct late_products {
  static constexpr int most = 64;
  late_product* each[most];
  int count = 0;
};

// Adds sixteen bytes of a row of A, times those of a row of B.
inline void add_sixteen(unsigned int& sum, const uint32_t* x, const uint32_t* y) {
  for (int word = 0; word < 4; word++)
    sum += static_cast<unsigned int>(dot_bytes<int8_t, int8_t>(x[word], y[word], 0));
}

inline void compute(const all_of_warp<late_products>& all, int number) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = threadIdx.x / 32 % 4;
  const late_product& own = *all[lane].each[number];
  for (int half = 0; half < 2; half++) {
    uint32_t words[2][4];
    for (int i = 0; i < 2; i++) {
      const uint32_t* shared = own.is_shared ? described_sixteen(own.rows, 16 * warp + 8 * i + g, half) : nullptr;
      for (int k = 0; k < 4; k++) words[i][k] = shared ? shared[k] : all[4 * g + k].each[number]->a[2 * half + i];
    }
    for (int n = 0; n < own.tiles; n++) {
      for (int i = 0; i < 4; i++) {
        int& d = own.d[4 * n + i];
        unsigned int sum = half || own.add ? d : 0;
        add_sixteen(sum, words[i / 2], described_sixteen(own.matrix, 8 * n + 2 * t + i % 2, half));
        d = int(sum);
      }
    }
  }
}

inline void commit_products() { begin_product_group(); }

template <int pending>
void wait_for_products() {
  late_products own;
  while (auto* next = static_cast<late_product*>(take_product(pending))) own.each[own.count++] = next;
  {
    const all_of_warp<late_products> all(own);
    for (int i = 0; i < own.count; i++) compute(all, i);
  }
  for (int i = 0; i < own.count; i++) delete own.each[i];
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
