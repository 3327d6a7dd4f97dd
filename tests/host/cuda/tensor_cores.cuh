// Stands for the package's cuda/tensor_cores.cuh where its kernels are compiled for the host: the same
// products, by loops. A warp's lanes meet with what they have of the operands, and the product is computed
// for all of them.
#pragma once

#include "cuda/common.cuh"

namespace coldstream {

// An instruction of the warp: `compute` gets what all lanes give.
template <class T, bool (*compute)(T* const*)>
void compute_for_warp(T& own) {
  compute_in_warp([](void* const* lanes) { return compute(reinterpret_cast<T* const*>(lanes)); }, &own);
}

template <int count>
struct MatricesToLoad {
  uint32_t address;
  uint32_t (&r)[count];
};

template <int count>
bool load_for_warp(MatricesToLoad<count>* const* lanes) {
  const uint8_t* const shared = reinterpret_cast<const uint8_t*>(dynamic_shared);
  for (int lane = 0; lane < 32; lane++)
    for (int i = 0; i < count; i++)
      __builtin_memcpy(&lanes[lane]->r[i], shared + lanes[8 * i + lane / 4]->address + lane % 4 * 4, 4);
  return true;
}

template <int count>
void load_matrices_of(uint32_t (&r)[count], uint32_t address) {
  MatricesToLoad<count> own = {address, r};
  compute_for_warp<MatricesToLoad<count>, load_for_warp<count>>(own);
}

inline void load_matrices(uint32_t (&r)[4], uint32_t address) { load_matrices_of(r, address); }
inline void load_two_matrices(uint32_t (&r)[2], uint32_t address) { load_matrices_of(r, address); }

inline bool load_transposed_for_warp(MatricesToLoad<4>* const* lanes) {
  const uint8_t* const shared = reinterpret_cast<const uint8_t*>(dynamic_shared);
  for (int lane = 0; lane < 32; lane++) {
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; i++) {
      uint16_t pairs[2];
      for (int k = 0; k < 2; k++)
        __builtin_memcpy(&pairs[k], shared + lanes[8 * i + 2 * t + k]->address + 2 * g, 2);
      lanes[lane]->r[i] = uint32_t(pairs[1]) << 16 | pairs[0];
    }
  }
  return true;
}

inline void load_transposed_pairs(uint32_t (&r)[4], uint32_t address) {
  MatricesToLoad<4> own = {address, r};
  compute_for_warp<MatricesToLoad<4>, load_transposed_for_warp>(own);
}

// The operands of a product of 16 x 32 by 32 x 8 bytes, by rows of the one and columns of the other, and 128
// sums.
struct ProductOfWarp {
  int16_t rows[16][32], columns[8][32];
  int sums[16][8];

  template <class A>
  void set_row(int row, int word, uint32_t bytes) {
    for (int i = 0; i < 4; i++) rows[row][4 * word + i] = A(bytes >> 8 * i);
  }
  template <class B>
  void set_column(int column, int word, uint32_t bytes) {
    for (int i = 0; i < 4; i++) columns[column][4 * word + i] = B(bytes >> 8 * i);
  }

  // Sums of 32 products, each of which fits an int. With vectors of the compiler's, because tests of whole
  // models spent a fifth of their time here.
  __attribute__((noinline, optimize("O3"))) void multiply() {
    for (int row = 0; row < 16; row++) {
      for (int column = 0; column < 8; column++) {
        int sum = 0;
        for (int k = 0; k < 32; k++) sum += rows[row][k] * columns[column][k];
        sums[row][column] = sum;
      }
    }
  }

  // A lane has four of the sums.
  void add_to(int* d, int lane) const {
    for (int i = 0; i < 4; i++) {
      const int sum = sums[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
      d[i] = int(static_cast<unsigned int>(d[i]) + static_cast<unsigned int>(sum));
    }
  }
};

#if COLDSTREAM_WIDE_PRODUCTS

struct ProductOperands {
  const uint32_t (&a)[4];
  uint32_t b[2];
  int (&d)[4];
};

template <class B>
bool multiply_for_warp(ProductOperands* const* lanes) {
  ProductOfWarp product;
  for (int lane = 0; lane < 32; lane++) {
    const int g = lane / 4, t = lane % 4;
    for (int half = 0; half < 2; half++) {
      for (int i = 0; i < 2; i++)
        product.set_row<int8_t>(g + 8 * i, 4 * half + t, lanes[lane]->a[2 * half + i]);
      product.set_column<B>(g, 4 * half + t, lanes[lane]->b[half]);
    }
  }
  product.multiply();
  for (int lane = 0; lane < 32; lane++) product.add_to(lanes[lane]->d, lane);
  return true;
}

// d += a b over 32 bytes, those of a signed.
template <class B>
void add_product_of_bytes(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  ProductOperands own = {a, {b0, b1}, d};
  compute_for_warp<ProductOperands, multiply_for_warp<B>>(own);
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

#else

// Of 8 x 16 by 16 x 8 bytes.
struct NarrowOperands {
  uint32_t a, b;
  int (&d)[2];
};

template <class B>
bool multiply_narrow_for_warp(NarrowOperands* const* lanes) {
  ProductOfWarp product = {};
  for (int lane = 0; lane < 32; lane++) {
    product.set_row<int8_t>(lane / 4, lane % 4, lanes[lane]->a);
    product.set_column<B>(lane / 4, lane % 4, lanes[lane]->b);
  }
  product.multiply();
  for (int lane = 0; lane < 32; lane++) {
    int own[4] = {lanes[lane]->d[0], lanes[lane]->d[1], 0, 0};
    product.add_to(own, lane);
    lanes[lane]->d[0] = own[0];
    lanes[lane]->d[1] = own[1];
  }
  return true;
}

template <class B>
void add_narrow_product_of_bytes(int& d0, int& d1, uint32_t a, uint32_t b) {
  int d[2] = {d0, d1};
  NarrowOperands own = {a, b, d};
  compute_for_warp<NarrowOperands, multiply_narrow_for_warp<B>>(own);
  d0 = d[0];
  d1 = d[1];
}

inline void add_narrow_product(int& d0, int& d1, uint32_t a, uint32_t b) {
  add_narrow_product_of_bytes<int8_t>(d0, d1, a, b);
}

inline void add_narrow_product_of_unsigned(int& d0, int& d1, uint32_t a, uint32_t b) {
  add_narrow_product_of_bytes<uint8_t>(d0, d1, a, b);
}

#endif

inline void store_shared_16(uint32_t address, int a, int b, int c, int d) {
  *reinterpret_cast<int4*>(shared_at(address)) = {a, b, c, d};
}
inline void store_shared_4(uint32_t address, int value) {
  *reinterpret_cast<int*>(shared_at(address)) = value;
}

#if COLDSTREAM_ASYNC_COPIES

constexpr int arrivals_of_copier() { return 2; }

// A barrier in shared memory: how many have yet to arrive in this phase, of how many, and the phase.
struct SharedBarrier {
  int missing;
  short count, phase;
};
inline SharedBarrier& barrier_at(uint32_t address) {
  return *reinterpret_cast<SharedBarrier*>(shared_at(address));
}
inline void init_barrier(uint32_t barrier, int count) { barrier_at(barrier) = {count, short(count), 0}; }
inline void arrive_barrier(uint32_t barrier) {
  SharedBarrier& at = barrier_at(barrier);
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

#else

inline uint32_t& shared_word(uint32_t address) { return *reinterpret_cast<uint32_t*>(shared_at(address)); }
inline uint32_t load_acquire_shared(uint32_t from) { return shared_word(from); }
inline void store_release_shared(uint32_t to, uint32_t value) {
  shared_word(to) = value;
  note_change();
}
inline uint32_t add_to_shared(uint32_t to, uint32_t value) {
  const uint32_t before = shared_word(to);
  shared_word(to) = before + value;
  return before;
}
inline void look_again() { wait_for_change(); }

#endif

}  // namespace coldstream

#if !COLDSTREAM_WIDE_PRODUCTS
#include "cuda/narrow_products.cuh"
#endif
#if !COLDSTREAM_ASYNC_COPIES
#include "cuda/counted_barriers.cuh"
#endif
