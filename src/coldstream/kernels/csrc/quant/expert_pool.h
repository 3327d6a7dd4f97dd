// A bounded number of the file's experts in memory: slots of a few sizes, the expert in each, and the missing
// experts of the running step.
//
// A step goes through the layers in order. For each layer, `request` begins to read the missing ones of the
// given experts; then each call of `next_pass` returns those that are in memory and not yet computed, until
// all are. A slot belongs to one expert at a time: it gets another one only when it is not being read, and is
// not read before all bytes of its expert have arrived.
//
// `set_order` decides between steps which slots are overwritten first. A step of decoding takes as many as it
// needs, and none that it has used itself as long as there are others. A step of prefill, which may need
// every expert, takes the first few in the order and reuses them, so that the experts of decoding stay.
// Experts of a kept layer are replaced only if a prompt finds no other slot.
//
// `hold` keeps an expert where it is while others than the running step read it, a copy engine for example.
// `reserve` gives a slot to an expert whose bytes come from elsewhere than the file: out of a GPU's memory.
//
// Any thread may call `hold`, `release`, `reserve`, `deliver`, `owners`, `set_order` and `count` at any time;
// all else is called by one thread at a time: one of a stage or, with several clients, the one that has
// `clients` locked.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "runtime/file_reader.h"

namespace coldstream {

class ExpertPool {
 public:
  // A matrix of expert 0 of a layer; that of expert e is e · bytes further.
  struct Part {
    int file;
    uint64_t offset, bytes;
  };
  // A slot that waits for its bytes: its index, and where the parts of the expert begin in it.
  struct Reserved {
    int slot;
    std::vector<uint8_t*> parts;
  };
  struct Counters {
    uint64_t hits, misses;  // of experts of a layer in a step
    double wait_s;          // in which a step had nothing to compute
  };

  // `layers` have one or more parts each. Throws std::invalid_argument if one does not fit into 63 bits.
  ExpertPool(std::unique_ptr<FileReader> reader, std::vector<std::vector<Part>> layers, int num_experts);
  ExpertPool(const ExpertPool&) = delete;
  ExpertPool& operator=(const ExpertPool&) = delete;
  ~ExpertPool();

  // Layers whose experts have equal sizes share slots: sizes of slots, and the class of each layer.
  const std::vector<uint64_t>& slot_bytes() const { return slot_bytes_; }
  int num_layers() const { return static_cast<int>(layers_.size()); }
  int num_experts() const { return num_experts_; }
  int class_of(int layer) const { return layers_[layer].size_class; }
  // Addresses of the experts of a layer, [num_experts]; null for missing ones. `request` and `next_pass`
  // change entries.
  const uint8_t* const* addresses(int layer, int index) const;
  // Throws std::out_of_range.
  const Part& part_at(int layer, int index) const { return layers_.at(layer).parts.at(index); }
  // The layer that has this table of addresses, or -1.
  int layer_of(const uint8_t* const* table) const;

  // Allocates slots of each size, at least one each; call once. Throws std::bad_alloc.
  void allocate(const std::vector<int>& num_slots, int num_staging);
  // The owners of the slots of a size: layer · num_experts + expert, or -1.
  std::vector<int64_t> owners(int size_class) const;
  // The order in which slots of a size, by their index in `owners`, are overwritten. Stays until the next
  // call.
  void set_order(int size_class, const std::vector<int>& order);
  // The memory of all slots, and its bytes; null before `allocate`.
  std::pair<void*, size_t> memory() const { return {memory_, memory_bytes_}; }

  // Keeps an expert that is in memory where it is until as many calls of `release`; returns the addresses of
  // its parts. Returns none, and keeps nothing, if it is not there, or if fewer slots of its size than a step
  // of prefill uses for staging would be left for others. Throws std::out_of_range.
  std::vector<const uint8_t*> hold(int layer, int32_t expert);
  // Throws std::invalid_argument for an expert that is not held.
  void release(int layer, int32_t expert);

  // A slot for an expert that is not in memory, until `deliver`: a free one, or that of one of the first
  // `num_worse` in the order. None for an expert that is in memory, or if no slot may be taken; as many are
  // left for others as by `hold`. Throws std::out_of_range.
  std::optional<Reserved> reserve(int layer, int32_t expert, size_t num_worse);
  // Ends `reserve`. is_whole: whether the bytes have been written; otherwise, and if the expert was read from
  // the file meanwhile, the slot is free again. Throws std::invalid_argument for a slot that is not reserved.
  void deliver(int layer, int32_t expert, int slot, bool is_whole);

  // Between steps: reads experts of a layer into free slots, and waits for them. Returns null or the reason
  // of a failure, a literal; reads that it leaves under way end with the next step. Throws std::out_of_range
  // for a layer that does not exist.
  const char* preload(int layer, const std::vector<int32_t>& experts);
  // From now on this layer's experts keep their slots. There must be slots of its size for all of them, and
  // more if other layers share that size.
  void keep(int layer);

  // Empties all slots that are not held.
  void clear();

  // For clients on different threads: locked from before `follow` until a layer has been computed.
  std::mutex& clients() { return clients_; }
  // For a client that knows layers and not steps: begins a step unless this layer comes after the last one,
  // in a step of the same kind that has not failed.
  void follow(int layer, bool is_prefill);
  void begin_step(bool is_prefill);
  // Experts that this step has used so far, by number.
  const std::vector<int64_t>& used() const { return used_; }

  // Both return null, or why the step cannot go on, a literal; `request` has then changed nothing. Ids of -1
  // are ignored.
  const char* request(int layer, const int32_t* ids, int rows, int ranks, int64_t stride);
  const char* next_pass();
  // For other threads while one is in `next_pass`: sleeps until it has chosen a pass. Call `end_pass`
  // before the next one.
  void await_pass() { is_chosen_.wait(0, std::memory_order_acquire); }
  void end_pass() { is_chosen_.store(0, std::memory_order_relaxed); }
  bool is_in_pass(int32_t expert) const { return pass_of_[expert] == pass_; }
  bool is_first_pass() const { return num_passes_ == 1; }
  // Whether there will be another pass.
  bool is_pending() const { return !missing_.empty() || !loading_.empty(); }

  FileReader& reader() { return *reader_; }
  Counters count() const {
    std::lock_guard lock(mutex_);
    return counters_;
  }

 private:
  struct Layer {
    std::vector<Part> parts;
    int size_class;
    std::vector<const uint8_t*> addresses;  // [parts][experts]
    int num_resident = 0;
    bool is_kept = false;
  };
  struct Slot {
    std::byte* memory;
    int64_t owner = -1;      // layer · num_experts + expert
    int64_t used_step = -1;  // the last step that used it
    bool is_pinned = false;  // until the running layer has computed it
    bool is_staging = false;
    bool is_reserved = false;  // has no owner, and is not free
    int num_holds = 0;
    std::atomic<int> pending{0};  // reads under way
  };
  struct SizeClass {
    uint64_t bytes;
    int num_layers = 0, num_slots = 0;
    std::unique_ptr<Slot[]> slots;
    std::vector<int> free;     // slots without an owner
    std::vector<int> order;    // of slots with an owner, for overwriting
    size_t next = 0;           // in `order`
    int hand = 0;              // next slot to try after the end of `order`
    std::vector<int> staging;  // slots that prefill reuses
    int num_staging = 0, max_staging = 0;
    int num_held = 0;  // slots with holds, and reserved ones
  };

  int64_t number(int32_t expert) const { return int64_t{layer_} * num_experts_ + expert; }
  SizeClass& current() { return classes_[layers_[layer_].size_class]; }
  Slot& slot_with(int32_t expert) { return current().slots[slot_of_[number(expert)]]; }
  bool has_arrived(int32_t expert) { return slot_with(expert).pending.load(std::memory_order_acquire) == 0; }
  bool has_kept(const Slot& of) const { return of.owner >= 0 && layers_[of.owner / num_experts_].is_kept; }
  bool may_overwrite(const Slot& of) const {
    return !of.is_pinned && !of.is_staging && !of.is_reserved && of.num_holds == 0 && !has_kept(of);
  }
  int index_of(int layer, int32_t expert) const;
  void settle();
  void release_pass();
  void load_missing();
  void load(int32_t expert, int index);
  void evict(Slot& from);
  void publish(int layer, int32_t expert);
  void pin(int32_t expert);
  // Room for a part's bytes with those around them that an aligned read includes.
  static uint64_t room_of(const Part& p) { return io_ceil(p.bytes + io_alignment - 1); }
  // Calls visit(index, address) with the first byte of each part of an expert in the slot at `memory`.
  template <typename F>
  void for_parts(int layer, int32_t expert, std::byte* memory, F&& visit) const {
    const auto& parts = layers_[layer].parts;
    for (size_t i = 0; i < parts.size(); i++) {
      const uint64_t begin = parts[i].offset + static_cast<uint64_t>(expert) * parts[i].bytes;
      visit(i, reinterpret_cast<uint8_t*>(memory + (begin - io_floor(begin))));
      memory += room_of(parts[i]);
    }
  }
  int take_slot();
  int take_staging(SizeClass& of);
  int take_free(SizeClass& of);
  int take_in_order(SizeClass& of, bool spare_used, size_t end);
  int take_any(SizeClass& of);

  std::unique_ptr<FileReader> reader_;
  const int num_experts_;
  std::mutex clients_;
  mutable std::mutex mutex_;  // of slots, their classes, addresses and counters; never held during a wait
  std::vector<Layer> layers_;
  std::vector<SizeClass> classes_;
  std::vector<uint64_t> slot_bytes_;
  std::vector<int32_t> slot_of_;  // [layers][experts], -1: in none
  void* memory_ = nullptr;
  size_t memory_bytes_ = 0;

  int64_t step_ = 0;
  bool is_prefill_ = false;
  std::vector<int64_t> used_;
  Counters counters_{};

  // State of the running layer.
  int layer_ = 0;
  std::vector<int32_t> counts_;         // [experts], of pairs
  std::vector<int32_t> missing_;        // without a slot, in reverse order of reading
  std::vector<int32_t> loading_;        // under way
  std::vector<int32_t> in_pass_;        // in memory, computed now or next
  int num_passes_ = 0;                  // begun
  std::atomic<uint32_t> is_chosen_{0};  // whether the next pass is
  int64_t pass_ = 0;
  std::vector<int64_t> pass_of_;  // [experts], the last pass that computed it
};

}  // namespace coldstream
