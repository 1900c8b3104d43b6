// Shared by the forward and the backward pass of packed attention: blocks of scores and the dropout of their weights.
#pragma once

#include "attention_work.h"
#include "mathfn.h"
#include "operator.h"
#include "philox.h"
#include "scratch.h"

namespace whet {
namespace WHET_ISA {

constexpr float kLog2E = 1.44269504089f, kLn2 = 0.693147180560f;

// block (n_queries, n_keys rounded up to W) = queries (n_queries, depth rounded up to W) times the panels from key
// `first_key` on. depth counts units.
template <class T>
static inline void scores(const float* queries, int64_t n_queries, const float* panels, int64_t depth,
                          int64_t first_key, int64_t n_keys, Block block) {
  const int64_t ld = round_up(depth, W);
  for (int64_t j = 0; j < n_keys; j += kPanel)
    product<UnitOf<T>>({n_queries, smaller(kPanel, round_up(n_keys - j, W)), depth}, {queries, ld, 1},
                       panels + (first_key + j) * ld, kPanel, {block.data + j, block.ld}, false);
}

// The dropout of the weights of one panel's keys, query by query.
class PanelMask {
 public:
  PanelMask(const Attention& a, int64_t first_key, uint32_t slot, int64_t head)
      : draws(static_cast<uint32_t>(first_key / kPanel), slot, 1 + static_cast<uint32_t>(head), a.key),
        threshold(a.threshold) {}

  // The random words of one query's kPanel keys; not read without dropout.
  WHET_INLINE_MEMBER void draw(int64_t query, uint32_t* words) const {
    if (threshold) draws.draw(static_cast<uint32_t>(query), words);
  }

  WHET_INLINE_MEMBER VF apply(VF weight, const uint32_t* words) const {
    if (threshold == 0) return weight;
    return select(reinterpret_cast<VI>(load(words) >= splat_u(threshold)), weight, VF{});
  }

 private:
  const BlockDraws draws;
  const uint32_t threshold;
};

// Lanes outside of `kept` become `fill`; x holds the elements from c on.
WHET_INLINE VF within(VF x, int64_t c, Range kept, float fill) {
  if (kept.begin <= c && c + W <= kept.end) return x;
  const VI lanes = lane_numbers();
  const VI inside = (lanes >= splat_i(static_cast<int32_t>(kept.begin - c))) &
                    (lanes < splat_i(static_cast<int32_t>(kept.end - c)));
  return select(inside, x, splat(fill));
}

// Adds the bias by distance to a block of scores that are not scaled yet.
static inline void add_bias(const Attention& a, int64_t head, Rectangle of, Block scores) {
  const float unscaled = 1.0f / a.scale;
  for (int64_t i = 0; i < of.n; ++i) {
    const float* bias = a.bias + head * (2 * a.reach + 1) + (of.key - (of.first + i) + a.reach);
    float* row = scores.data + i * scores.ld;
    for_vectors(of.n_keys, [&](int64_t c, int lanes) {
      store(row + c, load(row + c) + get(bias + c, lanes) * splat(unscaled));
    });
  }
}

}  // namespace WHET_ISA
}  // namespace whet
