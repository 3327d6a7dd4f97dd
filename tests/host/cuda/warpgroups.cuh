// Stands for the package's cuda/warpgroups.cuh where its kernels are compiled for the host: the same
// products, by loops. What is multiplied is read when the products are waited for, as late as a GPU may read
// it.
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

// The sixteen bytes `half` of row `row` of what `matrix` describes: bits 4 … 6 of an address are swizzled by
// bits 7 … 9.
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
struct LateProduct {
  int* d;
  uint32_t a[4];
  uint64_t rows, matrix;
  int tiles;
  bool is_shared, add;
};

struct LateProducts {
  static constexpr int most = 64;
  int warp;  // of the warpgroup
  LateProduct* each[most];
  int count = 0;
};

// Sets sixteen bytes of a row or a column.
template <class Set>
void set_sixteen(uint64_t matrix, int row, int half, Set set) {
  const uint32_t* words = described_sixteen(matrix, row, half);
  for (int k = 0; k < 4; k++) set(4 * half + k, words[k]);
}

inline bool compute_products(LateProducts* const* lanes, int number) {
  ProductOfWarp product;
  const LateProduct& first = *lanes[0]->each[number];
  for (int lane = 0; lane < 32; lane++) {
    const LateProduct& own = *lanes[lane]->each[number];
    const bool is_same = own.tiles == first.tiles && own.is_shared == first.is_shared &&
                         own.add == first.add && own.rows == first.rows && own.matrix == first.matrix;
    if (!is_same) return false;
    for (int i = 0; i < 4; i++) product.set_row<int8_t>(lane / 4 + i % 2 * 8, i / 2 * 4 + lane % 4, own.a[i]);
  }
  for (int row = 0; first.is_shared && row < 16; row++)
    for (int half = 0; half < 2; half++)
      set_sixteen(first.rows, 16 * lanes[0]->warp + row, half,
                  [&](int word, uint32_t bytes) { product.set_row<int8_t>(row, word, bytes); });
  for (int n = 0; n < first.tiles; n++) {
    for (int column = 0; column < 8; column++)
      for (int half = 0; half < 2; half++)
        set_sixteen(first.matrix, 8 * n + column, half,
                    [&](int word, uint32_t bytes) { product.set_column<int8_t>(column, word, bytes); });
    product.multiply();
    for (int lane = 0; lane < 32; lane++) {
      int* const d = lanes[lane]->each[number]->d + 4 * n;
      for (int i = 0; i < 4 && !first.add; i++) d[i] = 0;
      product.add_to(d, lane);
    }
  }
  return true;
}

inline bool compute_all_products(LateProducts* const* lanes) {
  for (int lane = 1; lane < 32; lane++)
    if (lanes[lane]->count != lanes[0]->count) return false;
  for (int i = 0; i < lanes[0]->count; i++)
    if (!compute_products(lanes, i)) return false;
  return true;
}

inline void commit_products() { begin_product_group(); }

template <int pending>
void wait_for_products() {
  LateProducts own;
  own.warp = threadIdx.x / 32 % 4;
  while (auto* next = static_cast<LateProduct*>(take_product(pending))) own.each[own.count++] = next;
  compute_for_warp<LateProducts, compute_all_products>(own);
  for (int i = 0; i < own.count; i++) delete own.each[i];
}

template <int nt>
void take_products(int (&)[nt][4]) {}

template <bool is_unsigned, int nt>
void multiply_by_four(int (&d)[nt][4], const uint32_t (&a)[4], uint64_t matrix, bool add) {
  static_assert(!is_unsigned, "no kernel that runs on the host has unsigned bytes here");
  keep_product(new LateProduct{d[0], {a[0], a[1], a[2], a[3]}, 0, matrix, nt, false, add});
}

inline void multiply_shared_by_four(int (&d)[4][4], uint64_t a, uint64_t matrix, bool add) {
  keep_product(new LateProduct{d[0], {}, a, matrix, 4, true, add});
}

}  // namespace coldstream
