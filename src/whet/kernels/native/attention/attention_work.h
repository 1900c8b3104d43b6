// The pieces of work of a call to packed attention, and their working memory.
#pragma once

#include <cstdlib>

#include "attention_pack.h"
#include "scratch.h"

namespace whet {
namespace WHET_ISA {

WHET_ARGUMENTS(Attention,
  int64_t n_rows, heads, key_heads, head_width;
  int32_t dtype, causal;
  float scale;
  uint32_t threshold;  // 0: no dropout on the weights
  uint64_t key;
  float keep_scale;
  int32_t window;  // a query sees keys up to this distance before and after it; negative: all
  const int32_t* cu_seqlens;  // (n_rows + 1,)
  const int32_t* row_slots;   // (n_rows,), unread without dropout
  const int32_t* key_counts;  // (n_rows,): keys at the start of a row, later tokens only query; null: all
  View q, k, v, out;
  float* lse;  // (tokens, heads): log of the sum of exp of a query's scores
  View dout, dq, dk, dv;  // backward
  const float* bias;      // (heads, 2 reach + 1): added to the scaled score of key j and query i at j - i + reach; null: 0
  int64_t reach;          // at least the longest row - 1
  float* dbias;           // backward, the gradient of `bias`; null: not wanted
  float* dbias_rows;      // (2 tokens, heads): working memory for it
  // Scores also get scale (q_i . relative_keys[p] + k_j . relative_queries[p]) with p = places[j - i + reach].
  const int32_t* places;  // (2 reach + 1,): rows of the tables; null: no such terms
  int64_t n_places;       // rows of each table
  View relative_keys, relative_queries;    // (n_places, heads, head_width); null data: without this term
  View drelative_keys, drelative_queries;  // backward
)

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
    RowLength* rows = static_cast<RowLength*>(claim(static_cast<size_t>(a.n_rows + 1) * sizeof(RowLength)));
    for (int64_t r = 0; r < a.n_rows; ++r) {
      rows[r] = {a.cu_seqlens[r + 1] - a.cu_seqlens[r], r};
      count += heads * ((rows[r].length + chunk - 1) / chunk);
      max_seqlen = rows[r].length > max_seqlen ? rows[r].length : max_seqlen;
    }
    std::qsort(rows, static_cast<size_t>(a.n_rows), sizeof(RowLength), longest_first);
    items = static_cast<Item*>(claim(static_cast<size_t>(count + 1) * sizeof(Item)));
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
