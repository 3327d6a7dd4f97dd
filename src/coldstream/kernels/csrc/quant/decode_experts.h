// The routed experts of a few pairs, for which the time between stages matters: computes the same as
// `RoutedExpertsOp` in two stages instead of four. Each task quantises its own inputs.
#pragma once

#include "quant/experts.h"
#include "quant/read_ahead.h"

namespace coldstream {

class DecodeExpertsOp : public Op {
 public:
  // At most this many pairs of row and rank are computed here, whatever the number of rows.
  static constexpr int max_pairs = ExpertList::max_experts;

  DecodeExpertsOp(const QuantKernels& kernels, RoutedExpertsArgs args);
  const char* name() const override { return "routed_experts"; }
  int num_stages() const override { return 2; }
  size_t scratch_bytes() const override;
  size_t shared_bytes() const override;
  void run(int stage, int rows, Worker& w) override;
  const RoutedExpertsArgs& args() const { return args_; }

 private:
  struct Pair {
    int32_t row, rank, expert;
  };
  // Pairs of one expert, at most gemv_max_rows, which read its weights together.
  struct Job {
    int32_t first, count;
  };
  struct Work {
    Pair pairs[max_pairs];  // by expert, those of one in order
    Job jobs[max_pairs];
    int num_jobs;
  };

  Work list_work(int rows, Worker& w) const;
  size_t row_bytes() const;
  void gate_up(int rows, Worker& w) const;
  void down(int rows, Worker& w) const;

  const QuantKernels& kernels_;
  RoutedExpertsArgs args_;
  ActivationForms x_forms_, h_forms_;
};

}  // namespace coldstream
