// exp, the normal distribution's pair (cdf, density) and the logistic function on vectors, in fp32.
#pragma once

#include "vec.h"

namespace whet {
namespace WHET_ISA {

constexpr float kInfinity = __builtin_inff();

// e^x to about 1 ulp on [-87.33, 88.37]; 0 below, clamped to e^88.37 above. NaN stays NaN.
// x = n ln 2 + r, |r| <= ln(2) / 2; the polynomial is a minimax fit of (e^r - 1 - r) / r^2, 3e-9 relative to e^r.
WHET_INLINE VF exponential(VF x) {
  const VI vanishes = x < splat(-87.33654f);
  const VF highest = splat(88.376258f);
  const VF held = x > highest ? highest : x;
  const VF shift = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, which is then in the low bits
  const VF shifted = held * splat(1.44269504089f) + shift;
  const VF n = shifted - shift;
  VF r = held - n * splat(0.693359375f);  // ln 2 in two parts, the first with few bits, so that the product is exact
  r = r + n * splat(2.12194440055e-4f);
  VF p = splat(1.3814605883e-03f);
  p = p * r + splat(8.3687097848e-03f);
  p = p * r + splat(4.1668387519e-02f);
  p = p * r + splat(1.6666520689e-01f);
  p = p * r + splat(4.9999993451e-01f);
  p = p * (r * r) + r + splat(1.0f);
  const VI exponent = (reinterpret_cast<VI>(shifted) - reinterpret_cast<VI>(shift)) << 23;
  return select(vanishes, VF{}, reinterpret_cast<VF>(reinterpret_cast<VI>(p) + exponent));
}

// 2^x for x < 127, to 3 ulp; at most 2^-126 below -126, negligible next to a softmax's largest term. NaN stays.
// Each polynomial is a minimax fit of 2^r, exactly 1 at 0, 9e-8 relative.
WHET_INLINE VF power_of_two(VF x) {
#if defined(__AVX512DQ__)
  const VF r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // 0 <= r < 1
  VF p = splat(1.8671300495e-03f);
  p = p * r + splat(9.0170307085e-03f);
  p = p * r + splat(5.5799912661e-02f);
  p = p * r + splat(2.4016444385e-01f);
  p = p * r + splat(6.9315129519e-01f);
  p = p * r + splat(1.0f);
  return _mm512_scalef_ps(p, x);  // times 2^floor(x)
#else
  const VF held = larger(splat(-126.0f), x);
  const VF shift = splat(12582912.0f);  // as above; the shift to the exponent drops its own low bits
  const VF shifted = held + shift;
  const VF r = held - (shifted - shift);  // |r| <= 1/2
  VF p = splat(1.3264727313e-03f);
  p = p * r + splat(9.6715129912e-03f);
  p = p * r + splat(5.5507335812e-02f);
  p = p * r + splat(2.4022242427e-01f);
  p = p * r + splat(6.9314700365e-01f);
  p = p * r + splat(1.0f);
  return reinterpret_cast<VF>(reinterpret_cast<VI>(p) + (reinterpret_cast<VI>(shifted) << 23));
#endif
}

WHET_INLINE VF absolute(VF x) { return reinterpret_cast<VF>(reinterpret_cast<VI>(x) & 0x7FFFFFFF); }

// 1 / (1 + e^-x), by e^-|x|, which cannot overflow.
WHET_INLINE VF logistic(VF x) {
  const VF e = exponential(-absolute(x));
  const VF s = splat(1.0f) / (splat(1.0f) + e);
  return select(x < VF{}, e * s, s);
}

// P(X <= x) and the density at x of the standard normal distribution.
struct Normal {
  VF cdf, density;
};

// The tail is e^{-x^2/2} times a polynomial in t = 1 / (1 + 0.4 |x| / sqrt 2): a minimax fit of erfcx(z) / t on
// 0 <= z <= 9.5, 7e-9 relative. So small cdf values keep their relative precision, up to that of the exponential.
WHET_INLINE Normal normal(VF x) {
  const VF size = absolute(x);
  const VF bell = exponential(size * size * splat(-0.5f));
  const VF t = splat(1.0f) / (size * splat(0.28284271247f) + splat(1.0f));
  VF q = splat(-3.0595254860e-02f);
  q = q * t + splat(2.0347478073e-01f);
  q = q * t + splat(-5.1172222612e-01f);
  q = q * t + splat(5.6475529410e-01f);
  q = q * t + splat(-2.9886815138e-01f);
  q = q * t + splat(2.7990886377e-01f);
  q = q * t + splat(1.2694534487e-01f);
  q = q * t + splat(2.1551063096e-01f);
  q = q * t + splat(2.2488006996e-01f);
  q = q * t + splat(2.2571065465e-01f);
  const VF tail = q * t * bell * splat(0.5f);
  return {select(x > VF{}, splat(1.0f) - tail, tail), bell * splat(0.3989422804f)};
}

}  // namespace WHET_ISA
}  // namespace whet
