// What workers read into their caches before anybody asks for it: experts that later requests will probably
// want, one row of each. Nothing depends on it, and it never waits for a page that is not in memory.
//
// A worker reads the weight rows that it will multiply, in that order: its share of gate and up of all
// experts of a layer, then of down. A request interrupts it, and it goes on behind the request.
#pragma once

#include <functional>
#include <memory>
#include <utility>

#include "quant/expert_slices.h"
#include "quant/weight.h"

namespace coldstream {

// Experts of a layer, in the order in which they are multiplied.
struct ExpertList {
  static constexpr int max_experts = 32;
  int count = 0;
  int32_t ids[max_experts];
};

class ReadAhead {
 public:
  explicit ReadAhead(int num_workers);

  // Adds experts of a layer, whose matrices outlive this, behind those of earlier layers, of which two are
  // kept. Not while workers run; nor the next three.
  void expect(uint32_t layer, const Weight& gate, const Weight& up, const Weight& down,
              const ExpertList& experts);
  // This layer has been asked for: nothing more is read for it, nor for those that were expected before it.
  void forget(uint32_t layer);
  bool is_empty() const { return count_ == 0; }
  // Bytes that all workers have read so far.
  int64_t num_bytes() const;

  struct Bytes {
    const uint8_t* data;  // null: nothing is left
    int64_t size;
  };
  // What this worker reads next, at most `most` bytes. From a worker within a run.
  Bytes next(const Worker& w, int64_t most);

 private:
  struct Layer {
    uint64_t serial;  // ascending
    uint32_t number;
    const Weight *gate, *up, *down;
    ExpertList experts;
    int64_t num_bytes;
  };
  // How far a worker has read: all layers below `serial`; of that one all stages below `stage`, and of that
  // one the places below `unit`, of this place the matrices below `matrix`, and of that one `offset` bytes.
  struct alignas(64) Cursor {
    uint64_t serial = 0;
    int stage = 0, matrix = 0;
    int64_t unit = 0, offset = 0;
    int64_t num_bytes = 0;  // of layer `serial`
    int64_t all_bytes = 0;
  };
  static constexpr int num_stages = 2, max_layers = 3;

  static Bytes next_of(const Layer& layer, const Worker& w, Cursor& at, int64_t most);
  void forget_first(int count);

  Layer layers_[max_layers];
  int count_ = 0;
  uint64_t last_serial_ = 0;
  const int num_workers_;
  const int64_t most_bytes_;           // that wait in a worker's caches
  std::unique_ptr<Cursor[]> cursors_;  // one for each worker
};

// Reads ahead until nothing is left, or until is_ended(), which all workers ask all the time.
class ReadAheadOp : public Op {
 public:
  ReadAheadOp(ReadAhead& ahead, std::function<bool()> is_ended)
      : ahead_(ahead), is_ended_(std::move(is_ended)) {}
  const char* name() const override { return "read_ahead"; }
  void run(int stage, int rows, Worker& w) override;

 private:
  ReadAhead& ahead_;
  std::function<bool()> is_ended_;
};

}  // namespace coldstream
