// Philox-4x32 with 7 rounds (Salmon et al. 2011), 64 words at a time, laid out for vectors.
//
// The lanes l = 0..15 of a block hold the counters (16 * block + l, c1, c2, c3); word w of lane l belongs to element
// 64 * block + 16 * w + l. So the words of a block are the masks of 64 neighbouring elements, in order.
#pragma once

#include "operator.h"
#include "vec.h"

namespace whet {
namespace WHET_ISA {

// Keep an element iff its random word >= threshold, times scale. threshold 0: no dropout, slot and position unread.
WHET_ARGUMENTS(Mask,
  uint64_t key;
  uint32_t threshold;
  float scale;
  const int32_t* slot;      // (rows,)
  const int32_t* position;  // (rows,)
)

constexpr int kBlock = 64;                      // elements that one block serves
constexpr int kPairs = 16 / W > 0 ? 16 / W : 1;  // vectors of 16 lanes in all
constexpr uint32_t kM0 = 0xD2511F53u, kM1 = 0xCD9E8D57u;
constexpr uint32_t kWeyl0 = 0x9E3779B9u, kWeyl1 = 0xBB67AE85u;
constexpr int kRounds = 7;

// The four words of a counter; each 64-bit lane holds one word in its low half, its high half is undefined.
struct Words {
  VL c0, c1, c2, c3;
};

WHET_INLINE VL splat_l(uint64_t x) { return x + VL{}; }

WHET_INLINE void round_of(Words& s, uint32_t k0, uint32_t k1) {
  const VL p0 = multiply_low_words(s.c0, splat_l(kM0));
  const VL p1 = multiply_low_words(s.c2, splat_l(kM1));
  s.c0 = (p1 >> 32) ^ s.c1 ^ splat_l(k0);
  s.c1 = p1;
  s.c2 = (p0 >> 32) ^ s.c3 ^ splat_l(k1);
  s.c3 = p0;
}

WHET_INLINE Words philox(VL counter, uint32_t c1, uint32_t c2, uint32_t c3, uint64_t key) {
  Words s{counter, splat_l(c1), splat_l(c2), splat_l(c3)};
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int r = 0; r < kRounds; ++r, k0 += kWeyl0, k1 += kWeyl1) round_of(s, k0, k1);
  return s;
}

WHET_INLINE VU interleave(VL even, VL odd) {
  return reinterpret_cast<VU>((even & 0xFFFFFFFFu) | (odd << 32));
}

// Even and odd lanes are computed separately, because a widening product takes every other lane: no shuffle is needed before the end.
static __attribute__((noinline)) void random_block(uint32_t block, uint32_t c1, uint32_t c2, uint32_t c3, uint64_t key,
                                                   uint32_t* words) {
  VL lanes;
  for (int i = 0; i < W / 2; ++i) lanes[i] = 2 * i;
  for (int v = 0; v < kPairs; ++v) {
    const VL first = lanes + splat_l(16ull * block + static_cast<uint64_t>(v) * W);
    const Words even = philox(first, c1, c2, c3, key);
    const Words odd = philox(first + 1, c1, c2, c3, key);
    store(words + 0 + v * W, interleave(even.c0, odd.c0));
    store(words + 16 + v * W, interleave(even.c1, odd.c1));
    store(words + 32 + v * W, interleave(even.c2, odd.c2));
    store(words + 48 + v * W, interleave(even.c3, odd.c3));
  }
}

// The words of one block under one (c2, c3) for any c1. The first three rounds hardly depend on c1, so most of them is
// computed once here: a draw costs 9 vector products instead of 14, and gives the same words as random_block.
class BlockDraws {
 public:
  BlockDraws(uint32_t block, uint32_t c2, uint32_t c3, uint64_t key)
      : key0(static_cast<uint32_t>(key)), key1(static_cast<uint32_t>(key >> 32)) {
    const uint64_t product = static_cast<uint64_t>(c2) * kM1;
    after_first = static_cast<uint32_t>(product >> 32) ^ key0;
    VL lanes;
    for (int i = 0; i < W / 2; ++i) lanes[i] = 2 * i;
    for (int v = 0; v < 2 * kPairs; ++v) {
      const VL counter = lanes + splat_l(16ull * block + static_cast<uint64_t>(v / 2 * W + v % 2));
      const VL p0 = multiply_low_words(counter, splat_l(kM0));
      const VL p1 = multiply_low_words((p0 >> 32) ^ splat_l(c3 ^ key1), splat_l(kM1));
      const VL c0 = (p1 >> 32) ^ splat_l(static_cast<uint32_t>(product) ^ key_0(1));
      const VL third = multiply_low_words(c0, splat_l(kM0));
      shared[v] = {p1 ^ splat_l(key_0(2)), p0 ^ splat_l(key_1(1)), third, (third >> 32) ^ splat_l(key_1(2))};
    }
  }

  // words (64,) under c1.
  WHET_INLINE_MEMBER void draw(uint32_t c1, uint32_t* words) const {
    const uint64_t product = static_cast<uint64_t>(after_first ^ c1) * kM0;
    const VL high = splat_l(product >> 32), low = splat_l(static_cast<uint32_t>(product));
    for (int v = 0; v < kPairs; ++v) {
      const Words even = finish(shared[2 * v], high, low), odd = finish(shared[2 * v + 1], high, low);
      store(words + 0 + v * W, interleave(even.c0, odd.c0));
      store(words + 16 + v * W, interleave(even.c1, odd.c1));
      store(words + 32 + v * W, interleave(even.c2, odd.c2));
      store(words + 48 + v * W, interleave(even.c3, odd.c3));
    }
  }

 private:
  // Of the third round: what meets the first word, the factor's part, the last word, and what meets the third word.
  struct Shared {
    VL first, factor, last, third;
  };

  uint32_t key_0(uint32_t round) const { return key0 + round * kWeyl0; }
  uint32_t key_1(uint32_t round) const { return key1 + round * kWeyl1; }

  WHET_INLINE_MEMBER Words finish(const Shared& s, VL high, VL low) const {
    const VL p1 = multiply_low_words(s.factor ^ high, splat_l(kM1));
    Words w{(p1 >> 32) ^ s.first, p1, s.third ^ low, s.last};
#pragma GCC unroll 4
    for (uint32_t r = 3; r < kRounds; ++r) round_of(w, key_0(r), key_1(r));
    return w;
  }

  uint32_t key0, key1, after_first;
  Shared shared[2 * kPairs];
};

// The dropout mask of one token of a hidden state: a function of (slot, position, channel).
struct RowMask {
  const Mask& mask;
  uint32_t slot, position;
  alignas(64) uint32_t words[kBlock];

  RowMask(const Mask& m, int64_t token)
      : mask(m),
        slot(m.threshold ? static_cast<uint32_t>(m.slot[token]) : 0),
        position(m.threshold ? static_cast<uint32_t>(m.position[token]) : 0) {}

  // Elements [c, c + W) times their factor, 0 or 1 / (1 - p). Call with c rising from 0 in steps of W.
  WHET_INLINE_MEMBER VF apply(VF x, int64_t c) {
    if (mask.threshold == 0) return x;
    if (c % kBlock == 0) random_block(static_cast<uint32_t>(c / kBlock), position, slot, 0, mask.key, words);
    const VI keep = reinterpret_cast<VI>(load(words + c % kBlock) >= splat_u(mask.threshold));
    return select(keep, x * splat(mask.scale), VF{});
  }
};

}  // namespace WHET_ISA
}  // namespace whet
