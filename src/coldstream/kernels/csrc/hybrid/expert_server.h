// Computes routed experts for a client that cannot call functions: a GPU in the middle of a graph.
//
// Both use a mailbox in page-locked memory. The client writes rows and expert ids, zeroes `done`, and then
// stores layer + 1 | rows << 16 to `request`. The server resets `request` to 0, computes the pairs whose id
// is not `not_here`, and stores 1 to `done`. There is one request at a time, and each is answered: after an
// error the rows are undefined and `check` throws.
//
// Experts of a layer are read where they are mapped, or lie in a pool, into which the server has the missing
// ones read from their file while it computes the others.
#pragma once

#include <unistd.h>

#include <atomic>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "quant/few_experts.h"
#include "quant/pooled_experts.h"
#include "runtime/thread_pool.h"

namespace coldstream {

struct mailbox {
  uint32_t* request;
  uint32_t* done;
  float_rows_in x;     // [capacity, E]
  const int32_t* ids;  // [capacity, ranks]
  int num_ranks;
  float* out;  // [capacity, ranks, E]
  int capacity;
};

// Requests of a layer so far.
struct layer_work {
  int64_t requests, pairs;
  double seconds;  // from the request's arrival to the answer
};

class expert_server {
 public:
  // The mailbox's memory outlives the server. is_prefill: whether requests are those of prompts, for pools.
  // Throws std::system_error when the system refuses a thread.
  expert_server(std::shared_ptr<thread_pool> threads, const quant_kernels& kernels, mailbox box,
                bool is_prefill);
  expert_server(const expert_server&) = delete;
  expert_server& operator=(const expert_server&) = delete;
  ~expert_server();

  // The experts of one more layer, with E columns; returns its number. pool: null, or the pool that they are
  // the layer `pool_layer` of.
  int add_layer(const weight& gate, const weight& up, const weight& down, std::shared_ptr<expert_pool> pool,
                int pool_layer);

  // From here to `end`, and a few milliseconds longer so that the next `begin` need not wake threads, the
  // server polls without pause and the pool's threads stay awake.
  void begin();
  void end();

  std::vector<layer_work> work();

  // Throws the first error since the last call: model_changed_error, forked_error, std::invalid_argument.
  void check();

 private:
  void serve();
  void serve_requests();
  void answer(uint32_t request);
  void compute(uint32_t layer, uint32_t rows);

  std::shared_ptr<thread_pool> threads_;
  const quant_kernels& kernels_;
  const mailbox box_;
  const bool is_prefill_;
  const pid_t owner_;
  std::mutex layers_lock_;
  using ops = std::vector<std::unique_ptr<op>>;
  struct layer {
    ops few, many;  // one op each, for experts in memory: of few pairs, and of any number
    ops arriving;   // one op, for experts that are being read into `pool`
    std::shared_ptr<expert_pool> pool;
    int pool_layer;
    int64_t num_experts;
  };
  int64_t num_pairs(int rows) const;
  void compute(const layer& of, int rows);
  void compute_pooled(const layer& of, int rows);
  std::vector<layer> layers_;
  std::vector<layer_work> work_;
  std::mutex error_lock_;
  std::exception_ptr error_;
  std::atomic<uint32_t> phase_{RESTING};
  std::unique_ptr<std::thread> thread_;

  static constexpr uint32_t RESTING = 0, SERVING = 1, LINGERING = 2, STOPPING = 3;
};

}  // namespace coldstream
