// Experts in a bounded part of memory, while all of them lie in the file: slots of a few sizes, which expert
// lies in which, and what the running step needs that lies in none.
//
// A step goes through the layers in order. For each layer `request` learns which experts it needs and has
// the missing ones read at once; then `next_round` says again and again which of them are there and have not
// been computed yet, until all have. A slot belongs to one expert at a time: one is given to another expert
// only when nobody reads it, and nobody reads it before all of its bytes have come.
//
// Which slots to give away is decided between steps, by whoever sets the order. A step of decoding takes as
// many as it needs, and none that it has used itself as long as there are others. A step of prefill, which
// may need every expert, takes the few that come first in the order and uses them again and again, so that
// what decoding needs stays. Experts of a layer that is kept go only if a prompt finds no other slot for them.
//
// Not for several threads: one thread of a stage calls it, or nobody runs.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "runtime/file_reader.h"

namespace coldstream {

class expert_pool {
 public:
  // A matrix of expert 0 of a layer; that of expert e lies e · bytes further.
  struct part {
    int file;
    uint64_t offset, bytes;
  };
  struct counters {
    uint64_t hits, misses;  // of experts of a layer in a step
    double wait_s;          // in which a step had nothing to compute
  };

  // `layers` have one or more parts each. Throws std::invalid_argument if one does not fit into 63 bits.
  expert_pool(std::unique_ptr<file_reader> reader, std::vector<std::vector<part>> layers, int num_experts);
  expert_pool(const expert_pool&) = delete;
  expert_pool& operator=(const expert_pool&) = delete;
  ~expert_pool();

  // Layers whose experts take as much memory share slots. Sizes and classes of layers by number.
  const std::vector<uint64_t>& slot_bytes() const { return slot_bytes_; }
  int num_layers() const { return static_cast<int>(layers_.size()); }
  int num_experts() const { return num_experts_; }
  int class_of(int layer) const { return layers_[layer].size_class; }
  // Where the experts of a layer lie, [num_experts]; null for those that are not here. `request` and
  // `next_round` change entries.
  const uint8_t* const* addresses(int layer, int index) const;
  // Throws std::out_of_range.
  const part& part_at(int layer, int index) const { return layers_.at(layer).parts.at(index); }
  // The layer that has this table of addresses, or -1.
  int layer_of(const uint8_t* const* table) const;

  // Takes memory for this many slots of each size, at least one each; once. Throws std::bad_alloc.
  void allocate(const std::vector<int>& num_slots, int num_staging);
  // Who owns the slots of a size: layer · num_experts + expert, or -1.
  std::vector<int64_t> owners(int size_class) const;
  // The order in which slots of a size, by their index in `owners`, are given to others. Holds until it is
  // set again.
  void set_order(int size_class, const std::vector<int>& order);

  // Between steps: reads these experts of a layer into free slots, and returns when they are there. Returns
  // why that cannot be, a literal, or null; what a failure leaves under way ends with the next step. Throws
  // std::out_of_range for no layer.
  const char* preload(int layer, const std::vector<int32_t>& experts);
  // From now on no slot is taken from this layer's experts. There must be slots of its size for them all, and
  // for others if other layers share them.
  void keep(int layer);

  // Nothing is in memory any more.
  void clear();

  void begin_step(bool is_prefill);
  // Experts that this step has used so far, by number.
  const std::vector<int64_t>& used() const { return used_; }

  // Both return why the step cannot go on, a literal, or null. If `request` does, nothing has changed. Ids of
  // -1 are nobody's.
  const char* request(int layer, const int32_t* ids, int rows, int ranks, int64_t stride);
  const char* next_round();
  // For other threads while one is in `next_round`: sleeps until it knows. `end_round` must come in between.
  void await_round() { is_chosen_.wait(0, std::memory_order_acquire); }
  void end_round() { is_chosen_.store(0, std::memory_order_relaxed); }
  bool is_in_round(int32_t expert) const { return round_of_[expert] == round_; }
  bool is_first_round() const { return num_rounds_ == 1; }
  // Whether there will be another round.
  bool is_pending() const { return !missing_.empty() || !loading_.empty(); }

  file_reader& reader() { return *reader_; }
  counters count() const { return counters_; }

 private:
  struct layer {
    std::vector<part> parts;
    int size_class;
    std::vector<const uint8_t*> addresses;  // [parts][experts]
    int num_resident = 0;
    bool is_kept = false;
  };
  struct slot {
    std::byte* memory;
    int64_t owner = -1;      // layer · num_experts + expert
    int64_t used_step = -1;  // the last that used it
    bool is_pinned = false;  // by what the running layer has still to compute
    bool is_staging = false;
    std::atomic<int> pending{0};  // reads under way
  };
  struct size_class {
    uint64_t bytes;
    int num_layers = 0, num_slots = 0;
    std::unique_ptr<slot[]> slots;
    std::vector<int> free;     // slots without an owner
    std::vector<int> order;    // in which slots with one are given away
    size_t next = 0;           // in `order`
    int hand = 0;              // where the search goes on when the order is used up
    std::vector<int> staging;  // of prefill, to be used again
    int num_staging = 0, max_staging = 0;
  };

  int64_t number(int32_t expert) const { return int64_t{layer_} * num_experts_ + expert; }
  size_class& current() { return classes_[layers_[layer_].size_class]; }
  slot& slot_with(int32_t expert) { return current().slots[slot_of_[number(expert)]]; }
  bool has_landed(int32_t expert) {
    return slot_with(expert).pending.load(std::memory_order_acquire) == 0;
  }
  bool has_kept(const slot& of) const { return of.owner >= 0 && layers_[of.owner / num_experts_].is_kept; }
  void settle();
  void release_round();
  void load_missing();
  void load(int32_t expert, int index);
  void evict(slot& from);
  void publish(int32_t expert);
  int take_slot();
  int take_staging(size_class& of);
  int take_free(size_class& of);
  int take_in_order(size_class& of, bool spare_used);
  int take_any(size_class& of);

  std::unique_ptr<file_reader> reader_;
  const int num_experts_;
  std::vector<layer> layers_;
  std::vector<size_class> classes_;
  std::vector<uint64_t> slot_bytes_;
  std::vector<int32_t> slot_of_;  // [layers][experts], -1: in none
  void* memory_ = nullptr;
  size_t memory_bytes_ = 0;

  int64_t step_ = 0;
  bool is_prefill_ = false;
  std::vector<int64_t> used_;
  counters counters_{};

  // Of the running layer.
  int layer_ = 0;
  std::vector<int32_t> counts_;    // [experts], of pairs
  std::vector<int32_t> missing_;   // without a slot, the one to be read next last
  std::vector<int32_t> loading_;   // under way
  std::vector<int32_t> in_round_;  // here and to be computed next, or being computed
  int num_rounds_ = 0;             // begun
  std::atomic<uint32_t> is_chosen_{0};  // whether the next round is
  int64_t round_ = 0;
  std::vector<int64_t> round_of_;  // [experts], the last round that computed it
};

}  // namespace coldstream
