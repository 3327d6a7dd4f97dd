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
struct RowsView {
  T* data;
  int64_t stride;
  T* row(int64_t r) const { return data + r * stride; }
};
using InputRows = RowsView<const float>;
using OutputRows = RowsView<float>;

constexpr int64_t max_tree_rows = 64;  // of one draft tree
constexpr int64_t min_fork_rows =
    16;  // of a chain, before a row after which its state is left in another slot

// See `BatchRows` in kernels/ops.py. All null without a batch: rows are then chains, one for each state.
struct BatchLayout {
  const int32_t* segments = nullptr;  // [rows]
  const int32_t* tables = nullptr;    // [num_segments, num_blocks], contiguous
  int64_t num_segments = 0, num_blocks = 0;
  const int32_t *indices = nullptr, *parents = nullptr, *kept = nullptr;  // [rows]
};

// Where a row belongs; see `Rows` in kernels/ops.py. `positions` is null for an op that does not need them.
struct RowLayout {
  const int32_t* positions;
  const int32_t* state_ids;
  BatchLayout batch = {};

  bool in_batch() const { return batch.segments != nullptr; }
  // Adjacent rows of one group belong to one sequence.
  int32_t group(int64_t row) const { return in_batch() ? batch.segments[row] : state_ids[row]; }
  bool same_group(int64_t row, int64_t other) const { return group(row) == group(other); }
  bool in_tree(int64_t row) const { return in_batch() && batch.kept[row] >= 0; }
};

// The end of the group of rows that begins at `first`.
int32_t group_end(const RowLayout& layout, int32_t first, int32_t rows);
// The end of the rows that have the state of row `first`, of a group that ends at `end`.
int32_t state_end(const RowLayout& layout, int32_t first, int32_t end);
// Null, or what is wrong with the parents of the rows first … end − 1, one group of a batch.
const char* parents_fault(const RowLayout& layout, int32_t first, int32_t end);

std::unique_ptr<Op> make_add(const FloatKernels& kernels, InputRows x, InputRows y, OutputRows out,
                             int64_t size);
std::unique_ptr<Op> make_glu(const FloatKernels& kernels, const Glu& unit, InputRows gate, InputRows up,
                             OutputRows out, int64_t size);
std::unique_ptr<Op> make_rms_norm(const FloatKernels& kernels, InputRows x, const float* weight, float eps,
                                  OutputRows out, int64_t size);
// C residual streams side by side, after an update, and the norm of each.
struct InjectArguments {
  InputRows streams;    // [T, C · size]; null data: every stream becomes the update
  InputRows injection;  // [T, C]; null data if streams are
  InputRows update;     // [T, size]
  const float* weight;  // [C · size]
  float eps;
  OutputRows total, normed;  // [T, C · size]
  int64_t num_streams, size;
};
std::unique_ptr<Op> make_inject_norm(const FloatKernels& kernels, const InjectArguments& arguments);
// A kernel of x and one number; `out` may be x. `name` is a literal.
using ScalarKernel = void (*)(const float* x, float number, float* out, int64_t n);
std::unique_ptr<Op> make_scalar(const char* name, ScalarKernel kernel, InputRows x, float number,
                                OutputRows out, int64_t size);
// normed and gates [T, C · size], out [T, size]
std::unique_ptr<Op> make_mix_streams(const FloatKernels& kernels, InputRows normed, InputRows gates,
                                     OutputRows out, int64_t num_streams, int64_t size);

struct RopeArguments {
  int64_t num_dims;
  double theta;
  const double* factors;  // [num_dims / 2] of frequencies, copied; nullptr: all 1
  double magnitude;       // of cos and sin
  int32_t block_size;     // positions that have the angles of the first of them
};

// out [T, num_dims / 2, 2]; a negative position fails the run.
std::unique_ptr<Op> make_rope_angles(const RopeArguments& rope, const int32_t* positions, OutputRows out);

struct CombineArguments {
  const float* routed;  // [T, K, E]
  int64_t row_stride, rank_stride;
  int64_t num_experts_per_tok, size;
  InputRows weights;      // [T, K]
  InputRows shared;       // [T, E]; null without a shared expert
  InputRows shared_gate;  // [T, 1]; null for a shared expert of weight 1
  const float* bias;      // [experts, E], of the routed ones; or null
  const int32_t* ids;     // [T, K], contiguous; with a bias, of which each id is one
  OutputRows out;
};
std::unique_ptr<Op> make_combine_experts(const FloatKernels& kernels, const CombineArguments& arguments);

// The k greatest of each row of logits [T, size], of equal ones the lowest ids first, and their logarithms of
// a softmax over the row; NaN unless all logits are finite. ids and log_probs [T, k] are contiguous.
std::unique_ptr<Op> make_top_log_probs(const FloatKernels& kernels, InputRows logits, int64_t size, int64_t k,
                                       int32_t* ids, float* log_probs);

// The blocks of positions that rows see: bit b of word w is block 32 w + b.
struct ChosenBlocks {
  const int32_t* words = nullptr;  // [T, num_words], contiguous; null: all
  int64_t num_words = 0, block_size = 0;

  bool has(int64_t row, int64_t block) const {
    return words[row * num_words + block / 32] >> (block % 32) & 1;
  }
  // Whether one in a chunk of positions.
  bool has_any(int64_t row, int64_t chunk) const {
    const int64_t count = attention_chunk / block_size, first = chunk * count;
    const int32_t* found = words + row * num_words + first / 32;
    if (count < 32) return (found[0] >> first % 32 & ((1 << count) - 1)) != 0;
    for (int64_t word = 0; word < count / 32; word++) {
      if (found[word] != 0) return true;
    }
    return false;
  }
};
// Sizes of blocks: they divide those of attention, and are powers of two.
constexpr int64_t min_chosen_block = 4, max_chosen_block = attention_block;

struct AttentionArguments {
  int64_t capacity;  // rows
  int64_t num_heads, num_kv_heads, head_size, num_rope_pairs;
  InputRows query_gate;  // [T, heads · query_floats()]
  OutputGate output_gate;
  InputRows gate;                         // [T, heads] of kind head, [T, heads · head_size] of kind element
  InputRows key, value;                   // [T, kv heads · head_size]
  const float *q_bias, *k_bias, *v_bias;  // [heads · head_size], [kv heads · head_size]; null without biases
  const float *q_norm, *k_norm;           // [head_size]; both null without norms
  std::vector<float> v_norm;              // ones [head_size]; empty without a norm of values
  const float* sinks;                     // [heads], or null
  float eps, scale;                       // scale: of queries
  InputRows angles;                       // [T, pairs · 2]
  // [pieces, positions, kv heads, row], contiguous; a piece is a sequence's, for a batch a block of
  // attention_chunk positions
  void *k_cache, *v_cache;
  CacheType type;
  int64_t num_pieces, num_positions;
  int64_t window;  // positions that a row sees, its own included; 0: all
  ChosenBlocks chosen;
  RowLayout layout;
  OutputRows out;  // [T, heads · head_size]

  // Per head: its query, then a gate of kind query.
  int64_t query_floats() const { return (output_gate == OutputGate::query ? 2 : 1) * head_size; }
};
std::unique_ptr<Op> make_attention(const FloatKernels& kernels, const AttentionArguments& arguments);

// Raw inputs of rows of trees, contiguous: [num_rows, channels], and [num_rows, value heads] twice.
struct KeptInputs {
  float *qkv = nullptr, *alpha = nullptr, *beta = nullptr;
  int64_t num_rows = 0;
};

struct DeltaNetArguments {
  int64_t capacity;  // rows
  int64_t num_key_heads, num_value_heads, head_size, num_taps;
  InputRows qkv;            // [T, channels]
  InputRows z;              // [T, value heads · head_size]
  InputRows alpha, beta;    // [T, value heads]
  std::vector<float> taps;  // [taps, channels]: one row a tap, the current token's last
  const float *a, *dt_bias, *norm;
  std::vector<int32_t> key_head_ids;
  float eps;
  bool has_sigmoid_gate;  // of the output, in place of SiLU
  float* conv_state;      // [states, taps − 1, channels], contiguous
  float* state;           // [states, value heads, head_size, head_size], contiguous
  int64_t num_states;
  RowLayout layout;
  KeptInputs kept;
  OutputRows out;  // [T, value heads · head_size]
  // Null, or [T]: the rows are one chain of the state layout.state_ids[0], whose inputs are these rows of
  // `kept`. It advances the states; z is not read, and what is written to out means nothing.
  const int32_t* replayed = nullptr;

  int64_t num_channels() const { return (2 * num_key_heads + num_value_heads) * head_size; }
};
std::unique_ptr<Op> make_gated_delta_net(const FloatKernels& kernels, DeltaNetArguments arguments);

struct MoveRowsArguments {
  std::byte* caches[2];  // [blocks, positions, row], contiguous; the second or null
  int64_t num_blocks, num_positions, row_bytes;
  const int32_t* first;    // [1], the index in the sequence that sources count from
  const int32_t* sources;  // [T], ascending, sources[i] >= i: moved to first + i
  const int32_t* table;    // [table_blocks], the sequence's blocks
  int64_t table_blocks;
};
std::unique_ptr<Op> make_move_rows(const MoveRowsArguments& arguments);

struct RouterArguments {
  int64_t capacity;  // rows
  InputRows x;       // [T, weight.num_cols]
  Weight matrix;     // f32, f16 or bf16 [experts, size]
  ChoiceRule rule;
  int64_t num_experts_per_tok;
  int32_t* topk_ids;    // [T, K], contiguous
  float* topk_weights;  // [T, K], contiguous
};
std::unique_ptr<Op> make_router(const FloatKernels& kernels, const RouterArguments& arguments);

}  // namespace coldstream
