#include "quant/pooled_experts.h"

#include "runtime/mapped_file.h"

namespace coldstream {

namespace {

RoutedExpertsArgs with_ids(RoutedExpertsArgs args, const int32_t* ids) {
  args.topk_ids = ids;
  args.topk_stride = args.num_experts_per_tok;
  return args;
}

void throw_if_unreadable(ExpertPool& pool) {
  if (pool.reader().failed()) throw ModelChangedError(pool.reader().failure());
}

}  // namespace

void RequestExpertsOp::run(int, int rows, Worker& w) {
  if (w.take() != 0) return;
  ExpertPool& pool = *from_.pool;
  const char* problem =
      pool.request(from_.layer, from_.topk_ids, rows, from_.num_experts_per_tok, from_.topk_stride);
  if (problem != nullptr) w.fail(problem);
}

void RequestExpertsOp::throw_failure() { throw_if_unreadable(*from_.pool); }

PooledExpertsOp::PooledExpertsOp(const QuantKernels& kernels, RoutedExpertsArgs args, PooledLayer from,
                                 int capacity)
    : from_(std::move(from)),
      ids_(static_cast<size_t>(capacity) * from_.num_experts_per_tok),
      experts_(kernels, with_ids(std::move(args), ids_.data()), capacity) {}

void PooledExpertsOp::run(int stage, int rows, Worker& w) {
  if (stage == 0) return choose(rows, w);
  if (stage == num_stages() - 1) from_.pool->end_pass();
  experts_.run(stage - 1, rows, w);
}

// One worker waits for the disk; the others sleep until it has chosen a pass.
void PooledExpertsOp::choose(int rows, Worker& w) {
  ExpertPool& pool = *from_.pool;
  if (w.take() != 0) return pool.await_pass();
  if (const char* problem = pool.next_pass()) return w.fail(problem);
  using XRows = RoutedExpertsOp::XRows;
  experts_.set_quantized_rows(pool.is_first_pass() ? XRows::all : XRows::none);
  const int ranks = from_.num_experts_per_tok;
  for (int t = 0; t < rows; t++) {
    for (int k = 0; k < ranks; k++) {
      const int32_t id = from_.topk_ids[t * from_.topk_stride + k];
      ids_[int64_t{t} * ranks + k] = id >= 0 && pool.is_in_pass(id) ? id : not_here;
    }
  }
}

void PooledExpertsOp::throw_failure() { throw_if_unreadable(*from_.pool); }

}  // namespace coldstream
