// From a type known at run time to a template instance.
#pragma once

#include "quant/weight.h"

namespace coldstream {

// Calls f.template operator()<Q>() for an integer type Q; the caller has checked quant_is_integer.
template <typename F>
static inline void dispatch_integer(quant_type type, F&& f) {
  switch (type) {
    case quant_type::q4_0:
      return f.template operator()<quant_type::q4_0>();
    case quant_type::q5_0:
      return f.template operator()<quant_type::q5_0>();
    case quant_type::q8_0:
      return f.template operator()<quant_type::q8_0>();
    case quant_type::q4_k:
      return f.template operator()<quant_type::q4_k>();
    case quant_type::q5_k:
      return f.template operator()<quant_type::q5_k>();
    case quant_type::q6_k:
      return f.template operator()<quant_type::q6_k>();
    default:
      __builtin_unreachable();
  }
}

}  // namespace coldstream
