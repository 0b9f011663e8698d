// Run-time values as compile-time constants, by generic lambdas.
#pragma once

#include <type_traits>

namespace flashbpt {

// f(std::bool_constant<value>)
template <typename F>
void dispatch_bool(bool value, F f) {
  if (value)
    f(std::true_type{});
  else
    f(std::false_type{});
}

}  // namespace flashbpt
