// The gated delta rule. Columns of the state are independent, so a block of them stays in the nearest cache
// while all rows of a sequence pass over it.

static void convolve(const float* const* inputs, const float* taps, int64_t tap_stride, int64_t num_taps,
                     float* out, int64_t n) {
  for (int64_t i = 0; i < n; i += 16) {
    Vec16 sum = zero16();
    for (int64_t j = 0; j < num_taps; j++) {
      sum = fma16(load16(taps + j * tap_stride + i, n - i), load16(inputs[j] + i, n - i), sum);
    }
    store16(out + i, silu16(sum), n - i);
  }
}

static void delta_gates(const float* alpha, const float* raw_beta, const float* a, const float* dt_bias,
                        float* decay, float* beta, int64_t n) {
  for (int64_t i = 0; i < n; i += 16) {
    const int64_t left = n - i;
    const Vec16 step = softplus16(add16(load16(alpha + i, left), load16(dt_bias + i, left)));
    store16(decay + i, exp16(mul16(load16(a + i, left), step)), left);
    store16(beta + i, sigmoid16(load16(raw_beta + i, left)), left);
  }
}

// A sum over the key dimension is num_chains chains, number i mod num_chains taking in key index i. A tier
// runs as many of them at a time as its registers hold, in groups of 2 or 4.
constexpr int num_chains = 4;

// Calls visit(i, c) for the key indices i of a group's chains in ascending order; c is the chain in the
// group.
template <int in_group, typename Visit>
static inline __attribute__((always_inline)) void visit_group(int64_t size, int group, Visit visit) {
  int64_t i = group * in_group;
  for (; i + in_group <= size; i += num_chains) {
#pragma GCC unroll 4
    for (int c = 0; c < in_group; c++) visit(i + c, c);
  }
#pragma GCC unroll 4
  for (int c = 0; c < in_group - 1; c++) {
    if (i + c < size) visit(i + c, c);
  }
}

// −0 is the number that adds nothing, whatever the sign of a zero.
static inline void clear_sums(Vec16* sums, int vectors) {
  for (int v = 0; v < vectors; v++) sums[v] = splat16(-0.0f);
}

template <int in_group, int vectors>
static inline void clear_chains(Vec16 (&chains)[in_group][vectors]) {
  for (int c = 0; c < in_group; c++) {
    for (int v = 0; v < vectors; v++) chains[c][v] = zero16();
  }
}

// Adds a group to the groups before it: (c0 + c1) + (c2 + c3) in one go or in two.
template <int vectors>
static inline void add_chains(Vec16* sums, const Vec16 (&chains)[2][vectors]) {
  for (int v = 0; v < vectors; v++) sums[v] = add16(sums[v], add16(chains[0][v], chains[1][v]));
}

template <int vectors>
static inline void add_chains(Vec16* sums, const Vec16 (&chains)[4][vectors]) {
  for (int v = 0; v < vectors; v++) {
    sums[v] = add16(add16(chains[0][v], chains[1][v]), add16(chains[2][v], chains[3][v]));
  }
}

constexpr int64_t kept_floats = 16 * delta_vectors;

// Key index i of the block's first token: loads the state, decays it and adds to the prediction.
static inline void enter_key(const DeltaBlock& block, int64_t i, Vec16 decay, Vec16* prediction) {
  float* kept = block.memory + i * kept_floats;
#pragma GCC unroll 2
  for (int v = 0; v < delta_vectors; v++) {
    const float* from = block.source + i * block.state_stride + 16 * v;
    const Vec16 state = mul16(load16(from, block.num_columns - 16 * v), decay);
    prediction[v] = fma16(splat16(block.k[i]), state, prediction[v]);
    store16(kept + 16 * v, state);
  }
}

static inline void enter_block(const DeltaBlock& block, Vec16* predictions) {
  const Vec16 decay = splat16(block.decay[0]);
  clear_sums(predictions, delta_vectors);
  for (int group = 0; group < num_chains / delta_chains; group++) {
    Vec16 prediction[delta_chains][delta_vectors];
    clear_chains(prediction);
    visit_group<delta_chains>(block.head_size, group,
                              [&](int64_t i, int chain) { enter_key(block, i, decay, prediction[chain]); });
    add_chains(predictions, prediction);
  }
}

// One token's vectors, and the block's memory.
struct DeltaToken {
  const float *q, *k, *next_k;
  Vec16 change[delta_vectors];
  Vec16 next_decay;
  float* memory;
};

// Key index i of one token: the state (decayed already) takes in the token's change, the output reads it, and
// it decays for the next token, whose prediction reads it in the same visit. After the last token it is
// stored.
template <bool next>
static inline void visit_key(const DeltaToken& token, int64_t i, const DeltaBlock& block, Vec16* output,
                             Vec16* prediction) {
  float* kept = token.memory + i * kept_floats;
  const Vec16 key = splat16(token.k[i]), query = splat16(token.q[i]);
  const Vec16 next_key = splat16(next ? token.next_k[i] : 0.0f);
#pragma GCC unroll 2
  for (int v = 0; v < delta_vectors; v++) {
    Vec16 state = fma16(key, token.change[v], load16(kept + 16 * v));
    output[v] = fma16(query, state, output[v]);
    if constexpr (next) {
      state = mul16(state, token.next_decay);
      prediction[v] = fma16(next_key, state, prediction[v]);
      store16(kept + 16 * v, state);
    } else {
      store16(block.state + i * block.state_stride + 16 * v, state, block.num_columns - 16 * v);
    }
  }
}

template <bool has_next>
static inline void advance_token(const DeltaBlock& block, int64_t row, Vec16* predictions) {
  const float* k = block.k + row * block.row_stride;
  DeltaToken token = {block.q + row * block.row_stride, k, k + block.row_stride, {}, {}, block.memory};
  token.next_decay = splat16(has_next ? block.decay[(row + 1) * block.gate_stride] : 0.0f);
  const Vec16 beta = splat16(block.beta[row * block.gate_stride]);
  for (int v = 0; v < delta_vectors; v++) {
    const Vec16 value = load16(block.v + row * block.row_stride + 16 * v, block.num_columns - 16 * v);
    token.change[v] = mul16(beta, sub16(value, predictions[v]));
  }
  Vec16 outputs[delta_vectors];
  clear_sums(outputs, delta_vectors);
  clear_sums(predictions, delta_vectors);
  for (int group = 0; group < num_chains / delta_chains; group++) {
    Vec16 output[delta_chains][delta_vectors], next[delta_chains][delta_vectors];
    clear_chains(output);
    clear_chains(next);
    visit_group<delta_chains>(block.head_size, group, [&](int64_t i, int chain) {
      visit_key<has_next>(token, i, block, output[chain], next[chain]);
    });
    add_chains(outputs, output);
    add_chains(predictions, next);
  }
  for (int v = 0; v < delta_vectors; v++) {
    store16(block.out + row * block.out_stride + 16 * v, outputs[v], block.num_columns - 16 * v);
  }
}

// whole: the block has all columns of its vectors, so that no lane is masked.
template <bool whole>
static inline Vec16 load_columns(const float* p, int64_t left) {
  return whole ? load16(p) : load16(p, left);
}

template <bool whole>
static inline void store_columns(float* p, Vec16 v, int64_t left) {
  whole ? store16(p, v) : store16(p, v, left);
}

// A single token. Its state is read from memory, not from the nearest cache, so whole rows of it pass by;
// and as no other token follows, decaying it a second time is cheaper than keeping it.
template <bool whole, int vectors>
static inline void predict_key(const DeltaBlock& block, int64_t i, Vec16 decay, Vec16* prediction) {
#pragma GCC unroll 8
  for (int v = 0; v < vectors; v++) {
    const float* place = block.state + i * block.state_stride + 16 * v;
    const Vec16 state = load_columns<whole>(place, block.num_columns - 16 * v);
    prediction[v] = fma16(splat16(block.k[i]), mul16(state, decay), prediction[v]);
  }
}

template <bool whole, int vectors>
static inline void update_key(const DeltaBlock& block, int64_t i, Vec16 decay, const Vec16* change,
                              Vec16* output) {
#pragma GCC unroll 8
  for (int v = 0; v < vectors; v++) {
    float* place = block.state + i * block.state_stride + 16 * v;
    if (block.next_state != nullptr)
      __builtin_prefetch(block.next_state + i * block.state_stride + 16 * v, 0, 2);
    const Vec16 decayed = mul16(load_columns<whole>(place, block.num_columns - 16 * v), decay);
    const Vec16 state = fma16(splat16(block.k[i]), change[v], decayed);
    output[v] = fma16(splat16(block.q[i]), state, output[v]);
    store_columns<whole>(place, state, block.num_columns - 16 * v);
  }
}

template <bool whole, int vectors>
static void step_block(const DeltaBlock& block) {
  constexpr int chains = 2;
  const Vec16 decay = splat16(block.decay[0]), beta = splat16(block.beta[0]);
  Vec16 sums[vectors], change[vectors];
  clear_sums(sums, vectors);
  for (int group = 0; group < num_chains / chains; group++) {
    Vec16 prediction[chains][vectors];
    clear_chains(prediction);
    visit_group<chains>(block.head_size, group, [&](int64_t i, int chain) {
      predict_key<whole, vectors>(block, i, decay, prediction[chain]);
    });
    add_chains(sums, prediction);
  }
  for (int v = 0; v < vectors; v++) {
    const Vec16 value = load_columns<whole>(block.v + 16 * v, block.num_columns - 16 * v);
    change[v] = mul16(beta, sub16(value, sums[v]));
  }
  clear_sums(sums, vectors);
  for (int group = 0; group < num_chains / chains; group++) {
    Vec16 output[chains][vectors];
    clear_chains(output);
    visit_group<chains>(block.head_size, group, [&](int64_t i, int chain) {
      update_key<whole, vectors>(block, i, decay, change, output[chain]);
    });
    add_chains(sums, output);
  }
  for (int v = 0; v < vectors; v++) {
    store_columns<whole>(block.out + 16 * v, sums[v], block.num_columns - 16 * v);
  }
}

static void delta_step(const DeltaBlock& block) {
  if (block.num_columns == 16 * step_vectors) return step_block<true, step_vectors>(block);
  if (block.num_columns == 8 * step_vectors) return step_block<true, step_vectors / 2>(block);
  step_block<false, step_vectors>(block);
}

// The value and the output of a token. Rows lie too far apart for the hardware to read ahead, and a store
// that waits for its line holds up all later ones.
static inline __attribute__((always_inline)) void prefetch_columns(const DeltaBlock& block, int64_t row) {
  for (int64_t i = 0; i < block.num_columns; i += 16) {
    __builtin_prefetch(block.v + row * block.row_stride + i);
    __builtin_prefetch(block.out + row * block.out_stride + i, 1);
  }
}

static void delta_advance(const DeltaBlock& block) {
  constexpr int64_t rows_ahead = 4;
  Vec16 prediction[delta_vectors];
  enter_block(block, prediction);
  for (int64_t row = 0; row + 1 < block.num_rows; row++) {
    if (row + rows_ahead < block.num_rows) prefetch_columns(block, row + rows_ahead);
    advance_token<true>(block, row, prediction);
  }
  advance_token<false>(block, block.num_rows - 1, prediction);
}
