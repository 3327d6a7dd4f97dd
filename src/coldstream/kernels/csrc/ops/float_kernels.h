// The float32 kernels of one tier: functions over plain pointers, without threads. float_kernels.inl is
// compiled once per tier; docs/arithmetic.md defines each to the bit. Inline functions are static, as the
// linker could otherwise use one tier's copy for all.
#pragma once

#include <stdint.h>

#include "glu.h"
#include "tier.h"

namespace coldstream {

struct Float16 {
  uint16_t bits;
};

struct Bfloat16 {
  uint16_t bits;
};

// Of the scores of one query.
struct SoftmaxState {
  float maximum, sum;
};

// Softmax-weighted values of one query over some of the positions, unnormalised: `head_floats` accumulators,
// then the state. Rows of these lie `attention_row_floats(head_size)` apart.
static inline int64_t head_floats(int64_t head_size) { return (head_size + 15) / 16 * 16; }
static inline int64_t attention_row_floats(int64_t head_size) { return head_floats(head_size) + 16; }
static inline SoftmaxState* softmax_state(float* row, int64_t head_size) {
  return reinterpret_cast<SoftmaxState*>(row + head_floats(head_size));
}

constexpr int64_t attention_block = 64;   // positions that share one running maximum
constexpr int64_t attention_chunk = 256;  // positions accumulated apart from the others
constexpr int64_t chunk_words = attention_chunk / attention_block;
constexpr int64_t attention_rows = 64;  // most rows whose scores and weights are in memory at a time

// Consecutive tokens of one sequence, the query heads of neighbouring key/value heads, and one chunk of
// positions.
struct AttentionChunk {
  const void* q;  // [num_tokens, group, query_ints(head_size)], prepared for the type of the caches
  int64_t num_tokens, group, head_size, num_kv_heads;
  int64_t first_position;  // of the first token
  int64_t begin;           // of the chunk
  int64_t window;          // positions that a token sees, its own included; 0: all
  // Null, or [num_tokens, chunk_words]: bits of the positions that a token sees, whatever the window.
  const uint64_t* chosen;
  const void* keys;  // of position `begin`, as the type of the caches has them
  const void* values;
  int64_t position_stride, row_elements;  // in elements: from a position to the next, from a head to the next
  float* rows;    // [num_tokens, group] as above; tokens that see nothing of the chunk are left alone
  float* memory;  // attention_memory_floats(…)
  int64_t q_stride, rows_stride;  // from a key/value head to the next, in elements of `q` and in floats
};

// The types of caches that there are kernels for: `CacheLayout` of kernels/attention/cache_layout.py. A row
// of an integer type has codes, then a scale, then zeros up to a multiple of row_alignment bytes.
enum class CacheType : int { f16 = 0, f32 = 1, i16 = 2, i8 = 3, i4 = 4, i3 = 5 };
constexpr int num_cache_types = 6, num_integer_cache_types = 4;
constexpr int64_t row_alignment = 16, largest_integer_head = 512;

// Bits of a value of an integer type; 0 for other types.
static inline int64_t code_bits(CacheType type) {
  constexpr int64_t bits[num_cache_types] = {0, 0, 16, 8, 4, 3};
  return bits[static_cast<int>(type)];
}

// Whether an integer type has heads of so many values.
static inline bool holds_integers(CacheType type, int64_t head_size) {
  return head_size <= largest_integer_head && head_size % (code_bits(type) < 8 ? 32 : 16) == 0;
}

// Elements of one head's keys or values at one position.
static inline int64_t cache_row_elements(CacheType type, int64_t head_size) {
  const int64_t bytes = head_size * code_bits(type) / 8 + static_cast<int64_t>(sizeof(float));
  return code_bits(type) == 0 ? head_size : (bytes + row_alignment - 1) / row_alignment * row_alignment;
}

// Operands, a scale, a tier's further values, and padding.
static inline int64_t integer_query_ints(int64_t head_size) { return head_size + 16; }

// `OutputGate` of kernels/ops.py, and the gates of one head: a number for each of its values, or one for all.
enum class OutputGate : int { none, query, head, element };
struct HeadGate {
  OutputGate kind;
  const float* values;  // null for OutputGate::none
};

// What depends on the type of the caches. `head` is one head's float32 numbers, which may be changed.
struct CacheKernels {
  void (*prepare_query)(float* head, int32_t* query, int64_t head_size);
  void (*store)(float* head, void* row, int64_t head_size);
  void (*attend)(const AttentionChunk& chunk);
  // out = total / sum · sigmoid or softplus of the gate, rotated back in between if the type is rotated;
  // without the last factor if there is no gate. out may be `total`.
  void (*finish)(const float* total, float sum, HeadGate gate, float* out, int64_t head_size);
};

static inline int64_t attention_memory_floats(CacheType type, int64_t num_rows, int64_t head_size) {
  const int64_t of_rows = 2 * attention_block + 2;  // scores, weights, a factor and a scale
  // The rows of a block of a packed type, once they are bytes.
  const bool is_packed = code_bits(type) > 0 && code_bits(type) < 8;
  const int64_t unpacked = is_packed ? cache_row_elements(CacheType::i8, head_size) / sizeof(float) : 0;
  const int64_t rows_at_once = num_rows < attention_rows ? num_rows : attention_rows;
  return attention_block * (head_size + head_floats(head_size) + 2 + unpacked) + of_rows * rows_at_once;
}

// Tokens of one sequence, and the keys of some blocks that an indexer chooses from.
struct BlockScores {
  const float* queries;  // [num_tokens, num_heads, size]
  int64_t num_tokens, num_heads, size;
  const void* keys;       // of `count` blocks, at most attention_block
  int64_t stride, count;  // stride: in elements
  float* out;             // [num_tokens, count], rows out_stride apart
  int64_t out_stride;
  float* memory;  // block_score_floats(…)
};

static inline int64_t block_score_floats(int64_t num_tokens, int64_t num_heads, int64_t size) {
  return attention_block * (size + num_tokens * num_heads);
}

// What depends on the type of an indexer's cache: f16 or f32, with rows of `size` elements.
struct IndexKernels {
  void (*store)(float* values, void* row, int64_t size);
  // out = Σ_i rows[i] / count, i ascending, for a count that is a power of two
  void (*average)(const void* const* rows, int64_t count, float* out, int64_t size);
  // out[token, block] = Σ_h max(query_h · key, 0), h ascending
  void (*score)(const BlockScores& scores);
};
constexpr int num_index_types = 2;  // the first types of caches

// Consecutive tokens of one sequence and a block of value columns of one value head; row strides in floats.
struct DeltaBlock {
  int64_t num_rows, head_size, num_columns;
  const float *q, *k;  // normalised, q scaled
  const float* v;      // at the block's first column
  int64_t row_stride;  // of q, k and v
  const float *decay, *beta;
  int64_t gate_stride;
  const float* source;   // the state before the tokens, [head_size, …] at the block's first column
  float* state;          // where it is stored after them; may be `source`
  int64_t state_stride;  // of both
  float* out;
  int64_t out_stride;
  float* memory;  // head_size * delta_columns
  // Of the block that this worker is likely to take next, or null: it is read ahead by a step.
  const float* next_state;

  // `count` of its tokens, from number `first` on.
  DeltaBlock part(int64_t first, int64_t count) const {
    DeltaBlock found = *this;
    found.num_rows = count;
    found.q += first * row_stride;
    found.k += first * row_stride;
    found.v += first * row_stride;
    found.decay += first * gate_stride;
    found.beta += first * gate_stride;
    found.out += first * out_stride;
    return found;
  }
};

// By the numbers of `expert_gating_func` in files.
enum class Gating { softmax = 1, sigmoid = 2, softmax_of_chosen = 3, root_of_softplus = 4 };

// How logits of n experts become a choice: `ChoiceRule` of ops.py. A bias may be null.
struct ChoiceRule {
  Gating gating = Gating::softmax;
  const float* bias = nullptr;            // [n], of the logits
  const float* selection_bias = nullptr;  // [n]
  const float* expert_scale = nullptr;    // [n], or null for 1
  bool is_normalised = true;
  float scale = 1.0f;
  int64_t num_groups = 1, num_used_groups = 1;

  // Whether experts are chosen by other numbers than those that become weights.
  bool has_scores() const { return selection_bias != nullptr || num_groups > 1; }
};

// Biases of the outputs of a token's experts.
struct ExpertBias {
  const float* values;  // by expert, `stride` apart; null: there are none
  int64_t stride;
  const int32_t* ids;  // by rank
};

struct FloatKernels {
  void (*add)(const float* x, const float* y, float* out, int64_t n);
  void (*glu)(const Glu& unit, const float* gate, const float* up, float* out, int64_t n);
  void (*rms_norm)(const float* x, const float* weight, float eps, float* out, int64_t n);
  // out = rms_norm(x) · silu(z), or · sigmoid(z)
  void (*gated_rms_norm)(const float* x, const float* weight, float eps, const float* z, bool is_sigmoid,
                         float* out, int64_t n);
  // x ← x / sqrt(Σx² + eps) · scale
  void (*l2_norm)(float* x, float eps, float scale, int64_t n);
  // out = s + sigmoid(*gate) · shared with s = Σ_k weights[k] · routed[k · stride], k ascending; s + shared
  // if gate is null, s alone if shared is null too; the bias of rank k's expert is first added to `routed`
  void (*combine)(const float* routed, int64_t stride, const float* weights, int64_t k, const float* shared,
                  const float* gate, const ExpertBias& bias, float* out, int64_t n);

  // out = x + 2 · sigmoid(*logit / divisor) · update
  void (*inject)(const float* x, const float* update, const float* logit, float divisor, float* out,
                 int64_t n);
  // out = sigmoid(logit) · x
  void (*open_gate)(const float* x, float logit, float* out, int64_t n);
  // out = silu(x / divisor)
  void (*scaled_silu)(const float* x, float divisor, float* out, int64_t n);
  // out = x · factor
  void (*scale)(const float* x, float factor, float* out, int64_t n);
  // out = cap · tanh(x / cap)
  void (*softcap)(const float* x, float cap, float* out, int64_t n);
  // out = Σ_c sigmoid(gates[c · stride]) · x[c · stride] / count, c ascending below count
  void (*mix_streams)(const float* x, const float* gates, int64_t stride, int64_t count, float* out,
                      int64_t n);

  // Rotates pairs (i, i + num_pairs) by angles [num_pairs, 2] of cos and sin, then multiplies all by scale.
  void (*rope)(float* head, const float* angles, int64_t num_pairs, float scale, int64_t head_size);
  CacheKernels caches[num_cache_types];
  IndexKernels index[num_index_types];
  // Adds `row`, of attention_row_floats, to a total of head_size accumulators and its state.
  void (*attend_merge)(float* total, SoftmaxState* state, const float* row, int64_t head_size);
  // Adds a logit without a value to a total.
  void (*attend_sink)(float* total, SoftmaxState* state, float sink, int64_t head_size);

  // out = silu(Σ_j taps[j · tap_stride] · inputs[j]), j ascending
  void (*convolve)(const float* const* inputs, const float* taps, int64_t tap_stride, int64_t num_taps,
                   float* out, int64_t n);
  // decay = exp(a · softplus(alpha + dt_bias)), beta = sigmoid(raw_beta)
  void (*delta_gates)(const float* alpha, const float* raw_beta, const float* a, const float* dt_bias,
                      float* decay, float* beta, int64_t n);
  void (*delta_advance)(const DeltaBlock& block);
  int64_t delta_columns;  // the most columns of a block
  // The same bits for a block of one row whose source is its state, without its memory.
  void (*delta_step)(const DeltaBlock& block);
  int64_t step_columns;

  // out[r, e] = Σ x[r] · weight[e] for a matrix of rows of n elements
  void (*product_f32)(const float* x, int64_t x_stride, int64_t num_rows, const float* weight,
                      int64_t num_outputs, float* out, int64_t out_stride, int64_t n);
  void (*product_f16)(const float* x, int64_t x_stride, int64_t num_rows, const Float16* weight,
                      int64_t num_outputs, float* out, int64_t out_stride, int64_t n);
  void (*product_bf16)(const float* x, int64_t x_stride, int64_t num_rows, const Bfloat16* weight,
                       int64_t num_outputs, float* out, int64_t out_stride, int64_t n);
  // Σ exp(x − maximum)
  float (*sum_exp)(const float* x, float maximum, int64_t n);
  // The k experts that a rule chooses by logits [n], which it changes. scores: memory for n + num_groups
  // floats if the rule has_scores.
  void (*choose_experts)(const ChoiceRule& rule, float* logits, float* scores, int64_t n, int64_t k,
                         int32_t* ids, float* weights);
};

extern const FloatKernels float_kernels_generic;
extern const FloatKernels float_kernels_avx2;  // exist on x86-64 only
extern const FloatKernels float_kernels_avx512;
extern const FloatKernels float_kernels_neon;  // exists on AArch64 only
extern const CacheKernels integer_cache_kernels_amx[num_integer_cache_types];

const FloatKernels& float_kernels_for(Tier t);

}  // namespace coldstream
