// Random numbers that cost little, since every meeting of a warp puts its lanes in a new order: SplitMix64,
// from Steele, Lea and Flood, "Fast splittable pseudorandom number generators".
#pragma once

namespace {

class RandomBits {
 public:
  void seed(unsigned long long seed) { state_ = seed; }

  unsigned long long operator()() {
    unsigned long long mixed = state_ += 0x9e3779b97f4a7c15;
    mixed = (mixed ^ mixed >> 30) * 0xbf58476d1ce4e5b9;
    mixed = (mixed ^ mixed >> 27) * 0x94d049bb133111eb;
    return mixed ^ mixed >> 31;
  }

  // Less than `count`, which is far less than 2^32.
  unsigned long long below(unsigned long long count) { return ((*this)() >> 32) * count >> 32; }

 private:
  unsigned long long state_ = 0;
};

}  // namespace
