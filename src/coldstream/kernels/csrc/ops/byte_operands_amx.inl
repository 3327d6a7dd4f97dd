// Operands of attention over integers as tiles of AMX, which multiplies 16 rows of 64 signed bytes by 16
// columns of as many in one instruction. Rows are the tile of the left, words of keys and values that of the
// right.

// Sums Σ a[row, i] · b[i, column] over words of four bytes. Row r of `a` has its high plane at a + r ·
// a_stride and its low plane a_low behind it; row i of `b` is at b + i · b_stride, that of a second plane
// b_low behind it. `b` has rows of zeros up to a multiple of 16, or num_words is less than 16.
struct TileProduct {
  const int8_t* a;
  int64_t a_stride, a_low;  // bytes
  const int32_t* b;
  int64_t b_stride, b_low;  // words
  int64_t num_rows, num_words;
};

// Tiles 0 and 1 are the sums over high and over mixed planes of 16 columns, 2 and 3 those of the next 16; 4
// and 5 are the planes of the rows, 6 and 7 the columns.
static inline void configure_tiles(int64_t num_rows, int64_t num_words) {
  struct alignas(64) {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  } config = {1, 0, {}, {}, {}};
  static_assert(sizeof(config) == 64);
  for (int i = 0; i < 8; i++) {
    config.row_bytes[i] = i == 4 || i == 5 ? 4 * num_words : 64;
    config.rows[i] = i < 6 ? num_rows : num_words;
  }
  _tile_loadconfig(&config);
}

// The sums of up to 16 rows and of V times 16 columns, in `results`. Products that add to the same tile are
// far apart, because each waits for the one before.
template <int planes, int V>
static inline void multiply_tile(const TileProduct& p, const int8_t* a, const int32_t* b,
                                 int32_t (*results)[16][16]) {
  asm volatile("" ::: "memory");  // GCC's tile loads do not say that they read memory
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (V == 2) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t word = 0; word < p.num_words; word += 16, a += 64, b += 16 * p.b_stride) {
    _tile_loadd(4, a, p.a_stride);
    _tile_loadd(5, a + p.a_low, p.a_stride);
    _tile_loadd(6, b, 4 * p.b_stride);
    _tile_dpbssd(0, 4, 6);
    _tile_dpbssd(1, 5, 6);
    if constexpr (V == 2) {
      _tile_loadd(7, b + 16, 4 * p.b_stride);
      _tile_dpbssd(2, 4, 7);
      _tile_dpbssd(3, 5, 7);
    }
    if constexpr (planes == 2) {
      _tile_loadd(6, b + p.b_low, 4 * p.b_stride);
      _tile_dpbssd(1, 4, 6);
      if constexpr (V == 2) {
        _tile_loadd(7, b + p.b_low + 16, 4 * p.b_stride);
        _tile_dpbssd(3, 4, 7);
      }
    }
  }
  _tile_stored(0, results[0], 64);
  _tile_stored(1, results[1], 64);
  if constexpr (V == 2) {
    _tile_stored(2, results[2], 64);
    _tile_stored(3, results[3], 64);
  }
}

template <int planes, int V, typename Finish>
static inline void multiply_columns(const TileProduct& p, int64_t row, int64_t num_rows, int64_t column,
                                    const Finish& finish) {
  alignas(64) int32_t results[4][16][16];
  multiply_tile<planes, V>(p, p.a + row * p.a_stride, p.b + column, results);
  for (int64_t r = 0; r < num_rows; r++) {
    for (int v = 0; v < V; v++) {
      const Ints16 high = load_ints(results[2 * v][r]), mixed = load_ints(results[2 * v + 1][r]);
      finish(row + r, column + 16 * v, ints_to_floats(add_ints(times_256(high), mixed)));
    }
  }
}

// finish(row, column, sums) for all rows and each 16 columns; num_columns is a multiple of 16.
template <int planes, typename Finish>
static void multiply_tiles(const TileProduct& p, int64_t num_columns, const Finish& finish) {
  const int64_t num_words = p.num_words < 16 ? p.num_words : 16;
  for (int64_t row = 0; row < p.num_rows; row += 16) {
    const int64_t num_rows = p.num_rows - row < 16 ? p.num_rows - row : 16;
    if (row == 0 || num_rows < 16) configure_tiles(num_rows, num_words);
    int64_t column = 0;
    for (; column + 32 <= num_columns; column += 32) {
      multiply_columns<planes, 2>(p, row, num_rows, column, finish);
    }
    if (column < num_columns) multiply_columns<planes, 1>(p, row, num_rows, column, finish);
  }
  _tile_release();
}

// What PairOperands is for pairs of int16: a row of n numbers is its high bytes and its low bytes; keys are
// [planes, key_rows, attention_block] words and values [planes, attention_block / 4, size].
template <int planes>
struct TileOperands {
  static constexpr bool has_key_rows = false;
  static constexpr int64_t query_scale(int64_t size) { return size / 2; }

  static float round(const float* x, int64_t n, int32_t* out) {
    return round_bytes(x, n, reinterpret_cast<int8_t*>(out)).scale;
  }

  // Words of a key, up to a multiple of 16 if they are more than one tile has. There a tile of queries also
  // holds bytes behind the head's, which meet zeros.
  static constexpr int64_t key_rows(int64_t size) { return size < 64 ? size / 4 : (size + 63) / 64 * 16; }

  static void pack_keys(const int8_t* keys, int64_t stride, int64_t n, int64_t size, int32_t* packed) {
    pack_key_words<planes>(keys, stride, n, size, key_rows(size), 0, packed);
  }

  static void pack_values(const int8_t* values, int64_t stride, int64_t n, int64_t size, int32_t* packed) {
    pack_value_words<planes>(values, stride, n, size, 0, packed);
  }

  template <typename Finish>
  static void multiply_keys(const int32_t* queries, const int32_t* keys, int64_t num_rows,
                            int64_t num_columns, int64_t size, const Finish& finish) {
    const int64_t rows = key_rows(size);
    multiply_tiles<planes>({reinterpret_cast<const int8_t*>(queries), 4 * integer_query_ints(size), size,
                            keys, attention_block, rows * attention_block, num_rows, rows},
                           num_columns, finish);
  }

  // Positions behind the last one meet weights of 0.
  template <typename Finish>
  static void multiply_values(const int32_t* weights, const int32_t* values, int64_t num_rows, int64_t,
                              int64_t size, const Finish& finish) {
    constexpr int64_t words = attention_block / 4;
    multiply_tiles<planes>({reinterpret_cast<const int8_t*>(weights), 4 * attention_block, attention_block,
                            values, size, words * size, num_rows, words},
                           size, finish);
  }
};
