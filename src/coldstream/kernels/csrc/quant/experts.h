// The routed experts of a batch: down_e(glu(gate_e x, up_e x)) for each (token, expert) pair, kept apart.
//
// Pairs are sorted by expert, so that an expert's weights are read once for all of its rows. The rows of one
// expert are split into jobs of at most 128 rows, a job into tiles of 16; tasks are (job, slice of weight
// rows).
#pragma once

#include <memory>

#include "quant/linear.h"

namespace coldstream {

// The id of a pair that is computed elsewhere: its row of the output is not written.
inline constexpr int32_t not_here = -1;

// How an expert's gate and up become one: biases [experts, gate.num_rows] are added first, if there are any.
struct ExpertGlu {
  Glu unit;
  const float* gate_bias = nullptr;
  const float* up_bias = nullptr;
  int64_t bias_shape[2] = {};        // of each
  std::shared_ptr<void> owner = {};  // of the biases

  bool fits(const Weight& gate) const {
    return gate_bias == nullptr || (bias_shape[0] == gate.num_matrices && bias_shape[1] == gate.num_rows);
  }

  // Of `count` values from number `first` of the biases on; changes gate and up.
  void apply(const QuantKernels& kernels, int64_t first, int64_t count, float* gate, float* up,
             float* out) const {
    if (gate_bias != nullptr) {
      for (int64_t i = 0; i < count; i++) gate[i] += gate_bias[first + i];
      for (int64_t i = 0; i < count; i++) up[i] += up_bias[first + i];
    }
    kernels.glu(unit, gate, up, count, out);
  }
};

struct RoutedExpertsArgs {
  FloatRowsIn x;
  const int32_t* topk_ids;
  int64_t topk_stride;
  int num_experts_per_tok;
  Weight gate, up, down;
  float* out;  // [rows, num_experts_per_tok, down.num_rows]
  int64_t out_row_stride, out_rank_stride;
  ExpertGlu glu;
};

class RoutedExpertsOp : public Op {
 public:
  RoutedExpertsOp(const QuantKernels& kernels, RoutedExpertsArgs args, int capacity);
  const char* name() const override { return "routed_experts"; }
  int num_stages() const override { return tiled_ ? 5 : 4; }
  size_t scratch_bytes() const override;
  size_t shared_bytes() const override { return layout_.total; }
  void run(int stage, int rows, Worker& w) override;
  bool runs_alone(int stage, int rows) const override;
  // The rows of x that a run quantises: those that it needs; or, for several runs over the same rows, the
  // first run all of them and the others none, which reuse its shared memory.
  enum class XRows { needed, all, none };
  void set_quantized_rows(XRows which) { quantized_rows_ = which; }

 private:
  struct Job {
    int32_t expert, first_pair, count, first_tile;
  };
  struct Tile {
    int32_t job, first_pair, count;
  };
  struct Groups {
    int32_t num_jobs, num_tiles, num_pairs;
    int32_t longest;  // pairs of a job
  };
  // Offsets into the shared memory.
  struct Layout {
    size_t groups, jobs, tiles, pairs, ends, hidden, x_rows, h_rows, x_tiles, h_tiles, total;
    size_t x_form_bytes;  // from the tiles of x in one form to those in the next
  };

  Layout make_layout(int capacity) const;
  template <typename T>
  T* at(const Worker& w, size_t offset) const {
    return reinterpret_cast<T*>(w.shared->data() + offset);
  }
  // A job may have more rows than the op if a row names an expert twice.
  bool is_tiled(const Job& j, QuantType weight) const {
    return tiled_ && prefers_tiles(kernels_, weight, j.count);
  }
  // Whether a product with any of the weights may be computed in tiles.
  bool may_be_tiled(int rows) const;
  ActivationRow x_row(const Worker& w, int64_t token, ActivationForm form) const;
  ActivationRow h_row(const Worker& w, int64_t pair) const;
  const ActivationTile* x_tiles(const Worker& w, const Job& j, QuantType weight) const;
  const float* hidden_row(const Worker& w, int64_t pair) const;
  int64_t token_of(const Worker& w, int64_t pair) const;

  void prepare(int rows, Worker& w) const;
  bool has_pair(int64_t row) const;
  void group_pairs(int rows, Worker& w) const;
  void pack_x(Worker& w) const;
  void pack_x_tile(int64_t i, ActivationForm form, Worker& w) const;
  void gate_up(int rows, Worker& w) const;
  void gate_up_slice(const Job& j, int64_t begin, int64_t end, Worker& w) const;
  void quantize_hidden(Worker& w) const;
  void down(int rows, Worker& w) const;
  void down_slice(const Job& j, int64_t begin, int64_t end, Worker& w) const;
  int64_t most_rows(int64_t total, const Worker& w) const;
  template <typename F>
  void for_each_slice(int64_t num_rows, int rows, Worker& w, F&& run_slice) const;

  const QuantKernels& kernels_;
  RoutedExpertsArgs args_;
  bool tiled_;  // whether any job may be computed in tiles
  ActivationForms x_forms_, h_forms_;
  XRows quantized_rows_ = XRows::needed;
  Layout layout_;
};

}  // namespace coldstream
