// The gated delta rule. Columns of the state are independent, so a block of them stays in the nearest cache
// while all rows of a sequence pass over it.

static void convolve(const float* const* inputs, const float* taps, int64_t tap_stride, int64_t num_taps,
                     float* out, int64_t n) {
  for (int64_t i = 0; i < n; i += 16) {
    vec16 sum = zero16();
    for (int64_t j = 0; j < num_taps; j++) {
      sum = fma16(load16(taps + j * tap_stride + i, n - i), load16(inputs[j] + i, n - i), sum);
    }
    store16(out + i, silu16(sum), n - i);
  }
}

static inline vec16 softplus16(vec16 x) {
  const vec16 t = exp16(min16(x, sub16(zero16(), x)));
  const vec16 s = div16(t, add16(splat16(2.0f), t));
  const vec16 z = mul16(s, s);
  vec16 y = splat16(1.0f / 15.0f);
  y = fma16(y, z, splat16(1.0f / 13.0f));
  y = fma16(y, z, splat16(1.0f / 11.0f));
  y = fma16(y, z, splat16(1.0f / 9.0f));
  y = fma16(y, z, splat16(1.0f / 7.0f));
  y = fma16(y, z, splat16(1.0f / 5.0f));
  y = fma16(y, z, splat16(1.0f / 3.0f));
  y = fma16(y, z, splat16(1.0f));
  return add16(max16(x, zero16()), mul16(add16(s, s), y));
}

static void delta_gates(const float* alpha, const float* raw_beta, const float* a, const float* dt_bias,
                        float* decay, float* beta, int64_t n) {
  for (int64_t i = 0; i < n; i += 16) {
    const int64_t left = n - i;
    const vec16 step = softplus16(add16(load16(alpha + i, left), load16(dt_bias + i, left)));
    store16(decay + i, exp16(mul16(load16(a + i, left), step)), left);
    store16(beta + i, sigmoid16(load16(raw_beta + i, left)), left);
  }
}

// A sum over the key dimension is NUM_CHAINS chains, number i mod NUM_CHAINS taking in key index i. A tier
// runs as many of them at a time as its registers hold, in groups of 2 or 4.
constexpr int NUM_CHAINS = 4;

// Calls visit(i, c) for the key indices i of a group's chains in ascending order; c is the chain in the
// group.
template <int CHAINS, typename VISIT>
static inline __attribute__((always_inline)) void visit_group(int64_t size, int group, VISIT visit) {
  int64_t i = group * CHAINS;
  for (; i + CHAINS <= size; i += NUM_CHAINS) {
#pragma GCC unroll 4
    for (int c = 0; c < CHAINS; c++) visit(i + c, c);
  }
#pragma GCC unroll 4
  for (int c = 0; c < CHAINS - 1; c++) {
    if (i + c < size) visit(i + c, c);
  }
}

// −0 is the number that adds nothing, whatever the sign of a zero.
static inline void clear_sums(vec16* sums, int vectors) {
  for (int v = 0; v < vectors; v++) sums[v] = splat16(-0.0f);
}

template <int CHAINS, int VECTORS>
static inline void clear_chains(vec16 (&chains)[CHAINS][VECTORS]) {
  for (int c = 0; c < CHAINS; c++) {
    for (int v = 0; v < VECTORS; v++) chains[c][v] = zero16();
  }
}

// Adds a group to the groups before it: (c0 + c1) + (c2 + c3) in one go or in two.
template <int VECTORS>
static inline void add_chains(vec16* sums, const vec16 (&chains)[2][VECTORS]) {
  for (int v = 0; v < VECTORS; v++) sums[v] = add16(sums[v], add16(chains[0][v], chains[1][v]));
}

template <int VECTORS>
static inline void add_chains(vec16* sums, const vec16 (&chains)[4][VECTORS]) {
  for (int v = 0; v < VECTORS; v++) {
    sums[v] = add16(add16(chains[0][v], chains[1][v]), add16(chains[2][v], chains[3][v]));
  }
}

constexpr int64_t KEPT_FLOATS = 16 * DELTA_VECTORS;

// Key index i of the block's first token: loads the state, decays it and adds to the prediction.
static inline void enter_key(const delta_block& block, int64_t i, vec16 decay, vec16* prediction) {
  float* kept = block.memory + i * KEPT_FLOATS;
#pragma GCC unroll 2
  for (int v = 0; v < DELTA_VECTORS; v++) {
    const float* from = block.source + i * block.state_stride + 16 * v;
    const vec16 state = mul16(load16(from, block.num_columns - 16 * v), decay);
    prediction[v] = fma16(splat16(block.k[i]), state, prediction[v]);
    store16(kept + 16 * v, state);
  }
}

static inline void enter_block(const delta_block& block, vec16* predictions) {
  const vec16 decay = splat16(block.decay[0]);
  clear_sums(predictions, DELTA_VECTORS);
  for (int group = 0; group < NUM_CHAINS / DELTA_CHAINS; group++) {
    vec16 prediction[DELTA_CHAINS][DELTA_VECTORS];
    clear_chains(prediction);
    visit_group<DELTA_CHAINS>(block.head_size, group,
                              [&](int64_t i, int chain) { enter_key(block, i, decay, prediction[chain]); });
    add_chains(predictions, prediction);
  }
}

// One token's vectors, and the block's memory.
struct delta_token {
  const float *q, *k, *next_k;
  vec16 change[DELTA_VECTORS];
  vec16 next_decay;
  float* memory;
};

// Key index i of one token: the state (decayed already) takes in the token's change, the output reads it, and
// it decays for the next token, whose prediction reads it in the same visit. After the last token it is
// stored.
template <bool NEXT>
static inline void visit_key(const delta_token& token, int64_t i, const delta_block& block, vec16* output,
                             vec16* prediction) {
  float* kept = token.memory + i * KEPT_FLOATS;
  const vec16 key = splat16(token.k[i]), query = splat16(token.q[i]);
  const vec16 next_key = splat16(NEXT ? token.next_k[i] : 0.0f);
#pragma GCC unroll 2
  for (int v = 0; v < DELTA_VECTORS; v++) {
    vec16 state = fma16(key, token.change[v], load16(kept + 16 * v));
    output[v] = fma16(query, state, output[v]);
    if constexpr (NEXT) {
      state = mul16(state, token.next_decay);
      prediction[v] = fma16(next_key, state, prediction[v]);
      store16(kept + 16 * v, state);
    } else {
      store16(block.state + i * block.state_stride + 16 * v, state, block.num_columns - 16 * v);
    }
  }
}

template <bool NEXT>
static inline void advance_token(const delta_block& block, int64_t row, vec16* predictions) {
  const float* k = block.k + row * block.row_stride;
  delta_token token = {block.q + row * block.row_stride, k, k + block.row_stride, {}, {}, block.memory};
  token.next_decay = splat16(NEXT ? block.decay[(row + 1) * block.gate_stride] : 0.0f);
  const vec16 beta = splat16(block.beta[row * block.gate_stride]);
  for (int v = 0; v < DELTA_VECTORS; v++) {
    const vec16 value = load16(block.v + row * block.row_stride + 16 * v, block.num_columns - 16 * v);
    token.change[v] = mul16(beta, sub16(value, predictions[v]));
  }
  vec16 outputs[DELTA_VECTORS];
  clear_sums(outputs, DELTA_VECTORS);
  clear_sums(predictions, DELTA_VECTORS);
  for (int group = 0; group < NUM_CHAINS / DELTA_CHAINS; group++) {
    vec16 output[DELTA_CHAINS][DELTA_VECTORS], next[DELTA_CHAINS][DELTA_VECTORS];
    clear_chains(output);
    clear_chains(next);
    visit_group<DELTA_CHAINS>(block.head_size, group, [&](int64_t i, int chain) {
      visit_key<NEXT>(token, i, block, output[chain], next[chain]);
    });
    add_chains(outputs, output);
    add_chains(predictions, next);
  }
  for (int v = 0; v < DELTA_VECTORS; v++) {
    store16(block.out + row * block.out_stride + 16 * v, outputs[v], block.num_columns - 16 * v);
  }
}

// WHOLE: the block has all columns of its vectors, so that no lane is masked.
template <bool WHOLE>
static inline vec16 load_columns(const float* p, int64_t left) {
  return WHOLE ? load16(p) : load16(p, left);
}

template <bool WHOLE>
static inline void store_columns(float* p, vec16 v, int64_t left) {
  WHOLE ? store16(p, v) : store16(p, v, left);
}

// A single token. Its state is read from memory, not from the nearest cache, so whole rows of it pass by;
// and as no other token follows, decaying it a second time is cheaper than keeping it.
template <bool WHOLE, int VECTORS>
static inline void predict_key(const delta_block& block, int64_t i, vec16 decay, vec16* prediction) {
#pragma GCC unroll 8
  for (int v = 0; v < VECTORS; v++) {
    const float* place = block.state + i * block.state_stride + 16 * v;
    const vec16 state = load_columns<WHOLE>(place, block.num_columns - 16 * v);
    prediction[v] = fma16(splat16(block.k[i]), mul16(state, decay), prediction[v]);
  }
}

template <bool WHOLE, int VECTORS>
static inline void update_key(const delta_block& block, int64_t i, vec16 decay, const vec16* change,
                              vec16* output) {
#pragma GCC unroll 8
  for (int v = 0; v < VECTORS; v++) {
    float* place = block.state + i * block.state_stride + 16 * v;
    if (block.next_state != nullptr)
      __builtin_prefetch(block.next_state + i * block.state_stride + 16 * v, 0, 2);
    const vec16 decayed = mul16(load_columns<WHOLE>(place, block.num_columns - 16 * v), decay);
    const vec16 state = fma16(splat16(block.k[i]), change[v], decayed);
    output[v] = fma16(splat16(block.q[i]), state, output[v]);
    store_columns<WHOLE>(place, state, block.num_columns - 16 * v);
  }
}

template <bool WHOLE, int VECTORS>
static void step_block(const delta_block& block) {
  constexpr int CHAINS = 2;
  const vec16 decay = splat16(block.decay[0]), beta = splat16(block.beta[0]);
  vec16 sums[VECTORS], change[VECTORS];
  clear_sums(sums, VECTORS);
  for (int group = 0; group < NUM_CHAINS / CHAINS; group++) {
    vec16 prediction[CHAINS][VECTORS];
    clear_chains(prediction);
    visit_group<CHAINS>(block.head_size, group, [&](int64_t i, int chain) {
      predict_key<WHOLE, VECTORS>(block, i, decay, prediction[chain]);
    });
    add_chains(sums, prediction);
  }
  for (int v = 0; v < VECTORS; v++) {
    const vec16 value = load_columns<WHOLE>(block.v + 16 * v, block.num_columns - 16 * v);
    change[v] = mul16(beta, sub16(value, sums[v]));
  }
  clear_sums(sums, VECTORS);
  for (int group = 0; group < NUM_CHAINS / CHAINS; group++) {
    vec16 output[CHAINS][VECTORS];
    clear_chains(output);
    visit_group<CHAINS>(block.head_size, group, [&](int64_t i, int chain) {
      update_key<WHOLE, VECTORS>(block, i, decay, change, output[chain]);
    });
    add_chains(sums, output);
  }
  for (int v = 0; v < VECTORS; v++) {
    store_columns<WHOLE>(block.out + 16 * v, sums[v], block.num_columns - 16 * v);
  }
}

static void delta_step(const delta_block& block) {
  if (block.num_columns == 16 * STEP_VECTORS) return step_block<true, STEP_VECTORS>(block);
  if (block.num_columns == 8 * STEP_VECTORS) return step_block<true, STEP_VECTORS / 2>(block);
  step_block<false, STEP_VECTORS>(block);
}

static void delta_advance(const delta_block& block) {
  vec16 prediction[DELTA_VECTORS];
  enter_block(block, prediction);
  for (int64_t row = 0; row + 1 < block.num_rows; row++) advance_token<true>(block, row, prediction);
  advance_token<false>(block, block.num_rows - 1, prediction);
}
