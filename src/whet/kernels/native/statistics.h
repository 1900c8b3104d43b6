// Statistics of a row in a working row, whose last vector may extend past the row.
#pragma once

#include "vec.h"

namespace whet {
namespace WHET_ISA {

// The mean of the squared distances from `mean`: the variance, or for a mean of 0 the mean square.
static inline float mean_square(const float* values, int64_t width, float mean) {
  VF total = VF{};
  for_vectors(width, [&](int64_t c, int n) {
    VF d = load(values + c) - splat(mean);
    if (n < W) d = select(lane_numbers() < splat_i(n), d, VF{});
    total += d * d;
  });
  return lane_sum(total) / static_cast<float>(width);
}

// 1 / sqrt(mean square + eps), NaN if fp32 has overflowed: x / inf would be 0, and a broken row would look valid.
static inline float inverse_deviation(const float* values, int64_t width, float mean, float eps) {
  const float square = mean_square(values, width, mean);
  return square <= __FLT_MAX__ ? 1.0f / __builtin_sqrtf(square + eps) : __builtin_nanf("");
}

}  // namespace WHET_ISA
}  // namespace whet
