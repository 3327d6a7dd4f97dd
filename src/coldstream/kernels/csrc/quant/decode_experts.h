// The routed experts of a few pairs, for which the time between stages matters: computes the same as
// `RoutedExpertsOp` in two stages instead of four. Each task quantises its own inputs.
#pragma once

#include <functional>
#include <utility>

#include "quant/experts.h"

namespace coldstream {

class DecodeExpertsOp : public Op {
 public:
  // At most this many pairs of row and rank are computed here, whatever the number of rows.
  static constexpr int max_pairs = 32;

  DecodeExpertsOp(const QuantKernels& kernels, RoutedExpertsArgs args);
  const char* name() const override { return "routed_experts"; }
  int num_stages() const override { return 2; }
  size_t scratch_bytes() const override;
  size_t shared_bytes() const override;
  void run(int stage, int rows, Worker& w) override;

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

// Reads experts that `DecodeExpertsOp` will probably want, one row of each, into the caches of the workers
// that will multiply them. It ends early when they are wanted, and changes nothing. It never waits for a page
// that is not in memory.
class ReadAheadOp : public Op {
 public:
  // is_ended: whether to end, asked by all workers all the time.
  ReadAheadOp(Weight gate, Weight up, Weight down, std::function<bool()> is_ended)
      : gate_(std::move(gate)), up_(std::move(up)), down_(std::move(down)), is_ended_(std::move(is_ended)) {}
  const char* name() const override { return "read_ahead"; }
  int num_stages() const override { return 2; }
  void run(int stage, int rows, Worker& w) override;

  // Of the next run: distinct ids of experts that exist, at most DecodeExpertsOp::max_pairs.
  void expect(const int32_t* ids, int count);

 private:
  bool read_ahead(const uint8_t* from, size_t num_bytes) const;

  Weight gate_, up_, down_;
  std::function<bool()> is_ended_;
  int32_t ids_[DecodeExpertsOp::max_pairs] = {};
  int count_ = 0;
};

}  // namespace coldstream
