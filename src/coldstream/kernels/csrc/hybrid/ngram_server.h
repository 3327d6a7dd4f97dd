// Reads rows of a table of n-grams for a client that cannot call functions: a GPU in the middle of a graph.
//
// Both use a mailbox in page-locked memory. The client writes ids of rows, −1 for none, zeroes `done`, and
// then stores the number of rows of its step to `request`. The server resets `request` to 0, writes the bytes
// of the rows, zeros for none, and stores 1 to `done`. There is one request at a time, and each is answered:
// after an error the rows are undefined, and `check` throws or the table has a problem.
#pragma once

#include <exception>
#include <memory>
#include <mutex>
#include <vector>

#include "hybrid/request_thread.h"
#include "ops/ngram.h"

namespace coldstream {

struct NgramMailbox {
  uint32_t* request;
  uint32_t* done;
  const int32_t* ids;  // [capacity, heads]
  uint8_t* out;        // [capacity, heads · row_bytes]
  int capacity;
  int num_heads;
};

class NgramServer {
 public:
  // The mailbox's memory outlives the server. `threads` read what a prompt needs; a few rows are read by the
  // thread that looks for requests. Throws std::system_error when the system refuses a thread.
  NgramServer(std::shared_ptr<ThreadPool> threads, NgramMailbox box, std::shared_ptr<NgramTable> table);

  // As of the `RequestThread`.
  void begin() { thread_->begin(); }
  void end() { thread_->end(); }

  // Throws the first error since the last call: std::invalid_argument, ForkedError.
  void check();

 private:
  void answer();
  void read(int rows);

  const std::shared_ptr<ThreadPool> threads_;
  const NgramMailbox box_;
  const std::shared_ptr<NgramTable> table_;
  std::vector<std::unique_ptr<Op>> all_;  // one op, for the rows of a prompt
  std::mutex error_lock_;
  std::exception_ptr error_;
  std::unique_ptr<RequestThread> thread_;  // the last to be made and the first to end
};

}  // namespace coldstream
