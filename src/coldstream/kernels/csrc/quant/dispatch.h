// From a type known at run time to a template instance.
#pragma once

#include "quant/weight.h"

namespace coldstream {

// Calls f.template operator()<Q>() for an integer type Q; the caller has checked quant_is_integer.
template <typename F>
static inline void dispatch_integer(QuantType type, F&& f) {
  switch (type) {
    case QuantType::q4_0:
      return f.template operator()<QuantType::q4_0>();
    case QuantType::q5_0:
      return f.template operator()<QuantType::q5_0>();
    case QuantType::q8_0:
      return f.template operator()<QuantType::q8_0>();
    case QuantType::q4_k:
      return f.template operator()<QuantType::q4_k>();
    case QuantType::q5_k:
      return f.template operator()<QuantType::q5_k>();
    case QuantType::q6_k:
      return f.template operator()<QuantType::q6_k>();
    default:
      __builtin_unreachable();
  }
}

}  // namespace coldstream
