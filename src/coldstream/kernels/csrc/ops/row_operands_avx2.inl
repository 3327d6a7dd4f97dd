// Keys as they lie in the cache, a row of lanes each, so that nothing is transposed: a query's lanes are
// multiplied with those of several keys, and the lanes of each sum are added at the end. With few queries,
// which decoding has, packing keys for lanes that are positions takes longer than the products do.

static inline __m256i load_8_ints(const int32_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}

// R queries times num_keys keys, a multiple of 16, of num_ints lanes → products [R, attention_block].
template <int R>
static inline void multiply_key_rows(const int32_t* queries, int64_t stride, const int32_t* keys,
                                     int64_t num_keys, int64_t num_ints, int32_t* products) {
  constexpr int keys_at_once = 8 / R;
  for (int64_t key = 0; key < num_keys; key += keys_at_once) {
    __m256i sums[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) sums[i] = _mm256_setzero_si256();
    for (int64_t i = 0; i < num_ints; i += 8) {
      __m256i query[R];
#pragma GCC unroll 2
      for (int r = 0; r < R; r++) query[r] = load_8_ints(queries + r * stride + i);
#pragma GCC unroll 8
      for (int k = 0; k < keys_at_once; k++) {
        const __m256i numbers = load_8_ints(keys + (key + k) * num_ints + i);
#pragma GCC unroll 2
        for (int r = 0; r < R; r++) {
          __m256i& sum = sums[r * keys_at_once + k];
          sum = _mm256_add_epi32(sum, _mm256_madd_epi16(query[r], numbers));
        }
      }
    }
    alignas(32) int32_t lanes[8];
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), sum_each(sums));
    for (int r = 0; r < R; r++)
      memcpy(products + r * attention_block + key, lanes + r * keys_at_once, keys_at_once * sizeof(int32_t));
  }
}

// PairOperands but for keys, which are [attention_block, size · planes / 2].
template <int planes>
struct RowOperands : PairOperands<planes> {
  static void pack_keys(const int8_t* keys, int64_t stride, int64_t n, int64_t size, int32_t* packed) {
    for (int64_t p = 0; p < n; p++, keys += stride) {
      for (int64_t i = 0; i < size; i += 16, packed += 8 * planes) {
        if constexpr (planes == 2) {
          store_ints(packed, load_operands<planes>(keys, i, size));
        } else {
          _mm256_storeu_si256(reinterpret_cast<__m256i*>(packed), widen_to_words(keys + i));
        }
      }
    }
  }

  template <typename Finish>
  static void multiply_keys(const int32_t* queries, const int32_t* keys, int64_t num_rows,
                            int64_t num_columns, int64_t size, const Finish& finish) {
    int64_t row = 0;
    for (; row + 2 <= num_rows; row += 2) multiply_rows_of<2>(queries, keys, row, num_columns, size, finish);
    if (row < num_rows) multiply_rows_of<1>(queries, keys, row, num_columns, size, finish);
  }

 private:
  template <int R, typename Finish>
  static void multiply_rows_of(const int32_t* queries, const int32_t* keys, int64_t row, int64_t num_columns,
                               int64_t size, const Finish& finish) {
    int32_t products[R * attention_block];
    const int64_t stride = integer_query_ints(size);
    multiply_key_rows<R>(queries + row * stride, stride, keys, num_columns, size * planes / 2, products);
    for (int r = 0; r < R; r++) {
      for (int64_t column = 0; column < num_columns; column += 16)
        finish(row + r, column, ints_to_floats(load_ints(products + r * attention_block + column)));
    }
  }
};
