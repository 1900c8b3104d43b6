// The pieces of work of a call to packed attention, and their working memory.
#pragma once

#include <cstdlib>

#include "attention_pack.h"

namespace whet {
namespace WHET_ISA {

// One piece of work: a head of a row, and the queries from `first` on that belong to it. The row's first `keys` tokens
// are its keys.
struct Item {
  int64_t start, length, keys, head, first;
  uint32_t slot;
};

// The elements from `begin` on, up to `end`; none if end <= begin.
struct Range {
  int64_t begin, end;

  bool empty() const { return end <= begin; }
  Range from(int64_t origin) const { return {begin - origin, end - origin}; }
};

// `n` queries of a row from `first` on, against `n_keys` keys from `key` on.
struct Rectangle {
  int64_t first, n, key, n_keys;
};

// The keys of a row that its queries see: all, those before a query, or those of a window around it.
struct Band {
  int64_t keys, before, after;

  Band(const Attention& a, const Item& item)
      : keys(item.keys), before(a.window < 0 ? kFar : a.window), after(a.causal ? 0 : before) {}

  Range of(int64_t query) const {
    return {query > before ? query - before : 0, smaller(keys, query + after + 1)};
  }
  // The keys that at least one of n queries sees, from the start of a panel on.
  Range of(int64_t first, int64_t n) const { return {of(first).begin / kPanel * kPanel, of(first + n - 1).end}; }

 private:
  static constexpr int64_t kFar = int64_t{1} << 40;
};

struct RowLength {
  int64_t length, row;
};

static inline int longest_first(const void* a, const void* b) {
  const int64_t x = static_cast<const RowLength*>(a)->length, y = static_cast<const RowLength*>(b)->length;
  return x < y ? 1 : x > y ? -1 : 0;
}

// All pieces of a call, longest rows first, so that the last threads finish early.
class WorkList {
 public:
  // Splits each of `heads` heads of each row into pieces of `chunk` queries.
  WorkList(const Attention& a, int64_t heads, int64_t chunk) {
    RowLength* rows = static_cast<RowLength*>(std::malloc(static_cast<size_t>(a.n_rows + 1) * sizeof(RowLength)));
    for (int64_t r = 0; r < a.n_rows; ++r) {
      rows[r] = {a.cu_seqlens[r + 1] - a.cu_seqlens[r], r};
      count += heads * ((rows[r].length + chunk - 1) / chunk);
      max_seqlen = rows[r].length > max_seqlen ? rows[r].length : max_seqlen;
    }
    std::qsort(rows, static_cast<size_t>(a.n_rows), sizeof(RowLength), longest_first);
    items = static_cast<Item*>(std::malloc(static_cast<size_t>(count + 1) * sizeof(Item)));
    int64_t n = 0;
    for (int64_t i = 0; i < a.n_rows; ++i) {
      const int64_t row = rows[i].row;
      const uint32_t slot = a.threshold ? static_cast<uint32_t>(a.row_slots[row]) : 0;
      const int64_t keys = a.key_counts ? a.key_counts[row] : rows[i].length;
      for (int64_t head = 0; head < heads; ++head)
        for (int64_t first = 0; first < rows[i].length; first += chunk)
          items[n++] = {a.cu_seqlens[row], rows[i].length, keys, head, first, slot};
    }
    std::free(rows);
  }
  ~WorkList() { std::free(items); }
  WorkList(const WorkList&) = delete;
  WorkList& operator=(const WorkList&) = delete;

  Item* items = nullptr;
  int64_t count = 0, max_seqlen = 0;
};

// Splits one allocation into aligned pieces.
struct Cutter {
  float* next;
  float* take(int64_t n) {
    float* piece = next;
    next += round_up(n, 16);
    return piece;
  }
};

}  // namespace WHET_ISA
}  // namespace whet
