// Operands of attention over two planes as bytes for vpdpbusd, four channels or four positions a lane: three
// instructions for what pairs of int16 take four for. The instruction takes unsigned by signed bytes, so keys
// and values are 128 greater than they are, and 128 times what they met is taken off each sum.

constexpr int8_t raised = -128;  // bytes with the highest bit flipped

// sum + the products of the four unsigned bytes of a lane and the four signed ones. As an instruction for the
// reason that add_products is one.
static inline Ints16 add_byte_products(Ints16 bytes, Ints16 factors, Ints16 sum) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum.all) : "v"(bytes.all), "v"(factors.all));
  return sum;
}

#include "ops/row_operands_avx512.inl"

// Sums of one tile, R rows and V vectors of columns; see multiply_integers. The low plane of `a` lies a_low
// ints behind its high one, that of `b` b_low rows; row r's correction is a[r, correction].
struct ByteProduct {
  const int32_t* a;
  int64_t a_stride, a_low, correction;
  const int32_t* b;
  int64_t b_stride, b_low, num_rows, n;
};

template <int R, int V, typename Finish>
static inline void multiply_byte_rows(const ByteProduct& p, int64_t row, int64_t column,
                                      const Finish& finish) {
  for (; row + R <= p.num_rows; row += R) {
    Ints16 highs[R][V], others[R][V];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 2
      for (int v = 0; v < V; v++) highs[r][v] = others[r][v] = splat_ints(0);
    }
    for (int64_t i = 0; i < p.n; i++) {
      Ints16 high[V], low[V];
#pragma GCC unroll 2
      for (int v = 0; v < V; v++) {
        high[v] = load_ints(p.b + i * p.b_stride + column + 16 * v);
        low[v] = load_ints(p.b + (p.b_low + i) * p.b_stride + column + 16 * v);
      }
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) {
        const int32_t* factors = p.a + (row + r) * p.a_stride + i;
        const Ints16 high_factor = splat_ints(factors[0]), low_factor = splat_ints(factors[p.a_low]);
#pragma GCC unroll 2
        for (int v = 0; v < V; v++) {
          highs[r][v] = add_byte_products(high[v], high_factor, highs[r][v]);
          others[r][v] = add_byte_products(low[v], high_factor, others[r][v]);
          others[r][v] = add_byte_products(high[v], low_factor, others[r][v]);
        }
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      const Ints16 correction = splat_ints(p.a[(row + r) * p.a_stride + p.correction]);
#pragma GCC unroll 2
      for (int v = 0; v < V; v++) {
        const Ints16 sum = add_ints(times_256(highs[r][v]), others[r][v]);
        finish(row + r, column + 16 * v, ints_to_floats(sub_ints(sum, correction)));
      }
    }
  }
  if constexpr (R > 1) multiply_byte_rows<R / 2, V>(p, row, column, finish);
}

// What PairOperands<2> is for pairs: a row of n numbers is the high bytes, the low bytes and the correction;
// keys are [2, size / 4, attention_block] and values [2, attention_block / 4, size].
struct ByteOperands {
  static constexpr bool has_key_rows = true;
  static constexpr int64_t query_scale(int64_t size) { return size / 2 + 1; }

  static float round(const float* x, int64_t n, int32_t* out) {
    const RoundedBytes rounded = round_bytes(x, n, reinterpret_cast<int8_t*>(out));
    out[n / 2] = 128 * rounded.sum;
    return rounded.scale;
  }

  static void pack_keys(const int8_t* keys, int64_t stride, int64_t n, int64_t size, int32_t* packed) {
    pack_key_words<2>(keys, stride, n, size, size / 4, raised, packed);
  }

  static void pack_values(const int8_t* values, int64_t stride, int64_t n, int64_t size, int32_t* packed) {
    pack_value_words<2>(values, stride, n, size, raised, packed);
  }

  template <typename Finish>
  static void multiply_keys(const int32_t* queries, const int32_t* keys, int64_t num_rows,
                            int64_t num_columns, int64_t size, const Finish& finish) {
    const int64_t words = size / 4;
    multiply(
        {queries, integer_query_ints(size), words, 2 * words, keys, attention_block, words, num_rows, words},
        num_columns, finish);
  }

  template <typename Finish>
  static void multiply_key_rows(const int32_t* queries, RowView keys, int64_t n, int64_t num_rows,
                                int64_t size, const Finish& finish) {
    multiply_keys_in_rows<2>(queries, keys, n, num_rows, size, [&](int64_t row, int64_t column, Ints16 sums) {
      const int32_t correction = queries[row * integer_query_ints(size) + size / 2];
      finish(row, column, ints_to_floats(sub_ints(sums, splat_ints(correction))));
    });
  }

  template <typename Finish>
  static void multiply_values(const int32_t* weights, const int32_t* values, int64_t num_rows, int64_t n,
                              int64_t size, const Finish& finish) {
    constexpr int64_t words = attention_block / 4;
    multiply({weights, attention_block, words, 2 * words, values, size, words, num_rows, (n + 3) / 4}, size,
             finish);
  }

  template <typename Finish>
  static void multiply(const ByteProduct& product, int64_t num_columns, const Finish& finish) {
    int64_t column = 0;
    for (; column + 32 <= num_columns; column += 32) multiply_byte_rows<4, 2>(product, 0, column, finish);
    for (; column < num_columns; column += 16) multiply_byte_rows<4, 1>(product, 0, column, finish);
  }
};
