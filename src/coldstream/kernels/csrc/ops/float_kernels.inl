// Row kernels, written once over Vec16 and compiled per tier. Sums over a row keep sixteen accumulators, one
// a lane.

static inline Vec16 exp16(Vec16 x) {
  x = max16(splat16(-87.33654f), x);  // in this order a NaN stays one
  x = min16(splat16(88.37626f), x);
  const Vec16 magic = splat16(0x1.8p23f);  // adding it rounds to an integer, which the low bits then hold
  const Vec16 shifted = add16(mul16(x, splat16(1.44269504088896341f)), magic);
  const Vec16 n = sub16(shifted, magic);
  Vec16 t = fma16(n, splat16(-0.693359375f), x);
  t = fma16(n, splat16(2.12194440e-4f), t);
  Vec16 y = splat16(1.0f / 5040.0f);
  y = fma16(y, t, splat16(1.0f / 720.0f));
  y = fma16(y, t, splat16(1.0f / 120.0f));
  y = fma16(y, t, splat16(1.0f / 24.0f));
  y = fma16(y, t, splat16(1.0f / 6.0f));
  y = fma16(y, t, splat16(0.5f));
  y = fma16(y, t, splat16(1.0f));
  y = fma16(y, t, splat16(1.0f));
  return mul16(y, pow2_16(shifted));
}

static inline Vec16 sigmoid16(Vec16 x) {
  const Vec16 one = splat16(1.0f);
  return div16(one, add16(one, exp16(sub16(zero16(), x))));
}

static inline Vec16 silu16(Vec16 x) { return mul16(x, sigmoid16(x)); }

static inline Vec16 softplus16(Vec16 x) {
  const Vec16 t = exp16(min16(x, sub16(zero16(), x)));
  const Vec16 s = div16(t, add16(splat16(2.0f), t));
  const Vec16 z = mul16(s, s);
  Vec16 y = splat16(1.0f / 15.0f);
  y = fma16(y, z, splat16(1.0f / 13.0f));
  y = fma16(y, z, splat16(1.0f / 11.0f));
  y = fma16(y, z, splat16(1.0f / 9.0f));
  y = fma16(y, z, splat16(1.0f / 7.0f));
  y = fma16(y, z, splat16(1.0f / 5.0f));
  y = fma16(y, z, splat16(1.0f / 3.0f));
  y = fma16(y, z, splat16(1.0f));
  return add16(max16(x, zero16()), mul16(add16(s, s), y));
}

// Any lane of a vector of equal lanes.
static inline float first_lane(Vec16 v) {
  float lanes[16];
  store16(lanes, v);
  return lanes[0];
}

static inline float exp_of(float x) { return first_lane(exp16(splat16(x))); }

static inline float sum_of_squares(const float* x, int64_t n) {
  Vec16 sum = zero16();
  for (int64_t i = 0; i < n; i += 16) {
    const Vec16 v = load16(x + i, n - i);
    sum = fma16(v, v, sum);
  }
  return sum16(sum);
}

static inline float rms_scale(const float* x, float eps, int64_t n) {
  return 1.0f / __builtin_sqrtf(sum_of_squares(x, n) / static_cast<float>(n) + eps);
}

static void add(const float* x, const float* y, float* out, int64_t n) {
  for (int64_t i = 0; i < n; i += 16) {
    store16(out + i, add16(load16(x + i, n - i), load16(y + i, n - i)), n - i);
  }
}

static inline Vec16 gelu16(Vec16 x) {
  const Vec16 factor = fma16(mul16(x, x), splat16(gelu_cubic), splat16(gelu_linear));
  return mul16(x, sigmoid16(mul16(x, factor)));
}

static inline Vec16 clamped_swiglu16(Vec16 gate, Vec16 up, float limit) {
  gate = min16(splat16(limit), gate);  // in this order a NaN stays one
  up = max16(splat16(-limit), min16(splat16(limit), up));
  const Vec16 gated = mul16(gate, sigmoid16(mul16(gate, splat16(clamped_alpha))));
  return mul16(gated, add16(up, splat16(1.0f)));
}

static void glu(const Glu& unit, const float* gate, const float* up, float* out, int64_t n) {
  for (int64_t i = 0; i < n; i += 16) {
    const Vec16 g = load16(gate + i, n - i), u = load16(up + i, n - i);
    Vec16 y;
    if (unit.kind == GluKind::clamped_swiglu) {
      y = clamped_swiglu16(g, u, unit.limit);
    } else {
      y = mul16(unit.kind == GluKind::geglu ? gelu16(g) : silu16(g), u);
    }
    store16(out + i, y, n - i);
  }
}

static void rms_norm(const float* x, const float* weight, float eps, float* out, int64_t n) {
  const Vec16 scale = splat16(rms_scale(x, eps, n));
  for (int64_t i = 0; i < n; i += 16) {
    store16(out + i, mul16(mul16(load16(x + i, n - i), scale), load16(weight + i, n - i)), n - i);
  }
}

static void gated_rms_norm(const float* x, const float* weight, float eps, const float* z, bool is_sigmoid,
                           float* out, int64_t n) {
  const Vec16 scale = splat16(rms_scale(x, eps, n));
  for (int64_t i = 0; i < n; i += 16) {
    const Vec16 normed = mul16(mul16(load16(x + i, n - i), scale), load16(weight + i, n - i));
    const Vec16 gate = load16(z + i, n - i);
    store16(out + i, mul16(normed, is_sigmoid ? sigmoid16(gate) : silu16(gate)), n - i);
  }
}

static void l2_norm(float* x, float eps, float scale, int64_t n) {
  const Vec16 inverse = splat16(1.0f / __builtin_sqrtf(sum_of_squares(x, n) + eps));
  const Vec16 factor = splat16(scale);
  for (int64_t i = 0; i < n; i += 16) {
    store16(x + i, mul16(mul16(load16(x + i, n - i), inverse), factor), n - i);
  }
}

static void inject(const float* x, const float* update, const float* logit, float divisor, float* out,
                   int64_t n) {
  const Vec16 weight = mul16(splat16(2.0f), sigmoid16(splat16(*logit / divisor)));
  for (int64_t i = 0; i < n; i += 16) {
    store16(out + i, fma16(weight, load16(update + i, n - i), load16(x + i, n - i)), n - i);
  }
}

static void open_gate(const float* x, float logit, float* out, int64_t n) {
  const Vec16 gate = sigmoid16(splat16(logit));
  for (int64_t i = 0; i < n; i += 16) store16(out + i, mul16(gate, load16(x + i, n - i)), n - i);
}

static void scaled_silu(const float* x, float divisor, float* out, int64_t n) {
  for (int64_t i = 0; i < n; i += 16) {
    store16(out + i, silu16(div16(load16(x + i, n - i), splat16(divisor))), n - i);
  }
}

static void scale(const float* x, float factor, float* out, int64_t n) {
  for (int64_t i = 0; i < n; i += 16) {
    store16(out + i, mul16(load16(x + i, n - i), splat16(factor)), n - i);
  }
}

static void softcap(const float* x, float cap, float* out, int64_t n) {
  const Vec16 steepness = splat16(2.0f / cap), span = splat16(2.0f * cap), least = splat16(-cap);
  for (int64_t i = 0; i < n; i += 16) {
    store16(out + i, fma16(span, sigmoid16(mul16(load16(x + i, n - i), steepness)), least), n - i);
  }
}

static void mix_streams(const float* x, const float* gates, int64_t stride, int64_t count, float* out,
                        int64_t n) {
  const Vec16 divisor = splat16(static_cast<float>(count));
  for (int64_t i = 0; i < n; i += 16) {
    Vec16 sum = zero16();
    for (int64_t c = 0; c < count; c++) {
      const int64_t at = c * stride + i;
      sum = fma16(sigmoid16(load16(gates + at, n - i)), load16(x + at, n - i), sum);
    }
    store16(out + i, div16(sum, divisor), n - i);
  }
}

template <bool has_bias>
static inline void combine(const float* routed, int64_t stride, const float* weights, int64_t k,
                           const float* shared, const float* gate, const ExpertBias& bias, float* out,
                           int64_t n) {
  const Vec16 shared_weight = gate == nullptr ? splat16(1.0f) : sigmoid16(splat16(*gate));
  for (int64_t i = 0; i < n; i += 16) {
    Vec16 sum = zero16();
    for (int64_t j = 0; j < k; j++) {
      Vec16 y = load16(routed + j * stride + i, n - i);
      if constexpr (has_bias) y = add16(y, load16(bias.values + bias.ids[j] * bias.stride + i, n - i));
      sum = fma16(splat16(weights[j]), y, sum);
    }
    if (shared != nullptr) sum = fma16(shared_weight, load16(shared + i, n - i), sum);
    store16(out + i, sum, n - i);
  }
}

static void combine_experts(const float* routed, int64_t stride, const float* weights, int64_t k,
                            const float* shared, const float* gate, const ExpertBias& bias, float* out,
                            int64_t n) {
  if (bias.values == nullptr)
    combine<false>(routed, stride, weights, k, shared, gate, bias, out, n);
  else
    combine<true>(routed, stride, weights, k, shared, gate, bias, out, n);
}
