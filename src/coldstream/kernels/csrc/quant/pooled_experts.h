// The ops of a layer with experts in a pool: one requests them, the other computes each as soon as it is in
// memory. Ops between the two in a graph run while the disk reads.
#pragma once

#include <memory>
#include <vector>

#include "quant/expert_pool.h"
#include "quant/experts.h"

namespace coldstream {

struct PooledLayer {
  std::shared_ptr<ExpertPool> pool;
  int layer;
  const int32_t* topk_ids;
  int64_t topk_stride;
  int num_experts_per_tok;
};

class RequestExpertsOp : public Op {
 public:
  explicit RequestExpertsOp(PooledLayer from) : from_(std::move(from)) {}
  const char* name() const override { return "request_experts"; }
  void run(int stage, int rows, Worker& w) override;
  void throw_failure() override;

 private:
  PooledLayer from_;
};

class PooledExpertsOp : public Op {
 public:
  // `args` as for RoutedExpertsOp, with the ids of `from`.
  PooledExpertsOp(const QuantKernels& kernels, RoutedExpertsArgs args, PooledLayer from, int capacity);
  const char* name() const override { return "routed_experts"; }
  int num_stages() const override { return 1 + experts_.num_stages(); }
  size_t scratch_bytes() const override { return experts_.scratch_bytes(); }
  size_t shared_bytes() const override { return experts_.shared_bytes(); }
  void run(int stage, int rows, Worker& w) override;
  bool runs_alone(int stage, int rows) const override {
    return stage > 0 && experts_.runs_alone(stage - 1, rows);
  }
  bool repeats() override { return from_.pool->is_pending(); }
  void throw_failure() override;

 private:
  void choose(int rows, Worker& w);

  PooledLayer from_;
  std::vector<int32_t> ids_;  // of the pass, [rows, num_experts_per_tok]; not_here for other pairs
  RoutedExpertsOp experts_;
};

}  // namespace coldstream
