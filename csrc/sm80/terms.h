// How much of a call's terms a kernel knows, beside scale, causal, window, sink.
#pragma once

#include "../params.h"

namespace flashbpt::sm80 {

enum class Terms {
  kNone,
  kMask,  // boolean masks and dropout: they leave scores as they are, or hide them
  kAll,   // softcap, ALiBi and additive masks as well, and head dims above the tile
};

inline Terms terms_of(const AttentionParams& p) {
  if (p.softcap > 0 || p.alibi || (p.mask && !p.boolean_mask())) return Terms::kAll;
  return p.mask || p.dropout_threshold > 0 ? Terms::kMask : Terms::kNone;
}

// Of the call's mask, and of any that a kernel may meet.
inline int mask_element_bytes(const AttentionParams& p) {
  return p.mask ? element_bytes(p.mask.dtype) : 0;
}
constexpr int most_mask_bytes(Terms terms) {
  return terms == Terms::kAll ? 4 : (terms == Terms::kMask ? 1 : 0);
}

}  // namespace flashbpt::sm80
