// What the forward and the backward pass of packed attention share: the work list, packing, and score blocks.
#pragma once

#include <cstdlib>

#include "mathfn.h"
#include "operators.h"
#include "philox.h"
#include "product.h"
#include "scratch.h"

namespace whet {
namespace WHET_ISA {

constexpr int64_t kQueries = 48;   // queries a block: a multiple of the tile height
constexpr int64_t kPanel = 64;     // keys a panel: one block of random words

inline int64_t round_up(int64_t x, int64_t unit) { return (x + unit - 1) / unit * unit; }
inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// One piece of work: a head of a row, and the queries from `first` on that belong to it.
struct Item {
  int64_t start, length, head, first;
  uint32_t slot;
};

struct RowLength {
  int64_t length, row;
};

static inline int longest_first(const void* a, const void* b) {
  const int64_t x = static_cast<const RowLength*>(a)->length, y = static_cast<const RowLength*>(b)->length;
  return x < y ? 1 : x > y ? -1 : 0;
}

// All pieces of a call, longest rows first, so that the last threads to finish have little left.
class WorkList {
 public:
  // Cuts each of `heads` heads of each row into pieces of `chunk` queries.
  WorkList(const Attention& a, int64_t heads, int64_t chunk) {
    RowLength* rows = static_cast<RowLength*>(std::malloc(static_cast<size_t>(a.n_rows + 1) * sizeof(RowLength)));
    for (int64_t r = 0; r < a.n_rows; ++r) {
      rows[r] = {a.row_starts[r + 1] - a.row_starts[r], r};
      count += heads * ((rows[r].length + chunk - 1) / chunk);
      longest = rows[r].length > longest ? rows[r].length : longest;
    }
    std::qsort(rows, static_cast<size_t>(a.n_rows), sizeof(RowLength), longest_first);
    items = static_cast<Item*>(std::malloc(static_cast<size_t>(count + 1) * sizeof(Item)));
    int64_t n = 0;
    for (int64_t i = 0; i < a.n_rows; ++i) {
      const int64_t row = rows[i].row;
      const uint32_t slot = a.threshold ? static_cast<uint32_t>(a.row_slots[row]) : 0;
      for (int64_t head = 0; head < heads; ++head)
        for (int64_t first = 0; first < rows[i].length; first += chunk)
          items[n++] = {a.row_starts[row], rows[i].length, head, first, slot};
    }
    std::free(rows);
  }
  ~WorkList() { std::free(items); }
  WorkList(const WorkList&) = delete;
  WorkList& operator=(const WorkList&) = delete;

  Item* items = nullptr;
  int64_t count = 0, longest = 0;
};

// Cuts one allocation into aligned pieces.
struct Cutter {
  float* next;
  float* take(int64_t n) {
    float* piece = next;
    next += round_up(n, 16);
    return piece;
  }
};

// `n` tokens of one head from `token` on.
struct Span {
  int64_t token, n, head;
};

template <class T>
static const T* row_of(const View& view, int64_t token, int64_t head) {
  return static_cast<const T*>(view.data) + token * view.token_stride + head * view.head_stride;
}

// rows (n, padded) = the span times scale, as fp32, with zeros behind `width`.
template <class T>
static void gather(const View& view, Span span, int64_t width, float scale, float* rows) {
  const int64_t padded = round_up(width, W);
  for (int64_t i = 0; i < span.n; ++i) {
    const T* from = row_of<T>(view, span.token + i, span.head);
    float* to = rows + i * padded;
    for_vectors(width, [&](int64_t c, int lanes) { store(to + c, get(from + c, lanes) * splat(scale)); });
  }
}

// The opposite of gather.
template <class T>
static void spread(const float* rows, const View& view, Span span, int64_t width, float scale) {
  const int64_t padded = round_up(width, W);
  for (int64_t i = 0; i < span.n; ++i) {
    T* to = const_cast<T*>(row_of<T>(view, span.token + i, span.head));
    const float* from = rows + i * padded;
    for_vectors(width, [&](int64_t c, int lanes) { put(to + c, load(from + c) * splat(scale), lanes); });
  }
}

WHET_INLINE void transpose4(const float* from, int64_t ld, float* to, int64_t ld_to) {
  const V4 r0 = *reinterpret_cast<const V4Mem*>(from), r1 = *reinterpret_cast<const V4Mem*>(from + ld);
  const V4 r2 = *reinterpret_cast<const V4Mem*>(from + 2 * ld), r3 = *reinterpret_cast<const V4Mem*>(from + 3 * ld);
  const V4 a = WHET_SHUFFLE(r0, r1, 0, 4, 1, 5), b = WHET_SHUFFLE(r2, r3, 0, 4, 1, 5);
  const V4 c = WHET_SHUFFLE(r0, r1, 2, 6, 3, 7), d = WHET_SHUFFLE(r2, r3, 2, 6, 3, 7);
  *reinterpret_cast<V4Mem*>(to) = WHET_SHUFFLE(a, b, 0, 1, 4, 5);
  *reinterpret_cast<V4Mem*>(to + ld_to) = WHET_SHUFFLE(a, b, 2, 3, 6, 7);
  *reinterpret_cast<V4Mem*>(to + 2 * ld_to) = WHET_SHUFFLE(c, d, 0, 1, 4, 5);
  *reinterpret_cast<V4Mem*>(to + 3 * ld_to) = WHET_SHUFFLE(c, d, 2, 3, 6, 7);
}

// panels (n / kPanel, padded, kPanel): the rows (n, padded) transposed panel by panel; missing keys are zero.
static void transpose(const float* rows, int64_t n, int64_t padded, float* panels) {
  for (int64_t first = 0; first < n; first += kPanel, panels += padded * kPanel) {
    const int64_t keys = smaller(kPanel, n - first);
    if (keys < kPanel) std::memset(panels, 0, static_cast<size_t>(padded * kPanel) * sizeof(float));
    const float* from = rows + first * padded;
    int64_t j = 0;
    for (; j + 4 <= keys; j += 4)
      for (int64_t c = 0; c < padded; c += 4)
        transpose4(from + j * padded + c, padded, panels + c * kPanel + j, kPanel);
    for (; j < keys; ++j)
      for (int64_t c = 0; c < padded; ++c) panels[c * kPanel + j] = from[j * padded + c];
  }
}

// block (n_queries, round_up(n_keys, kPanel)) = queries times the panels that begin with key `first_key`.
static inline void scores(const float* queries, int64_t n_queries, const float* panels, int64_t padded,
                          int64_t first_key, int64_t n_keys, Block block) {
  for (int64_t j = 0; j < n_keys; j += kPanel)
    product({n_queries, kPanel, padded}, {queries, padded, 1}, panels + (first_key + j) * padded, kPanel,
            {block.data + j, block.ld}, false);
}

// The dropout of one query's weights. Call with rising keys, in steps of W from a multiple of kPanel on.
struct WeightMask {
  const Attention& a;
  uint32_t query, slot, head;
  alignas(64) uint32_t words[kBlock];

  WeightMask(const Attention& args, int64_t query_, uint32_t slot_, int64_t head_)
      : a(args), query(static_cast<uint32_t>(query_)), slot(slot_), head(static_cast<uint32_t>(head_)) {}

  WHET_INLINE_MEMBER VF apply(VF weight, int64_t key) {
    if (a.threshold == 0) return weight;
    if (key % kBlock == 0) random_block(static_cast<uint32_t>(key / kBlock), query, slot, 1 + head, a.key, words);
    return select(reinterpret_cast<VI>(load(words + key % kBlock) >= splat_u(a.threshold)), weight, VF{});
  }
};

// Lanes at and behind `limit` become `fill`, where x holds the elements from c on.
WHET_INLINE VF within(VF x, int64_t c, int64_t limit, float fill) {
  if (c + W <= limit) return x;
  return select(lane_numbers() < splat_i(static_cast<int32_t>(limit - c)), x, splat(fill));
}

}  // namespace WHET_ISA
}  // namespace whet
