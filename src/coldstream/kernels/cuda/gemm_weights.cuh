// Products of one group of 256 inputs for a tile of weight rows and activation rows, on integer tensor cores.
// A warp takes 16 * mt weight rows (A) and nt * 8 activation rows (B); what it adds to is float32, in the
// order of docs/arithmetic.md.
//
// Q4_K and Q5_K are read as they lie in the file: a word of qs is a fragment of two sub-blocks. The other
// types may start anywhere, so their codes are unpacked to int8 in shared memory first.
#pragma once

#include "cuda/warpgroups.cuh"
#include "cuda/weight_traits.cuh"

namespace coldstream::gemm {

constexpr int group_size = 256;
constexpr int code_pitch = group_size + 16;  // eight rows of 16 bytes fall into different banks
constexpr int sum_pitch = 48;
// 1.5 * 2^23: the bits plus an integer below 2^22 become its float by one subtraction.
constexpr int magic_bits = 0x4B400000;
constexpr float magic = 12582912.0f;

// A group of 256 weights of a row: one super-block.
template <class Weights>
struct WeightGroup {
  static constexpr int bytes = Weights::bytes;
  static constexpr bool in_place = Weights::has_header;  // multiplied without unpacking
  // Whole aligned windows of 16 bytes, so many that threads copy equal shares.
  static constexpr int pitch = in_place ? bytes : (bytes + 16 - Weights::alignment + 31) / 32 * 32;
  // Beside unpacked codes: scales of sixteen sub-blocks or of eight, d, dmin, minima. Rows begin in different
  // banks.
  static constexpr int table_pitch = 48;
};
constexpr int d_at = 16, dmin_at = 20, mins_at = 24;  // in a row of the table

template <class A, class B>
constexpr bool is_same = false;
template <class A>
constexpr bool is_same<A, A> = true;

// Where a thread stands in its block's tile. Lane = 4 * g + t.
struct Fragment {
  int lane, g, t;
  int row;     // the first weight row of the warp
  int column;  // the first eight activation rows of the warp are column, column + columns, …

  __device__ uint32_t matrix_of_weights(int pitch) const {
    return (row + lane % 16) * pitch + lane / 16 * 16;
  }
  __device__ uint32_t matrix_of_codes() const { return (column * 8 + lane % 8) * code_pitch + lane / 8 * 16; }
  __device__ uint32_t matrix_of_sums() const {
    return (column * 8 + lane % 8) * sum_pitch + lane / 8 % 2 * 16;
  }
};

__device__ __forceinline__ int unsigned_byte(uint32_t word, int i) {
  return __byte_perm(word, 0, 0x4440 | i);
}

__device__ __forceinline__ void add_scaled(int (&total)[4], const int (&s)[4], int scale, int scale_8) {
  total[0] += scale * s[0];
  total[1] += scale * s[1];
  total[2] += scale_8 * s[2];
  total[3] += scale_8 * s[3];
}

// The sub-block scales and minima of Q4_K and Q5_K: eight of each, a byte each, from the first 16 bytes of a
// block.
__device__ __forceinline__ void unpack_scales(const uint4& head, uint32_t (&scales)[2]) {
  scales[0] = head.y & 0x3f3f3f3fu;
  scales[1] = (head.w & 0x0f0f0f0fu) | ((head.y >> 2) & 0x30303030u);
}

__device__ __forceinline__ void unpack_minima(const uint4& head, uint32_t (&minima)[2]) {
  minima[0] = head.z & 0x3f3f3f3fu;
  minima[1] = ((head.w >> 4) & 0x0f0f0f0fu) | ((head.z >> 2) & 0x30303030u);
}

// I of the super-blocks: nt tiles of the mt * 16 rows.
template <class T, int nt>
__device__ __forceinline__ void integer_sums(const Fragment& at, const uint8_t* stage,
                                             int (&total)[T::mt][nt][4]) {
  using Weights = typename T::Weights;
  constexpr bool has_high_bits = is_same<Weights, Q5_K>;
  constexpr int codes_at = has_high_bits ? 48 : 16;
  const uint8_t* base = stage + T::weights_at;
  const uint32_t a_address = shared_address(base) + at.matrix_of_weights(T::Group::pitch);
  const uint32_t b_address = shared_address(stage + T::codes_at) + at.matrix_of_codes();
  uint32_t scales[T::mt][2][2], high_bits[T::mt][4];
#pragma unroll
  for (int m = 0; m < T::mt; m++) {
#pragma unroll
    for (int h = 0; h < 2; h++)
      unpack_scales(
          *reinterpret_cast<const uint4*>(base + (at.row + 16 * m + 8 * h + at.g) * T::Group::pitch),
          scales[m][h]);
    if constexpr (has_high_bits) load_matrices(high_bits[m], a_address + 16 * m * T::Group::pitch + 16);
  }
#pragma unroll
  for (int m = 0; m < T::mt; m++)
#pragma unroll
    for (int n = 0; n < nt; n++)
      for (int i = 0; i < 4; i++) total[m][n][i] = 0;
#pragma unroll 1
  for (int c = 0; c < 4; c++) {  // 64 inputs: the low nibbles of 32 bytes, then the high ones
    uint32_t low[T::mt][4], high[T::mt][4];
#pragma unroll
    for (int m = 0; m < T::mt; m++) {
      load_matrices(low[m], a_address + 16 * m * T::Group::pitch + codes_at + 32 * c);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        high[m][i] = (low[m][i] >> 4) & 0x0f0f0f0fu;
        low[m][i] &= 0x0f0f0f0fu;
        if constexpr (has_high_bits) {
          low[m][i] |= (high_bits[m][i] << 4) & 0x10101010u;
          high[m][i] |= (high_bits[m][i] << 3) & 0x10101010u;
          high_bits[m][i] >>= 2;
        }
      }
    }
#pragma unroll
    for (int n = 0; n < nt; n++) {
      uint32_t b[4];
      load_matrices(b, b_address + n * T::columns * 8 * code_pitch + 64 * c);
#pragma unroll
      for (int m = 0; m < T::mt; m++) {
        int s[4];
        multiply_bytes(s, low[m], b[0], b[1], 0);
        add_scaled(total[m][n], s, unsigned_byte(scales[m][0][0], 0), unsigned_byte(scales[m][1][0], 0));
        multiply_bytes(s, high[m], b[2], b[3], 0);
        add_scaled(total[m][n], s, unsigned_byte(scales[m][0][0], 1), unsigned_byte(scales[m][1][0], 1));
      }
    }
#pragma unroll
    for (int m = 0; m < T::mt; m++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        scales[m][h][0] = __funnelshift_r(scales[m][h][0], scales[m][h][1], 16);
        scales[m][h][1] >>= 16;
      }
  }
}

// Scales of the activation rows 2t and 2t + 1 of tile n.
template <class T>
__device__ __forceinline__ float2 scales_of(const Fragment& at, const uint8_t* stage, int n) {
  return *reinterpret_cast<const float2*>(stage + T::scales_at +
                                          4 * ((n * T::columns + at.column) * 8 + 2 * at.t));
}

// The sums of the codes of the activation rows 2t and 2t + 1 of tile n.
template <class T>
__device__ __forceinline__ int2 totals_of(const Fragment& at, const uint8_t* stage, int n) {
  return *reinterpret_cast<const int2*>(stage + T::totals_at +
                                        4 * ((n * T::columns + at.column) * 8 + 2 * at.t));
}

// M by two more products: the bytes of the int16 sums are a row of B, low bytes unsigned, high bytes signed.
__device__ __forceinline__ void minimum_sums(float (&offsets)[4], const uint32_t (&a_low)[4],
                                             const uint32_t (&a_high)[4], const uint32_t (&b)[2]) {
  int m[4];
  multiply_bytes(m, a_high, b[0], b[1], 0);
#pragma unroll
  for (int i = 0; i < 4; i++) m[i] = m[i] * 256 + magic_bits;
  add_product_of_unsigned(m, a_low, b[0], b[1]);
#pragma unroll
  for (int i = 0; i < 4; i++) offsets[i] = __int_as_float(m[i]) - magic;
}

// The floats of rows g and g + 8 of sixteen, and their minima as factors of the sums.
template <class T>
struct MinimumRows {
  float d[2], dmin[2];
  uint32_t low[4], high[4];

  // Of the headers of Q4_K or Q5_K.
  __device__ __forceinline__ static MinimumRows of_headers(const Fragment& at, const uint8_t* stage, int m) {
    MinimumRows rows;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int row = at.row + 16 * m + 8 * h + at.g;
      const uint4 head = *reinterpret_cast<const uint4*>(stage + T::weights_at + row * T::Group::pitch);
      uint32_t minima[2];
      unpack_minima(head, minima);
      rows.d[h] = half_to_float(head.x & 0xffff);
      rows.dmin[h] = half_to_float(head.x >> 16);
#pragma unroll
      for (int k = 0; k < 2; k++) rows.keep(h, k, __byte_perm(minima[k], 0, 0x4040 | at.t * 0x0101));
    }
    return rows;
  }

  // Of the table beside unpacked codes, which has a minimum for each sum.
  __device__ __forceinline__ static MinimumRows of_table(const Fragment& at, const uint8_t* table, int m) {
    MinimumRows rows;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const uint8_t* row = table + (at.row + 16 * m + 8 * h + at.g) * T::Group::table_pitch;
      rows.d[h] = *reinterpret_cast<const float*>(row + d_at);
      rows.dmin[h] = *reinterpret_cast<const float*>(row + dmin_at);
#pragma unroll
      for (int k = 0; k < 2; k++)
        rows.keep(
            h, k,
            __byte_perm(*reinterpret_cast<const uint16_t*>(row + mins_at + 8 * k + 2 * at.t), 0, 0x4140));
    }
    return rows;
  }

  // One super-block for the activation rows of tile n, whose I is `total`.
  __device__ __forceinline__ void add(const Fragment& at, const uint8_t* stage, int n, const int (&total)[4],
                                      float (&p)[4]) const {
    uint32_t sums[2];
    load_two_matrices(
        sums, shared_address(stage + T::sums_at) + at.matrix_of_sums() + n * T::columns * 8 * sum_pitch);
    const float2 a = scales_of<T>(at, stage, n);
    float offsets[4];
    minimum_sums(offsets, low, high, sums);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float scale = i % 2 ? a.y : a.x;
      const float sum = __fmaf_rn(d[i / 2] * scale, float(total[i]), p[i]);
      p[i] = __fmaf_rn(-(dmin[i / 2] * scale), offsets[i], sum);
    }
  }

 private:
  // Half-words of the minima of two sums.
  __device__ __forceinline__ void keep(int h, int k, uint32_t minima) {
    low[2 * k + h] = minima;
    high[2 * k + h] = minima << 8;
  }
};

// One super-block of Q4_K or Q5_K.
template <class T, int nt>
__device__ __forceinline__ void add_in_place(const Fragment& at, const uint8_t* stage,
                                             float (&p)[T::mt][T::nt][4]) {
  int total[T::mt][nt][4];
  integer_sums<T, nt>(at, stage, total);
#pragma unroll
  for (int m = 0; m < T::mt; m++) {
    const auto rows = MinimumRows<T>::of_headers(at, stage, m);
#pragma unroll
    for (int n = 0; n < nt; n++) rows.add(at, stage, n, total[m][n], p[m][n]);
  }
}

// One super-block of sixteen rows without minima for the activation rows of tile n, whose I is `total`.
template <class T>
__device__ __forceinline__ void add_product(const Fragment& at, const uint8_t* stage, const float (&d)[2],
                                            int n, const int (&total)[4], float (&p)[4]) {
  const float2 a = scales_of<T>(at, stage, n);
#pragma unroll
  for (int i = 0; i < 4; i++) p[i] = __fmaf_rn(d[i / 2] * (i % 2 ? a.y : a.x), float(total[i]), p[i]);
}

// The scales of 64 inputs of a super-block, from the table.
template <class Weights>
__device__ __forceinline__ uint32_t scales_of_64(const uint8_t* row, int c) {
  if constexpr (Weights::folds_scales)
    return 0;
  else if constexpr (Weights::sub_blocks == 16)
    return *reinterpret_cast<const uint32_t*>(row + 4 * c);
  else
    return *reinterpret_cast<const uint16_t*>(row + 2 * c);
}

// I over 64 inputs of a unpacked tile: products of 16 or 32 bytes with a scale each, or of 32 without.
template <class Weights>
__device__ __forceinline__ void add_64(int (&total)[4], const uint32_t (&a)[2][4], const uint32_t (&b)[4],
                                       const uint32_t (&scales)[2]) {
  if constexpr (Weights::folds_scales) {
#pragma unroll
    for (int k = 0; k < 2; k++) coldstream::add_product(total, a[k], b[2 * k], b[2 * k + 1]);
  } else if constexpr (Weights::sub_blocks == 16) {
#pragma unroll
    for (int k = 0; k < 4; k++) {
      int s[4];
      multiply_16_bytes(s, a[k / 2][k % 2 * 2], a[k / 2][k % 2 * 2 + 1], b[k]);
      add_scaled(total, s, signed_byte(scales[0], k), signed_byte(scales[1], k));
    }
  } else {
#pragma unroll
    for (int k = 0; k < 2; k++) {
      int s[4];
      multiply_bytes(s, a[k], b[2 * k], b[2 * k + 1], 0);
      add_scaled(total, s, signed_byte(scales[0], k), signed_byte(scales[1], k));
    }
  }
}

// One super-block, unpacked.
template <class T, int nt>
__device__ __forceinline__ void add_unpacked(const Fragment& at, const uint8_t* stage,
                                             const uint8_t* unpacked, float (&p)[T::mt][T::nt][4]) {
  using Weights = typename T::Weights;
  constexpr int table_pitch = T::Group::table_pitch;
  const uint32_t a_address = shared_address(unpacked) + at.matrix_of_weights(code_pitch);
  const uint32_t b_address = shared_address(stage + T::codes_at) + at.matrix_of_codes();
  const uint8_t* table = unpacked + T::rows * code_pitch;
  int total[T::mt][nt][4];
#pragma unroll
  for (int m = 0; m < T::mt; m++)
#pragma unroll
    for (int n = 0; n < nt; n++)
      for (int i = 0; i < 4; i++) total[m][n][i] = 0;
#pragma unroll 1
  for (int c = 0; c < 4; c++) {  // 64 inputs; unrolled, it would need more registers than there are
    uint32_t a[T::mt][2][4], scales[T::mt][2];
#pragma unroll
    for (int m = 0; m < T::mt; m++)
#pragma unroll
      for (int k = 0; k < 2; k++) {
        load_matrices(a[m][k], a_address + 16 * m * code_pitch + 64 * c + 32 * k);
        scales[m][k] = scales_of_64<Weights>(table + (at.row + 16 * m + 8 * k + at.g) * table_pitch, c);
      }
#pragma unroll
    for (int n = 0; n < nt; n++) {
      uint32_t b[4];
      load_matrices(b, b_address + n * T::columns * 8 * code_pitch + 64 * c);
#pragma unroll
      for (int m = 0; m < T::mt; m++) add_64<Weights>(total[m][n], a[m], b, scales[m]);
    }
  }
#pragma unroll
  for (int m = 0; m < T::mt; m++) {
#pragma unroll
    for (int n = 0; n < nt; n++)
      for (int i = 0; i < 4; i++) total[m][n][i] = of_folded<Weights>(total[m][n][i]);
    if constexpr (Weights::has_mins) {
      const auto rows = MinimumRows<T>::of_table(at, table, m);
#pragma unroll
      for (int n = 0; n < nt; n++) rows.add(at, stage, n, total[m][n], p[m][n]);
    } else {
      float d[2];
#pragma unroll
      for (int h = 0; h < 2; h++)
        d[h] = *reinterpret_cast<const float*>(table + (at.row + 16 * m + 8 * h + at.g) * table_pitch + d_at);
#pragma unroll
      for (int n = 0; n < nt; n++) add_product<T>(at, stage, d, n, total[m][n], p[m][n]);
    }
  }
}

}  // namespace coldstream::gemm
