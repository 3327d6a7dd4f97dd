// The ops of a layer with experts in a pool: one requests them, the other computes each as soon as it is in
// memory. Ops between the two in a graph run while the disk reads.
#pragma once

#include <memory>
#include <vector>

#include "quant/expert_pool.h"
#include "quant/experts.h"

namespace coldstream {

struct pooled_layer {
  std::shared_ptr<expert_pool> pool;
  int layer;
  const int32_t* topk_ids;
  int64_t topk_stride;
  int num_experts_per_tok;
};

class request_experts_op : public op {
 public:
  explicit request_experts_op(pooled_layer from) : from_(std::move(from)) {}
  const char* name() const override { return "request_experts"; }
  void run(int stage, int rows, worker& w) override;
  void throw_failure() override;

 private:
  pooled_layer from_;
};

class pooled_experts_op : public op {
 public:
  // `args` as for routed_experts_op, with the ids of `from`.
  pooled_experts_op(const quant_kernels& kernels, routed_experts_args args, pooled_layer from, int capacity);
  const char* name() const override { return "routed_experts"; }
  int num_stages() const override { return 1 + experts_.num_stages(); }
  size_t scratch_bytes() const override { return experts_.scratch_bytes(); }
  size_t shared_bytes() const override { return experts_.shared_bytes(); }
  void run(int stage, int rows, worker& w) override;
  bool runs_alone(int stage, int rows) const override {
    return stage > 0 && experts_.runs_alone(stage - 1, rows);
  }
  bool repeats() override { return from_.pool->is_pending(); }
  void throw_failure() override;

 private:
  void choose(int rows, worker& w);

  pooled_layer from_;
  std::vector<int32_t> ids_;  // of the pass, [rows, num_experts_per_tok]; not_here for other pairs
  routed_experts_op experts_;
};

}  // namespace coldstream
