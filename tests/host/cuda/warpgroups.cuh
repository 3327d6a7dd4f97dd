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

inline uint64_t describe_plain(uint32_t address) { return address; }

// float16 of integers of magnitudes up to 2048, and back.
inline uint32_t half_of(int value) {
  const uint32_t sign = value < 0 ? 0x8000 : 0, magnitude = value < 0 ? -value : value;
  if (magnitude == 0) return sign;
  const int exponent = 31 - __builtin_clz(magnitude);
  return sign | uint32_t(exponent + 15) << 10 | ((magnitude << 10 >> exponent) & 1023);
}
inline uint32_t halves_of(uint32_t pair) {
  return half_of(int16_t(pair)) | half_of(int16_t(pair >> 16)) << 16;
}
inline uint32_t subtract_halves(uint32_t a, uint32_t b) {
  const auto difference = [&](int shift) {
    return half_of(int(half_to_float(uint16_t(a >> shift)) - half_to_float(uint16_t(b >> shift))));
  };
  return difference(0) | difference(16) << 16;
}

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

// What a product multiplies: signed bytes, unsigned by signed ones, or float16 into floats.
enum class Operands { signed_bytes, unsigned_bytes, halves };

// Products that were begun and not waited for, of the thread that runs.
struct LateProduct {
  void* d;
  uint32_t a[4];
  uint64_t rows, matrix;
  int tiles;
  bool is_shared, add;
  Operands operands = Operands::signed_bytes;
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

// Sums of products of sixteen float16, which are exact whatever their order.
inline void compute_halves(LateProducts* const* lanes, int number) {
  const LateProduct& first = *lanes[0]->each[number];
  for (int lane = 0; lane < 32; lane++) {
    const LateProduct& own = *lanes[lane]->each[number];
    float* const d = static_cast<float*>(own.d);
    for (int i = 0; i < 4 * first.tiles; i++) {
      const int column = i / 4 * 8 + lane % 4 * 2 + i % 2, row_register = i / 2 % 2;
      float sum = 0;
      for (int k = 0; k < 16; k++) {
        // Values 2 t and 2 t + 1 of each half of a row are in lane t of its four.
        const uint32_t pair = lanes[lane / 4 * 4 + k % 8 / 2]->each[number]->a[k / 8 * 2 + row_register];
        const uint16_t* const half =
            reinterpret_cast<const uint16_t*>(shared_at(uint32_t(first.matrix) + plain_place(column, k / 8)));
        sum += half_to_float(uint16_t(pair >> k % 2 * 16)) * half_to_float(half[k % 8]);
      }
      d[i] = sum;
    }
  }
}

inline bool compute_products(LateProducts* const* lanes, int number) {
  ProductOfWarp product;
  const LateProduct& first = *lanes[0]->each[number];
  for (int lane = 0; lane < 32; lane++) {
    const LateProduct& own = *lanes[lane]->each[number];
    const bool is_same = own.tiles == first.tiles && own.is_shared == first.is_shared &&
                         own.add == first.add && own.rows == first.rows && own.matrix == first.matrix &&
                         own.operands == first.operands;
    if (!is_same) return false;
    for (int i = 0; i < 4; i++) {
      const int row = lane / 4 + i % 2 * 8, word = i / 2 * 4 + lane % 4;
      if (own.operands == Operands::unsigned_bytes)
        product.set_row<uint8_t>(row, word, own.a[i]);
      else
        product.set_row<int8_t>(row, word, own.a[i]);
    }
  }
  if (first.operands == Operands::halves) {
    compute_halves(lanes, number);
    return true;
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
      int* const d = static_cast<int*>(lanes[lane]->each[number]->d) + 4 * n;
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

template <class T, int nt>
void take_products(T (&)[nt][4]) {}

template <bool is_unsigned, int nt>
void multiply_by_four(int (&d)[nt][4], const uint32_t (&a)[4], uint64_t matrix, bool add) {
  const Operands operands = is_unsigned ? Operands::unsigned_bytes : Operands::signed_bytes;
  keep_product(new LateProduct{d[0], {a[0], a[1], a[2], a[3]}, 0, matrix, nt, false, add, operands});
}

template <int nt>
void multiply_halves_by_four(float (&d)[nt][4], const uint32_t (&a)[4], uint64_t matrix) {
  keep_product(
      new LateProduct{d[0], {a[0], a[1], a[2], a[3]}, 0, matrix, nt, false, false, Operands::halves});
}

inline void multiply_shared_by_four(int (&d)[4][4], uint64_t a, uint64_t matrix, bool add) {
  keep_product(new LateProduct{d[0], {}, a, matrix, 4, true, add});
}

}  // namespace coldstream
