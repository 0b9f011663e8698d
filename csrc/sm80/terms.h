// How much of a call's terms a kernel knows, beside scale, causal, window, sink.
#pragma once

#include "../params.h"

namespace flashbpt::sm80 {

enum class Terms {
  kNone,
  kMask,     // boolean masks: they leave scores as they are, or hide them
  kDropout,  // and dropout
  kBias,     // an additive mask; no kernel of this kind serves a call without one
  kAll,      // softcap, ALiBi, all of them at once, and head dims above the tile
};

inline Terms terms_of(const AttentionParams& p) {
  const bool drops = p.dropout_threshold > 0, bias = p.mask && !p.boolean_mask();
  if (p.softcap > 0 || p.alibi || (bias && drops)) return Terms::kAll;
  if (bias) return Terms::kBias;
  return drops ? Terms::kDropout : (p.mask ? Terms::kMask : Terms::kNone);
}

// Whether a kernel that knows `known` serves a call with `wanted`.
constexpr bool serves(Terms known, Terms wanted) {
  if (known == Terms::kAll) return true;
  if (known == Terms::kBias || wanted == Terms::kBias) return known == wanted;
  return known >= wanted;
}

// Of the call's mask, and of any that a kernel may meet.
inline int mask_element_bytes(const AttentionParams& p) {
  return p.mask ? element_bytes(p.mask.dtype) : 0;
}
constexpr int most_mask_bytes(Terms terms) {
  switch (terms) {
    case Terms::kNone:
      return 0;
    case Terms::kMask:
    case Terms::kDropout:
      return 1;
    default:
      return 4;
  }
}

}  // namespace flashbpt::sm80
