// Computes routed experts for a client that cannot call functions: a GPU in the middle of a graph.
//
// Both use a mailbox in page-locked memory. The client writes rows and expert ids, zeroes `done`, and then
// stores layer + 1 | rows << 16 to `request`. The server resets `request` to 0, computes the pairs whose id
// is not `not_here`, and stores 1 to `done`. There is one request at a time, and each is answered: after an
// error the rows are undefined and `check` throws. Each float of a row is written once. So the client may
// fill rows with what no result has, and read each float as soon as it is another one. Before it writes
// anything for its next request, it has to see `done` set.
//
// In `ahead` the client may say which experts a later layer will probably ask for: at each rank, layer + 1 <<
// 16 | id + 1, or layer + 1 << 16 for none. The server sets the first word to 0 and reads those into its
// caches while nothing is asked for. What is said there is never needed and may be wrong.
//
// Experts of a layer are read where they are mapped, or lie in a pool, into which the server has the missing
// ones read from their file while it computes the others.
#pragma once

#include <chrono>
#include <exception>
#include <memory>
#include <mutex>
#include <vector>

#include "hybrid/request_thread.h"
#include "quant/decode_experts.h"
#include "quant/pooled_experts.h"
#include "runtime/thread_pool.h"

namespace coldstream {

struct Mailbox {
  uint32_t* request;
  uint32_t* done;
  FloatRowsIn x;       // [capacity, E]
  const int32_t* ids;  // [capacity, ranks]
  int num_ranks;
  float* out;  // [capacity, ranks, E]
  int capacity;
  uint32_t* ahead;  // [ranks], or null
};

// Of a layer so far: experts that the client expected, those of them that it then asked for, and how many it
// asked for, each once in a request.
struct Expected {
  int64_t experts, right, asked;
};

// Requests of a layer so far.
struct LayerWork {
  int64_t requests, pairs;
  double seconds;  // from the request's arrival to the answer
};

class ExpertServer {
 public:
  // The mailbox's memory outlives the server. is_prefill: whether requests are those of prompts, for pools.
  // Throws std::system_error when the system refuses a thread.
  ExpertServer(std::shared_ptr<ThreadPool> threads, const QuantKernels& kernels, Mailbox box,
               bool is_prefill);

  // The experts of one more layer, with E columns; returns its number. pool: null, or the pool that they are
  // the layer `pool_layer` of.
  int add_layer(const Weight& gate, const Weight& up, const Weight& down, const ExpertGlu& glu,
                std::shared_ptr<ExpertPool> pool, int pool_layer);

  // As of the `RequestThread`. For decode steps the pool's threads stay awake. For those of prompts they do
  // so for a time from `begin` and from each answer on, and sleep then until the next request.
  void begin() { thread_->begin(); }
  void end() { thread_->end(); }

  // That time; 0 at first. Between the requests of a prompt are milliseconds, in which threads that poll take
  // time of their cores from others.
  std::chrono::nanoseconds awake_for() const { return thread_->awake_for(); }
  void stay_awake_for(std::chrono::nanoseconds time) { thread_->stay_awake_for(time); }

  std::vector<LayerWork> work();
  std::vector<Expected> expected();
  int64_t read_ahead_bytes();

  // Throws the first error since the last call: ModelChangedError, ForkedError, std::invalid_argument.
  void check();

 private:
  bool has_work() const;
  void work_once();
  void answer(uint32_t request);
  bool is_expecting() const;
  void read_ahead();
  void note_expected();
  void count_expected(uint32_t layer, uint32_t rows);
  void compute(uint32_t layer, uint32_t rows);

  std::shared_ptr<ThreadPool> threads_;
  const QuantKernels& kernels_;
  const Mailbox box_;
  const bool is_prefill_;
  std::mutex layers_lock_;
  using Ops = std::vector<std::unique_ptr<Op>>;
  struct Layer {
    Ops decode, prefill;  // one op each, for experts in memory: up to max_pairs pairs, and any number
    Ops arriving;         // one op, for experts that are being read into `pool`
    std::shared_ptr<ExpertPool> pool;
    int pool_layer;
    int64_t num_experts;
    std::vector<int32_t> expected_ids;  // last
  };
  int64_t num_pairs(int rows) const;
  void compute(const Layer& of, int rows);
  void compute_pooled(const Layer& of, int rows);
  std::vector<Layer> layers_;
  std::vector<LayerWork> work_;
  std::vector<Expected> expected_;
  ReadAhead ahead_;        // of layers whose experts are mapped
  Ops read_ahead_;         // a ReadAheadOp
  bool may_read_ = false;  // whether `ahead_` may have something left to read
  std::mutex error_lock_;
  std::exception_ptr error_;
  std::unique_ptr<RequestThread> thread_;  // the last to be made and the first to end
};

}  // namespace coldstream
