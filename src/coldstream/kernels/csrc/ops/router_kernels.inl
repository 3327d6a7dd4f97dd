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

static void softmax_topk(float* logits, int64_t n, int64_t k, int32_t* ids, float* weights) {
  softmax_in_place(logits, n);
  // Insertion into the sorted best so far. Only a greater probability displaces, so ties keep the lower id,
  // and the first k are always taken, so that NaN still gives k distinct ids.
  int64_t count = 0;
  for (int64_t e = 0; e < n; e++) {
    const float p = logits[e];
    if (count == k && !(p > weights[k - 1])) continue;
    int64_t place = count < k ? count++ : k - 1;
    for (; place > 0 && p > weights[place - 1]; place--) {
      weights[place] = weights[place - 1];
      ids[place] = ids[place - 1];
    }
    weights[place] = p;
    ids[place] = static_cast<int32_t>(e);
  }
  const float sum = sum_of(weights, k);
  const float divisor = sum < 6.103515625e-5f ? 6.103515625e-5f : sum;
  for (int64_t i = 0; i < k; i++) weights[i] /= divisor;
}
