// In what unit a kernel keeps its scores.
#pragma once

#include "../params.h"

namespace flashbpt {

// How products become weights: P = exp2(sign * product * unit - ...) with the scale as fp32 has it,
// and its sign apart, so that the largest product has the largest score. Where terms are added to
// the scores, and in fp32, scores are scaled first: they are natural logarithms.
struct ScoreUnit {
  float unit;
  float sign;  // 0 for scale 0
  bool natural;
};

inline ScoreUnit score_unit(const AttentionParams& p) {
  constexpr float kLog2eHost = 1.4426950408889634f;
  const float scale = static_cast<float>(p.scale);
  const bool bias = p.alibi || (p.mask && !p.boolean_mask());
  const bool natural = p.softcap > 0 || bias || p.q.dtype == DataType::kFloat32;
  if (natural || scale == 0) return {kLog2eHost, scale == 0 ? 0.0f : 1.0f, natural};
  return {kLog2eHost * (scale < 0 ? -scale : scale), scale < 0 ? -1.0f : 1.0f, false};
}

}  // namespace flashbpt
