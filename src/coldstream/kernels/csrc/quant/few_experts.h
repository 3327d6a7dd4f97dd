// The routed experts of a few pairs, for which the time between stages matters: computes the same as
// `routed_experts_op` in two stages instead of four. Each task quantises its own inputs.
#pragma once

#include "quant/experts.h"

namespace coldstream {

class few_experts_op : public op {
 public:
  // At most this many pairs of row and rank are computed here, whatever the number of rows.
  static constexpr int max_pairs = 32;

  few_experts_op(const quant_kernels& kernels, routed_experts_args args);
  const char* name() const override { return "routed_experts"; }
  int num_stages() const override { return 2; }
  size_t scratch_bytes() const override;
  size_t shared_bytes() const override;
  void run(int stage, int rows, worker& w) override;

 private:
  struct pair {
    int32_t row, rank, expert;
  };
  // Pairs of one expert, at most few_max_rows, which read its weights together.
  struct job {
    int32_t first, count;
  };
  struct work {
    pair pairs[max_pairs];  // by expert, those of one in order
    job jobs[max_pairs];
    int num_jobs;
  };

  work list_work(int rows, worker& w) const;
  template <typename F>
  void for_each_slice(int num_jobs, int64_t num_rows, worker& w, F&& run_slice) const;
  size_t row_bytes() const;
  void gate_up(int rows, worker& w) const;
  void down(int rows, worker& w) const;

  const quant_kernels& kernels_;
  routed_experts_args args_;
  activation_forms x_forms_, h_forms_;
};

}  // namespace coldstream
