// Rows of fp32 as bytes with one scale for each block of a row: x is about scale * q, with integers q from -127 to 127.
#pragma once

#include "operator.h"
#include "philox.h"
#include "vec.h"

namespace whet {
namespace WHET_ISA {

typedef int8_t VB __attribute__((vector_size(W)));
typedef int8_t VBMem __attribute__((vector_size(W), aligned(1), may_alias));

constexpr float kMost = 127.0f;
constexpr float kLeast = 1e-30f;  // blocks whose largest value is below count as zero: 127 / it must not overflow
constexpr int64_t kBytes = 4 * kBlock;  // random bytes in a block of Philox

// The largest magnitude; NaN if there is one, since the bits of NaN are above those of all numbers.
WHET_INLINE VI larger_bits(VI most, VF x) {
  const VI bits = reinterpret_cast<VI>(x) & 0x7FFFFFFF;
  return bits > most ? bits : most;
}

struct Scale {
  float value, inverse;
};

WHET_INLINE Scale scale_of(float largest) {
  if (largest < kLeast) return {0.0f, 0.0f};
  return {largest / kMost, kMost / largest};
}

static inline float largest_of(const float* x, int64_t n) {
  VI most{};
  for_vectors(n, [&](int64_t c, int lanes) { most = larger_bits(most, get(x + c, lanes)); });
  int32_t found = 0;
  for (int i = 0; i < W; ++i) found = most[i] > found ? most[i] : found;
  float largest;
  std::memcpy(&largest, &found, sizeof largest);
  return largest;
}

// The nearest integer (ties to even) of |x| < 2^22.
WHET_INLINE VI nearest(VF x) {
  const VF shift = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, which is then in the low bits
  return reinterpret_cast<VI>(x + shift) - reinterpret_cast<VI>(shift);
}

// Added before rounding: nothing, or, for stochastic rounding, uniform numbers of (-1/2, 1/2) in 256 steps; byte i of a
// row's stream is for element i.
class Dither {
 public:
  Dither(bool random, uint64_t key, int64_t row) : random_(random), key_(key), row_(static_cast<uint32_t>(row)) {}

  // For elements [c, c + W); c rises in steps of W.
  WHET_INLINE_MEMBER VF at(int64_t c) {
    if (!random_) return VF{};
    if (c / kBytes != block_) {
      block_ = c / kBytes;
      random_block(static_cast<uint32_t>(block_), row_, 0, 0, key_, words_);
    }
    const int64_t i = c % kBytes;
    const VU bytes = (load(words_ + i % kBlock) >> static_cast<int>(8 * (i / kBlock))) & 0xFFu;
    return __builtin_convertvector(reinterpret_cast<VI>(bytes), VF) * splat(1.0f / 256) - splat(127.5f / 256);
  }

 private:
  const bool random_;
  const uint64_t key_;
  const uint32_t row_;
  int64_t block_ = -1;
  alignas(64) uint32_t words_[kBlock];
};

// Elements [first, first + n) of a row -> q, their scale and their sum. `first` is a multiple of 64.
static inline void quantise(const float* x, int64_t first, int64_t n, Dither& dither, int8_t* q, float* scale, int32_t* sum) {
  const Scale s = scale_of(largest_of(x + first, n));
  VI total{};
  for_vectors(n, [&](int64_t c, int lanes) {
    const VI whole = nearest(get(x + first + c, lanes) * splat(s.inverse) + dither.at(first + c));
    const VB bytes = __builtin_convertvector(whole, VB);
    if (lanes == W) {
      *reinterpret_cast<VBMem*>(q + first + c) = bytes;
      total += whole;
      return;
    }
    std::memcpy(q + first + c, &bytes, static_cast<size_t>(lanes));
    for (int i = 0; i < lanes; ++i) total[i] += whole[i];
  });
  *scale = s.value;
  *sum = 0;
  for (int i = 0; i < W; ++i) *sum += total[i];
}

}  // namespace WHET_ISA
}  // namespace whet
