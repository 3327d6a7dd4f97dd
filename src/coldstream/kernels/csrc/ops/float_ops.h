// The float32 ops: which rows and which parts of them are a task, over the kernels of the runtime's tier.
// The caller has checked all shapes; ids and positions are checked here, when they are read.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "ops/float_kernels.h"
#include "quant/weight.h"
#include "runtime/op.h"

namespace coldstream {

// Float32 rows with unit stride along the last dimension.
template <typename T>
struct rows_view {
  T* data;
  int64_t stride;
  T* row(int64_t r) const { return data + r * stride; }
};
using input_rows = rows_view<const float>;
using output_rows = rows_view<float>;

constexpr int64_t MAX_TREE_ROWS = 64;  // of one draft tree
constexpr int64_t MIN_FORK_ROWS =
    16;  // of a chain, before a row after which its state is left in another slot

// See `BatchRows` in kernels/ops.py. All null without a batch: rows are then chains, one for each state.
struct batch_layout {
  const int32_t* segments = nullptr;  // [rows]
  const int32_t* tables = nullptr;    // [num_segments, num_blocks], contiguous
  int64_t num_segments = 0, num_blocks = 0;
  const int32_t *indices = nullptr, *parents = nullptr, *kept = nullptr;  // [rows]
};

// Where a row belongs; see `Rows` in kernels/ops.py. `positions` is null for an op that does not need them.
struct row_layout {
  const int32_t* positions;
  const int32_t* state_ids;
  batch_layout batch = {};

  bool in_batch() const { return batch.segments != nullptr; }
  // Adjacent rows of one group belong to one sequence.
  int32_t group(int64_t row) const { return in_batch() ? batch.segments[row] : state_ids[row]; }
  bool same_group(int64_t row, int64_t other) const { return group(row) == group(other); }
  bool in_tree(int64_t row) const { return in_batch() && batch.kept[row] >= 0; }
};

// The end of the group of rows that begins at `first`.
int32_t group_end(const row_layout& layout, int32_t first, int32_t rows);
// The end of the rows that have the state of row `first`, of a group that ends at `end`.
int32_t state_end(const row_layout& layout, int32_t first, int32_t end);
// Null, or what is wrong with the parents of the rows first … end − 1, one group of a batch.
const char* parents_fault(const row_layout& layout, int32_t first, int32_t end);

std::unique_ptr<op> make_add(const float_kernels& kernels, input_rows x, input_rows y, output_rows out,
                             int64_t size);
std::unique_ptr<op> make_swiglu(const float_kernels& kernels, input_rows gate, input_rows up, output_rows out,
                                int64_t size);
std::unique_ptr<op> make_rms_norm(const float_kernels& kernels, input_rows x, const float* weight, float eps,
                                  output_rows out, int64_t size);
struct rope_arguments {
  int64_t num_dims;
  double theta;
  const double* factors;  // [num_dims / 2] of frequencies, copied; nullptr: all 1
  double magnitude;       // of cos and sin
};

// out [T, num_dims / 2, 2]; a negative position fails the run.
std::unique_ptr<op> make_rope_angles(const rope_arguments& rope, const int32_t* positions, output_rows out);

struct combine_arguments {
  const float* routed;  // [T, K, E]
  int64_t row_stride, rank_stride;
  int64_t num_experts_per_tok, size;
  input_rows weights;      // [T, K]
  input_rows shared;       // [T, E]; null without a shared expert
  input_rows shared_gate;  // [T, 1]; likewise
  output_rows out;
};
std::unique_ptr<op> make_combine_experts(const float_kernels& kernels, const combine_arguments& arguments);

// The k greatest of each row of logits [T, size], of equal ones the lowest ids first, and their logarithms of
// a softmax over the row; NaN unless all logits are finite. ids and log_probs [T, k] are contiguous.
std::unique_ptr<op> make_top_log_probs(const float_kernels& kernels, input_rows logits, int64_t size,
                                       int64_t k, int32_t* ids, float* log_probs);

struct attention_arguments {
  int64_t capacity;  // rows
  int64_t num_heads, num_kv_heads, head_size, num_rope_pairs;
  input_rows query_gate;  // [T, heads · query_floats()]
  bool has_gate;
  input_rows key, value;  // [T, kv heads · head_size]
  const float *q_norm, *k_norm;
  float eps;
  input_rows angles;  // [T, pairs · 2]
  // [pieces, positions, kv heads, row], contiguous; a piece is a sequence's, for a batch a block of
  // ATTENTION_CHUNK positions
  void *k_cache, *v_cache;
  cache_type type;
  int64_t num_pieces, num_positions;
  int64_t window;  // positions that a row sees, its own included; 0: all
  row_layout layout;
  output_rows out;  // [T, heads · head_size]

  // Per head: its query, then its gate if there is one.
  int64_t query_floats() const { return (has_gate ? 2 : 1) * head_size; }
};
std::unique_ptr<op> make_attention(const float_kernels& kernels, const attention_arguments& arguments);

// Raw inputs of rows of trees, contiguous: [num_rows, channels], and [num_rows, value heads] twice.
struct kept_inputs {
  float *qkv = nullptr, *alpha = nullptr, *beta = nullptr;
  int64_t num_rows = 0;
};

struct delta_net_arguments {
  int64_t capacity;  // rows
  int64_t num_key_heads, num_value_heads, head_size, num_taps;
  input_rows qkv;           // [T, channels]
  input_rows z;             // [T, value heads · head_size]
  input_rows alpha, beta;   // [T, value heads]
  std::vector<float> taps;  // [taps, channels]: one row a tap, the current token's last
  const float *a, *dt_bias, *norm;
  std::vector<int32_t> key_head_ids;
  float eps;
  float* conv_state;  // [states, taps − 1, channels], contiguous
  float* state;       // [states, value heads, head_size, head_size], contiguous
  int64_t num_states;
  row_layout layout;
  kept_inputs kept;
  output_rows out;  // [T, value heads · head_size]
  // Null, or [T]: the rows are one chain of the state layout.state_ids[0], whose inputs are these rows of
  // `kept`. It advances the states; z is not read, and what is written to out means nothing.
  const int32_t* replayed = nullptr;

  int64_t num_channels() const { return (2 * num_key_heads + num_value_heads) * head_size; }
};
std::unique_ptr<op> make_gated_delta_net(const float_kernels& kernels, delta_net_arguments arguments);

struct move_rows_arguments {
  std::byte* caches[2];  // [blocks, positions, row], contiguous
  int64_t num_blocks, num_positions, row_bytes;
  const int32_t* first;    // [1], the index in the sequence that sources count from
  const int32_t* sources;  // [T], ascending, sources[i] >= i: moved to first + i
  const int32_t* table;    // [table_blocks], the sequence's blocks
  int64_t table_blocks;
};
std::unique_ptr<op> make_move_rows(const move_rows_arguments& arguments);

struct router_arguments {
  int64_t capacity;  // rows
  input_rows x;      // [T, weight.num_cols]
  weight matrix;     // f32, f16 or bf16 [experts, size]
  int64_t num_experts_per_tok;
  int32_t* topk_ids;    // [T, K], contiguous
  float* topk_weights;  // [T, K], contiguous
};
std::unique_ptr<op> make_router(const float_kernels& kernels, const router_arguments& arguments);

}  // namespace coldstream
