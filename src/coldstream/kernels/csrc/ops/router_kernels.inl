// Products with float weights, and the choice of experts.

// Sixteen inputs (or, at the end of a row, `left`) of R rows of x and E rows of the matrix.
template <bool whole, int R, int E, typename T>
static inline void product_step(const float* x, int64_t x_stride, const T* weight, int64_t n, int64_t left,
                                Vec16 (&sums)[R][E]) {
  Vec16 inputs[R];
#pragma GCC unroll 4
  for (int r = 0; r < R; r++) inputs[r] = whole ? load16(x + r * x_stride) : load16(x + r * x_stride, left);
#pragma GCC unroll 4
  for (int e = 0; e < E; e++) {
    const Vec16 weights = whole ? load16(weight + e * n) : load16(weight + e * n, left);
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) sums[r][e] = fma16(inputs[r], weights, sums[r][e]);
  }
}

template <int R, int E, typename T>
static inline void product_tile(const float* x, int64_t x_stride, const T* weight, float* out,
                                int64_t out_stride, int64_t n) {
  Vec16 sums[R][E];
#pragma GCC unroll 4
  for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
    for (int e = 0; e < E; e++) sums[r][e] = zero16();
  }
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) product_step<true>(x + i, x_stride, weight + i, n, 16, sums);
  if (i < n) product_step<false>(x + i, x_stride, weight + i, n, n - i, sums);
#pragma GCC unroll 4
  for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
    for (int e = 0; e < E; e++) out[r * out_stride + e] = sum16(sums[r][e]);
  }
}

template <int R, typename T>
static void product_rows(const float* x, int64_t x_stride, const T* weight, int64_t num_outputs, float* out,
                         int64_t out_stride, int64_t n) {
  constexpr int E = tile_rows / 2;
  int64_t e = 0;
  for (; e + E <= num_outputs; e += E) {
    product_tile<R, E>(x, x_stride, weight + e * n, out + e, out_stride, n);
  }
  for (; e < num_outputs; e++) product_tile<R, 1>(x, x_stride, weight + e * n, out + e, out_stride, n);
}

template <typename T>
static void product(const float* x, int64_t x_stride, int64_t num_rows, const T* weight, int64_t num_outputs,
                    float* out, int64_t out_stride, int64_t n) {
  constexpr int R = tile_rows / 2;
  int64_t r = 0;
  for (; r + R <= num_rows; r += R) {
    product_rows<R>(x + r * x_stride, x_stride, weight, num_outputs, out + r * out_stride, out_stride, n);
  }
  for (; r < num_rows; r++) {
    product_rows<1>(x + r * x_stride, x_stride, weight, num_outputs, out + r * out_stride, out_stride, n);
  }
}

static inline float sum_of(const float* x, int64_t n) {
  Vec16 sum = zero16();
  for (int64_t i = 0; i < n; i += 16) sum = add16(sum, load16(x + i, n - i));
  return sum16(sum);
}

static void softmax_in_place(float* x, int64_t n) {
  Vec16 greatest = splat16(-__builtin_inff());
  for (int64_t i = 0; i < n; i += 16) {
    greatest = max16(greatest, keep16(load16(x + i, n - i), n - i, -__builtin_inff()));
  }
  const Vec16 maximum = splat16(greatest16(greatest));
  for (int64_t i = 0; i < n; i += 16) store16(x + i, exp16(sub16(load16(x + i, n - i), maximum)), n - i);
  const Vec16 sum = splat16(sum_of(x, n));
  for (int64_t i = 0; i < n; i += 16) store16(x + i, div16(load16(x + i, n - i), sum), n - i);
}

static float sum_exp(const float* x, float maximum, int64_t n) {
  Vec16 sum = zero16();
  for (int64_t i = 0; i < n; i += 16) {
    sum = add16(sum, keep16(exp16(sub16(load16(x + i, n - i), splat16(maximum))), n - i, 0.0f));
  }
  return sum16(sum);
}

static void gate_in_place(Gating gating, float* x, int64_t n) {
  switch (gating) {
    case Gating::softmax:
      softmax_in_place(x, n);
      break;
    case Gating::sigmoid:
      for (int64_t i = 0; i < n; i += 16) store16(x + i, sigmoid16(load16(x + i, n - i)), n - i);
      break;
    case Gating::softmax_of_chosen:
      break;
    case Gating::root_of_softplus:
      for (int64_t i = 0; i < n; i += 16) store16(x + i, softplus16(load16(x + i, n - i)), n - i);
      for (int64_t i = 0; i < n; i++) x[i] = __builtin_sqrtf(x[i]);
      break;
  }
}

// The k greatest of x [n] in order, and their ids: insertion into the sorted best so far. Only a greater one
// displaces, so ties keep the lower id, and the first k are always taken, so that NaN still gives k distinct
// ids.
static void greatest(const float* x, int64_t n, int64_t k, int32_t* ids, float* values) {
  int64_t count = 0;
  for (int64_t e = 0; e < n; e++) {
    const float p = x[e];
    if (count == k && !(p > values[k - 1])) continue;
    int64_t place = count < k ? count++ : k - 1;
    for (; place > 0 && p > values[place - 1]; place--) {
      values[place] = values[place - 1];
      ids[place] = ids[place - 1];
    }
    values[place] = p;
    ids[place] = static_cast<int32_t>(e);
  }
}

// Leaves the scores of the experts in the best groups (ties: lowest group). totals: memory for a float of
// each group.
static void keep_best_groups(const ChoiceRule& rule, float* scores, int64_t n, float* totals) {
  const int64_t size = n / rule.num_groups;
  for (int64_t g = 0; g < rule.num_groups; g++) {
    float best = -__builtin_inff(), second = best;
    for (int64_t i = g * size; i < (g + 1) * size; i++) {
      second = scores[i] > best ? best : scores[i] > second ? scores[i] : second;
      best = scores[i] > best ? scores[i] : best;
    }
    totals[g] = best + second;
  }
  for (int64_t g = 0; g < rule.num_groups; g++) {
    int64_t place = 0;  // how many groups are better
    for (int64_t h = 0; h < rule.num_groups; h++) {
      place += totals[h] > totals[g] || (totals[h] == totals[g] && h < g);
    }
    if (place < rule.num_used_groups) continue;
    for (int64_t i = g * size; i < (g + 1) * size; i++) scores[i] = -__builtin_inff();
  }
}

static void choose_experts(const ChoiceRule& rule, float* logits, float* scores, int64_t n, int64_t k,
                           int32_t* ids, float* weights) {
  if (rule.bias != nullptr) add(logits, rule.bias, logits, n);
  gate_in_place(rule.gating, logits, n);
  if (!rule.has_scores()) {
    greatest(logits, n, k, ids, weights);
  } else {
    if (rule.selection_bias != nullptr) {
      add(logits, rule.selection_bias, scores, n);
    } else {
      memcpy(scores, logits, n * sizeof(float));
    }
    if (rule.num_groups > 1) keep_best_groups(rule, scores, n, scores + n);
    greatest(scores, n, k, ids, weights);
    for (int64_t i = 0; i < k; i++) weights[i] = logits[ids[i]];
  }
  if (rule.gating == Gating::softmax_of_chosen) {
    softmax_in_place(weights, k);
  } else if (rule.is_normalised) {
    const float divisor = sum_of(weights, k) + 1e-20f;
    for (int64_t i = 0; i < k; i++) weights[i] /= divisor;
  }
  for (int64_t i = 0; i < k; i++) weights[i] *= rule.scale;
  if (rule.expert_scale == nullptr) return;
  for (int64_t i = 0; i < k; i++) weights[i] *= rule.expert_scale[ids[i]];
}
