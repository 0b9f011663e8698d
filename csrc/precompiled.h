// What C++ files include most, and what takes longest to read. setup.py compiles it once for all of
// them; no file relies on that.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <tuple>
#include <vector>
