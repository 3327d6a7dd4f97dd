// The gated delta rule. Columns of the state are independent, so a block of them stays in the nearest cache
// while all rows of a slot pass over it.

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

static inline float softplus(float x) { return x > 20.0f ? x : log1pf(exp_of(x)); }

static void delta_gates(const float* alpha, const float* raw_beta, const float* a, const float* dt_bias,
                        float* decay, float* beta, int64_t n) {
  for (int64_t i = 0; i < n; i += 16) {
    const int64_t left = n - i;
    float rate[16] = {};
    for (int64_t j = 0; j < 16 && j < left; j++) rate[j] = a[i + j] * softplus(alpha[i + j] + dt_bias[i + j]);
    store16(decay + i, exp16(load16(rate)), left);
    store16(beta + i, sigmoid16(load16(raw_beta + i, left)), left);
  }
}

// Sums over the key dimension, even and odd indices apart.
struct delta_sums {
  vec16 even[DELTA_VECTORS], odd[DELTA_VECTORS];
};

static inline void clear(vec16* sums) {
  for (int v = 0; v < DELTA_VECTORS; v++) sums[v] = zero16();
}

// Key index i of the block's first token: loads the state, decays it and adds to the prediction.
static inline void enter_key(const delta_block& block, int64_t i, vec16 decay, vec16* prediction) {
#pragma GCC unroll 2
  for (int v = 0; v < DELTA_VECTORS; v++) {
    const float* from = block.state + i * block.state_stride + 16 * v;
    const vec16 state = mul16(load16(from, block.num_columns - 16 * v), decay);
    prediction[v] = fma16(splat16(block.k[i]), state, prediction[v]);
    store16(block.memory + (i * DELTA_VECTORS + v) * 16, state);
  }
}

static inline void enter_block(const delta_block& block, delta_sums& prediction) {
  const vec16 decay = splat16(block.decay[0]);
  delta_sums sums;
  clear(sums.even);
  clear(sums.odd);
  int64_t i = 0;
  for (; i + 2 <= block.head_size; i += 2) {
    enter_key(block, i, decay, sums.even);
    enter_key(block, i + 1, decay, sums.odd);
  }
  if (i < block.head_size) enter_key(block, i, decay, sums.even);
  prediction = sums;
}

// One token's vectors, and the part of the block's memory where its key index 0 begins.
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
  const vec16 key = splat16(token.k[i]), query = splat16(token.q[i]);
  const vec16 next_key = splat16(NEXT ? token.next_k[i] : 0.0f);
#pragma GCC unroll 2
  for (int v = 0; v < DELTA_VECTORS; v++) {
    float* kept = token.memory + (i * DELTA_VECTORS + v) * 16;
    vec16 state = fma16(key, token.change[v], load16(kept));
    output[v] = fma16(query, state, output[v]);
    if constexpr (NEXT) {
      state = mul16(state, token.next_decay);
      prediction[v] = fma16(next_key, state, prediction[v]);
      store16(kept, state);
    } else {
      store16(block.state + i * block.state_stride + 16 * v, state, block.num_columns - 16 * v);
    }
  }
}

template <bool NEXT>
static inline void advance_token(const delta_block& block, int64_t row, delta_sums& prediction) {
  const float* k = block.k + row * block.row_stride;
  delta_token token = {block.q + row * block.row_stride, k, k + block.row_stride, {}, {}, block.memory};
  token.next_decay = splat16(NEXT ? block.decay[(row + 1) * block.gate_stride] : 0.0f);
  const vec16 beta = splat16(block.beta[row * block.gate_stride]);
  for (int v = 0; v < DELTA_VECTORS; v++) {
    const vec16 value = load16(block.v + row * block.row_stride + 16 * v, block.num_columns - 16 * v);
    token.change[v] = mul16(beta, sub16(value, add16(prediction.even[v], prediction.odd[v])));
  }
  delta_sums output, next;  // apart from what has an address, so that they stay in registers
  clear(output.even);
  clear(output.odd);
  clear(next.even);
  clear(next.odd);
  const int64_t size = block.head_size;
  int64_t i = 0;
  for (; i + 2 <= size; i += 2) {
    visit_key<NEXT>(token, i, block, output.even, next.even);
    visit_key<NEXT>(token, i + 1, block, output.odd, next.odd);
  }
  if (i < size) visit_key<NEXT>(token, i, block, output.even, next.even);
  prediction = next;
  for (int v = 0; v < DELTA_VECTORS; v++) {
    store16(block.out + row * block.out_stride + 16 * v, add16(output.even[v], output.odd[v]),
            block.num_columns - 16 * v);
  }
}

// A single token. Its state is read from memory, not from the nearest cache, so whole rows of it pass by in order;
// and as no other token follows, decaying it a second time is cheaper than keeping it.
static inline void predict_key(const delta_block& block, int64_t i, vec16 decay, vec16* prediction) {
#pragma GCC unroll 8
  for (int v = 0; v < STEP_VECTORS; v++) {
    const vec16 state = load16(block.state + i * block.state_stride + 16 * v, block.num_columns - 16 * v);
    prediction[v] = fma16(splat16(block.k[i]), mul16(state, decay), prediction[v]);
  }
}

static inline void update_key(const delta_block& block, int64_t i, vec16 decay, const vec16* change,
                              vec16* output) {
#pragma GCC unroll 8
  for (int v = 0; v < STEP_VECTORS; v++) {
    float* place = block.state + i * block.state_stride + 16 * v;
    const vec16 decayed = mul16(load16(place, block.num_columns - 16 * v), decay);
    const vec16 state = fma16(splat16(block.k[i]), change[v], decayed);
    output[v] = fma16(splat16(block.q[i]), state, output[v]);
    store16(place, state, block.num_columns - 16 * v);
  }
}

static void delta_step(const delta_block& block) {
  const vec16 decay = splat16(block.decay[0]), beta = splat16(block.beta[0]);
  vec16 even[STEP_VECTORS], odd[STEP_VECTORS], change[STEP_VECTORS];
  for (int v = 0; v < STEP_VECTORS; v++) even[v] = odd[v] = zero16();
  const int64_t size = block.head_size, pairs = size / 2 * 2;
  for (int64_t i = 0; i < pairs; i += 2) {
    predict_key(block, i, decay, even);
    predict_key(block, i + 1, decay, odd);
  }
  if (pairs < size) predict_key(block, pairs, decay, even);
  for (int v = 0; v < STEP_VECTORS; v++) {
    const vec16 value = load16(block.v + 16 * v, block.num_columns - 16 * v);
    change[v] = mul16(beta, sub16(value, add16(even[v], odd[v])));
    even[v] = odd[v] = zero16();
  }
  for (int64_t i = 0; i < pairs; i += 2) {
    update_key(block, i, decay, change, even);
    update_key(block, i + 1, decay, change, odd);
  }
  if (pairs < size) update_key(block, pairs, decay, change, even);
  for (int v = 0; v < STEP_VECTORS; v++) {
    store16(block.out + 16 * v, add16(even[v], odd[v]), block.num_columns - 16 * v);
  }
}

static void delta_advance(const delta_block& block) {
  delta_sums prediction;
  enter_block(block, prediction);
  for (int64_t row = 0; row + 1 < block.num_rows; row++) advance_token<true>(block, row, prediction);
  advance_token<false>(block, block.num_rows - 1, prediction);
}
