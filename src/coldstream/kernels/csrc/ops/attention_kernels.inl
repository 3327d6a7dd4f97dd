// Attention over one chunk of positions: per block of 64, scores = q · keysᵀ, a running maximum, and values
// weighted by exp(score − maximum). Both products run over float32 copies of the block, so that lanes are
// positions in the first and head dimensions in the second and every sum is one chain of fma, whichever rows
// share the loads.

static void rope(float* head, const float* angles, int64_t num_pairs, float scale, int64_t head_size) {
  for (int64_t i = 0; i < num_pairs; i++) {
    const float x = head[i], y = head[i + num_pairs];
    const float cosine = angles[2 * i], sine = angles[2 * i + 1];
    head[i] = __builtin_fmaf(x, cosine, -(y * sine));
    head[i + num_pairs] = __builtin_fmaf(y, cosine, x * sine);
  }
  const Vec16 factor = splat16(scale);
  for (int64_t i = 0; i < head_size; i += 16) {
    store16(head + i, mul16(load16(head + i, head_size - i), factor), head_size - i);
  }
}

static void store_float16(float* head, void* to, int64_t n) {
  auto* out = static_cast<Float16*>(to);
  for (int64_t i = 0; i < n; i += 16) store16(out + i, load16(head + i, n - i), n - i);
}

static void store_float(float* head, void* to, int64_t n) { memcpy(to, head, sizeof(float) * n); }

static void keep_query(float* head, int32_t* query, int64_t n) { memcpy(query, head, sizeof(float) * n); }

// c[r] ← (scales ? c[r] · scales[r] : 0) + Σ_i a[r, i] · b[i], i ascending, for R rows and V vectors of
// columns.
template <int R, int V>
static inline void accumulate_tile(const float* a, int64_t a_stride, const float* b, int64_t b_stride,
                                   float* c, int64_t c_stride, const float* scales, int64_t n) {
  Vec16 sums[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) {
#pragma GCC unroll 2
    for (int v = 0; v < V; v++) {
      sums[r][v] = scales ? mul16(load16(c + r * c_stride + 16 * v), splat16(scales[r])) : zero16();
    }
  }
  for (int64_t i = 0; i < n; i++) {
    Vec16 columns[V];
#pragma GCC unroll 2
    for (int v = 0; v < V; v++) columns[v] = load16(b + i * b_stride + 16 * v);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const Vec16 factor = splat16(a[r * a_stride + i]);
#pragma GCC unroll 2
      for (int v = 0; v < V; v++) sums[r][v] = fma16(factor, columns[v], sums[r][v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) {
#pragma GCC unroll 2
    for (int v = 0; v < V; v++) store16(c + r * c_stride + 16 * v, sums[r][v]);
  }
}

// As many rows as possible in tiles of R, the rest in smaller ones.
template <int R, int V>
static inline void accumulate_rows(const float* a, int64_t a_stride, const float* b, int64_t b_stride,
                                   float* c, int64_t c_stride, const float* scales, int64_t num_rows,
                                   int64_t n) {
  int64_t r = 0;
  for (; r + R <= num_rows; r += R) {
    accumulate_tile<R, V>(a + r * a_stride, a_stride, b, b_stride, c + r * c_stride, c_stride,
                          scales ? scales + r : nullptr, n);
  }
  if constexpr (R > 1) {
    accumulate_rows<R / 2, V>(a + r * a_stride, a_stride, b, b_stride, c + r * c_stride, c_stride,
                              scales ? scales + r : nullptr, num_rows - r, n);
  }
}

// For num_columns a multiple of 16.
static void accumulate(const float* a, int64_t a_stride, const float* b, int64_t b_stride, float* c,
                       int64_t c_stride, const float* scales, int64_t num_rows, int64_t num_columns,
                       int64_t n) {
  int64_t column = 0;
  for (; column + 16 * tile_vectors <= num_columns; column += 16 * tile_vectors) {
    accumulate_rows<tile_rows, tile_vectors>(a, a_stride, b + column, b_stride, c + column, c_stride, scales,
                                             num_rows, n);
  }
  for (; column < num_columns; column += 16) {
    accumulate_rows<tile_rows, 1>(a, a_stride, b + column, b_stride, c + column, c_stride, scales, num_rows,
                                  n);
  }
}

// keys [n, head_size] → [head_size, attention_block], columns up to the next multiple of 16 zero.
template <typename T>
static void pack_keys(const T* keys, int64_t stride, int64_t n, int64_t head_size, float* packed) {
  for (int64_t position = 0; position < n; position += 16) {
    for (int64_t i = 0; i < head_size; i += 16) {
      Vec16 square[16];
      for (int64_t p = 0; p < 16; p++) {
        square[p] = position + p < n ? load16(keys + (position + p) * stride + i, head_size - i) : zero16();
      }
      transpose16(square);
      for (int64_t j = 0; j < 16 && i + j < head_size; j++) {
        store16(packed + (i + j) * attention_block + position, square[j]);
      }
    }
  }
}

// values [n, head_size] → [n, head_floats(head_size)], columns beyond head_size zero.
template <typename T>
static void pack_values(const T* values, int64_t stride, int64_t n, int64_t head_size, float* packed) {
  const int64_t width = head_floats(head_size);
  for (int64_t position = 0; position < n; position++) {
    for (int64_t i = 0; i < head_size; i += 16) {
      store16(packed + position * width + i, load16(values + position * stride + i, head_size - i));
    }
  }
}

// Positions from … end − 1 of a block, seen alike by some rows; whether it is the first block of the chunk
// that they see, as every block is whose first positions they do not.
struct SeenPart {
  int64_t from, end;
  bool first;
  uint64_t chosen;  // bits of the positions that they see of these
};

constexpr uint64_t all_chosen = ~uint64_t{0};

// x[i] = value for the positions i of a block that are not chosen.
static inline void hide(float* x, uint64_t chosen, float value) {
  for (uint64_t hidden = ~chosen; hidden != 0; hidden &= hidden - 1) x[__builtin_ctzll(hidden)] = value;
}

// scores of the positions seen → exp(score − maximum), the others of the block 0. Updates the row's maximum
// and sum and returns the factor for what it has accumulated so far.
static inline float advance_softmax(float* scores, SeenPart seen, float* maximum, float* sum) {
  const int64_t n = seen.end;
  const bool first = seen.first;
  for (int64_t i = 0; i < seen.from; i++) scores[i] = -__builtin_inff();
  if (seen.chosen != all_chosen) hide(scores, seen.chosen, -__builtin_inff());
  Vec16 greatest = splat16(-__builtin_inff());
  for (int64_t i = 0; i < n; i += 16) {
    greatest = max16(greatest, keep16(load16(scores + i), n - i, -__builtin_inff()));
  }
  const float block_maximum = greatest16(greatest);
  const float before = *maximum;
  const float after = first || block_maximum > before ? block_maximum : before;
  Vec16 block_sum = zero16();
  for (int64_t i = 0; i < attention_block; i += 16) {
    Vec16 weights = keep16(exp16(sub16(load16(scores + i), splat16(after))), n - i, 0.0f);
    // exp has no 0; before `from` it is finite, and what is taken from itself is.
    if (seen.from > i) weights = sub16(weights, keep16(weights, seen.from - i, 0.0f));
    store16(scores + i, weights);
    if (seen.chosen != all_chosen) {
      hide(scores + i, seen.chosen >> i | all_chosen << 16, 0.0f);
      weights = load16(scores + i);
    }
    block_sum = add16(block_sum, weights);
  }
  *maximum = after;
  if (first) {
    *sum = sum16(block_sum);
    return 0.0f;
  }
  const float factor = exp_of(before - after);
  *sum = __builtin_fmaf(*sum, factor, sum16(block_sum));
  return factor;
}

// Reads a byte of every line of n positions from `offset` on, in the order of memory. What follows takes a
// head at a time, which lies in pieces of a few lines, and hardware reads ahead only where lines follow each
// other. Prefetches of as many lines take longer than these loads.
template <typename T>
static inline void read_positions(const AttentionChunk& chunk, int64_t offset, int64_t n) {
  const int64_t stride = chunk.position_stride * sizeof(T);
  const int64_t bytes = chunk.num_kv_heads * chunk.row_elements * sizeof(T);
  const bool is_whole = bytes == stride;
  const void* const caches[2] = {chunk.keys, chunk.values};
  for (const void* cache : caches) {
    const auto* from = reinterpret_cast<const volatile char*>(static_cast<const T*>(cache) + offset);
    for (int64_t p = 0; p < (is_whole ? 1 : n); p++, from += stride) {
      for (int64_t i = 0; i < (is_whole ? n * stride : bytes); i += 64) static_cast<void>(from[i]);
    }
  }
}

// n positions of a block from `offset` on, head by head: pack(offset of the head, n), then steps(head).
template <typename T, typename Pack, typename Steps>
static inline void walk_heads(const AttentionChunk& chunk, int64_t offset, int64_t n, const Pack& pack,
                              const Steps& steps) {
  read_positions<T>(chunk, offset, n);
  for (int64_t head = 0; head < chunk.num_kv_heads; head++) {
    pack(offset + head * chunk.row_elements, n);
    steps(head);
  }
}

// step(head, first_row, num_rows, seen) for as many of the rows at a time as there is memory for.
template <typename Step>
static inline void step_rows(const Step& step, int64_t head, int64_t row, int64_t end, SeenPart seen) {
  for (; row < end; row += attention_rows) {
    step(head, row, end - row < attention_rows ? end - row : attention_rows, seen);
  }
}

// `walk_blocks` where each token has its own positions. A block of which it sees none does not count.
template <typename T, typename Pack, typename Step>
static inline void walk_chosen(const AttentionChunk& chunk, const Pack& pack, const Step& step) {
  for (int64_t block = 0; block < chunk_words; block++) {
    const uint64_t* words = chunk.chosen + block;
    uint64_t any = 0;
    for (int64_t token = 0; token < chunk.num_tokens; token++) any |= words[token * chunk_words];
    if (any == 0) continue;
    const int64_t n = attention_block - __builtin_clzll(any);
    const int64_t offset = block * attention_block * chunk.position_stride;
    walk_heads<T>(chunk, offset, n, pack, [&](int64_t head) {
      for (int64_t token = 0, next; token < chunk.num_tokens; token = next) {
        const uint64_t *of_token = words + token * chunk_words, chosen = *of_token;
        next = token + 1;
        if (chosen == 0) continue;
        const auto is_first = [&](const uint64_t* word) {
          uint64_t before = 0;
          for (int64_t b = 1; b <= block; b++) before |= word[-b];
          return before == 0;
        };
        const bool first = is_first(of_token);
        // Tokens that see the whole block go together.
        while (chosen == all_chosen && next < chunk.num_tokens && words[next * chunk_words] == all_chosen &&
               is_first(words + next * chunk_words) == first) {
          next++;
        }
        const SeenPart seen = {
            .from = 0, .end = attention_block - __builtin_clzll(chosen), .first = first, .chosen = chosen};
        step_rows(step, head, token * chunk.group, next * chunk.group, seen);
      }
    });
  }
}

// The blocks of a chunk that some row sees, for each head: pack(offset, n) of its n positions, then
// step(head, first_row, num_rows, seen) for rows that see the same of them. T: of an element of the caches.
template <typename T, typename Pack, typename Step>
static inline void walk_blocks(const AttentionChunk& chunk, const Pack& pack, const Step& step) {
  if (chunk.chosen != nullptr) return walk_chosen<T>(chunk, pack, step);
  const int64_t last_position = chunk.first_position + chunk.num_tokens - 1;
  // How far tokens look back; without a window, to position 0 and beyond.
  const int64_t back = chunk.window > 0 ? chunk.window - 1 : last_position;
  for (int64_t begin = chunk.begin; begin < chunk.begin + attention_chunk && begin <= last_position;
       begin += attention_block) {
    if (begin + attention_block <= chunk.first_position - back) continue;
    const int64_t left = last_position + 1 - begin, n = left < attention_block ? left : attention_block;
    walk_heads<T>(chunk, (begin - chunk.begin) * chunk.position_stride, n, pack, [&](int64_t head) {
      int64_t token = begin > chunk.first_position ? begin - chunk.first_position : 0;
      while (token < chunk.num_tokens) {
        // Tokens that see the whole block and what is before it go together; on the diagonal, and where
        // windows begin, each has its own positions.
        const int64_t position = chunk.first_position + token, start = position - back - begin;
        if (start >= attention_block) break;
        const int64_t end = position + 1 - begin;
        const bool alone = end < attention_block || (chunk.window > 0 && start >= 0);
        const int64_t alike = alone ? token + 1 : chunk.window > 0 ? token - start : chunk.num_tokens;
        const int64_t next = alike < chunk.num_tokens ? alike : chunk.num_tokens;
        const SeenPart seen = {.from = start > 0 ? start : 0,
                               .end = end < attention_block ? end : attention_block,
                               .first = begin == chunk.begin || (chunk.window > 0 && start >= 0),
                               .chosen = all_chosen};
        step_rows(step, head, token * chunk.group, next * chunk.group, seen);
        token = next;
      }
    });
  }
}

static inline int64_t rows_at_once(const AttentionChunk& chunk) {
  const int64_t num_rows = chunk.num_tokens * chunk.group;
  return num_rows < attention_rows ? num_rows : attention_rows;
}

template <typename T>
static void attend(const AttentionChunk& chunk) {
  const int64_t size = chunk.head_size, width = head_floats(size), row_floats = attention_row_floats(size);
  const auto* queries = static_cast<const float*>(chunk.q);
  float* keys = chunk.memory;
  float* values = keys + attention_block * size;
  float* scores = values + attention_block * width;
  float* factors = scores + attention_block * rows_at_once(chunk);
  const auto pack = [&](int64_t offset, int64_t n) {
    pack_keys(static_cast<const T*>(chunk.keys) + offset, chunk.position_stride, n, size, keys);
    pack_values(static_cast<const T*>(chunk.values) + offset, chunk.position_stride, n, size, values);
  };
  walk_blocks<T>(chunk, pack, [&](int64_t head, int64_t first_row, int64_t num_rows, SeenPart seen) {
    accumulate(queries + head * chunk.q_stride + first_row * size, size, keys, attention_block, scores,
               attention_block, nullptr, num_rows, head_floats(seen.end), size);
    float* rows = chunk.rows + head * chunk.rows_stride + first_row * row_floats;
    for (int64_t r = 0; r < num_rows; r++) {
      float* row = rows + r * row_floats;
      factors[r] = advance_softmax(scores + r * attention_block, seen, row + width, row + width + 1);
    }
    accumulate(scores + seen.from, attention_block, values + seen.from * width, width, rows, row_floats,
               seen.first ? nullptr : factors, num_rows, width, seen.end - seen.from);
  });
}

static void attend_merge(float* total, SoftmaxState* state, const float* row, int64_t head_size) {
  const int64_t width = head_floats(head_size);
  const float before = state->maximum, other = row[width];
  const float after = other > before ? other : before;
  const float factor = exp_of(before - after), row_factor = exp_of(other - after);
  state->maximum = after;
  state->sum = __builtin_fmaf(row[width + 1], row_factor, state->sum * factor);
  for (int64_t i = 0; i < head_size; i += 16) {
    const int64_t left = head_size - i;
    const Vec16 kept = mul16(load16(total + i, left), splat16(factor));
    store16(total + i, fma16(load16(row + i), splat16(row_factor), kept), left);
  }
}

static void attend_sink(float* total, SoftmaxState* state, float sink, int64_t head_size) {
  const float before = state->maximum, after = sink > before ? sink : before;
  const float factor = exp_of(before - after);
  state->maximum = after;
  state->sum = state->sum * factor + exp_of(sink - after);
  for (int64_t i = 0; i < head_size; i += 16) {
    const int64_t left = head_size - i;
    store16(total + i, mul16(load16(total + i, left), splat16(factor)), left);
  }
}

// What value i of a head and those behind it, of which `left` exist, are multiplied by.
static inline Vec16 opened16(HeadGate gate, int64_t i, int64_t left) {
  if (gate.kind == OutputGate::query) return sigmoid16(load16(gate.values + i, left));
  if (gate.kind == OutputGate::element) return softplus16(load16(gate.values + i, left));
  return softplus16(splat16(gate.values[0]));
}

static void attend_finish(const float* total, float sum, HeadGate gate, float* out, int64_t head_size) {
  const Vec16 inverse = splat16(1.0f / sum);
  for (int64_t i = 0; i < head_size; i += 16) {
    const int64_t left = head_size - i;
    const Vec16 value = mul16(load16(total + i, left), inverse);
    const bool is_open = gate.kind == OutputGate::none;
    store16(out + i, is_open ? value : mul16(value, opened16(gate, i, left)), left);
  }
}
