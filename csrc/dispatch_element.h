// The element type of a call as a C++ type.
#pragma once

#include "tile/element.h"

namespace flashbpt {

template <typename T>
struct ElementTag {
  using Type = T;
};

// f(ElementTag<T>()) for the element types that the kernels of attention have.
template <typename F>
void dispatch_element(DataType dtype, F f) {
  switch (dtype) {
    case DataType::kFloat32:
      return f(ElementTag<float>());
    case DataType::kBFloat16:
      return f(ElementTag<__nv_bfloat16>());
    case DataType::kFloat16:
      return f(ElementTag<__half>());
    case DataType::kFloat64:
    case DataType::kBool:
      break;
  }
}

}  // namespace flashbpt
