// Attention within each row, forward: blocks of queries against blocks of keys with a running softmax
// (Milakov and Gimelshein 2018; Dao et al. 2022), so that no T x T array exists.
#include <initializer_list>

#include "attention.h"

namespace whet {
namespace WHET_ISA {
namespace {

constexpr int64_t kQueries = 36;          // queries per block, a multiple of the tile height: its scores stay cached
constexpr int64_t kKeys = 512;            // keys per block
constexpr int64_t kRow = kKeys + 16;      // one query's scores to the next's: no power of 2, to avoid cache conflicts
constexpr int64_t kChunk = 16 * kQueries;  // queries per piece of work: several threads share long rows

struct Workspace {
  float *key_panels, *values, *staging, *queries, *out, *scores, *totals, *top, *factor;

  static int64_t size(int64_t max_seqlen, int64_t padded) {
    return 2 * round_up(max_seqlen, kPanel) * padded + kPanel * padded + 2 * kQueries * padded + kQueries * kRow +
           (2 + W) * kQueries + 9 * 16;
  }
  Workspace(int64_t max_seqlen, int64_t padded) {
    Cutter cut{scratch(static_cast<size_t>(size(max_seqlen, padded)))};
    key_panels = cut.take(round_up(max_seqlen, kPanel) * padded);
    values = cut.take(round_up(max_seqlen, kPanel) * padded);
    staging = cut.take(kPanel * padded);
    queries = cut.take(kQueries * padded);
    out = cut.take(kQueries * padded);
    scores = cut.take(kQueries * kRow);
    for (float** piece : {&top, &factor}) *piece = cut.take(kQueries);
    totals = cut.take(kQueries * W);
  }
};

// Writes the weights of neighbouring keys as units, over scores that were already read.
struct WeightRow {
  float* row;

  WHET_INLINE_MEMBER void put(Singles, int64_t c, VF low, VF high) const {
    store(row + c, low);
    store(row + c + W, high);
  }
#if defined(__AVX512BF16__)
  WHET_INLINE_MEMBER void put(Pairs, int64_t c, VF low, VF high) const {
    store(row + c / 2, reinterpret_cast<VF>(_mm512_cvtne2ps_pbh(high, low)));
  }
#endif
};

// `n` queries of a block from `first` on, against `n_keys` keys from `key` on.
struct Part {
  int64_t first, n, key, n_keys;
  bool causal;

  int64_t seen(int64_t i) const {
    const int64_t behind = first + i + 1 - key;
    return !causal || behind > n_keys ? n_keys : behind > 0 ? behind : 0;
  }
};

template <class T>
class Forward {
 public:
  Forward(const Attention& args, int64_t max_seqlen)
      : a(args),
        padded(round_up(args.head_width, W)),
        depth(units<T>(args.head_width)),
        scale(args.scale * kLog2E),
        w(max_seqlen, padded) {}

  void run(const Item& item) {
    const int64_t last = smaller(item.length, item.first + kChunk);
    pack(item, a.causal ? last : item.keys);
    for (int64_t q = item.first; q < last; q += kQueries) attend(item, q, smaller(kQueries, last - q));
  }

 private:
  void pack(const Item& item, int64_t n_keys) {
    const Span keys{item.start, n_keys, item.head / (a.heads / a.key_heads)};
    lay_in_panels<T>(a.k, keys, a.head_width, w.staging, w.key_panels);
    lay_by_token<T>(a.v, keys, a.head_width, w.values);
  }

  void attend(const Item& item, int64_t first, int64_t n) {
    gather<T>(a.q, {item.start + first, n, item.head}, a.head_width, w.queries);
    for (int64_t i = 0; i < n; ++i) {
      w.top[i] = -kInfinity;
      store(w.totals + i * W, VF{});
    }
    const int64_t end = a.causal ? first + n : item.keys;
    for (int64_t key = 0; key < end; key += kKeys)
      add_block(item, {first, n, key, smaller(kKeys, end - key), a.causal != 0});
    finish(item, first, n);
  }

  void add_block(const Item& item, Part part) {
    scores<T>(w.queries, part.n, w.key_panels, depth, part.key, part.n_keys, {w.scores, kRow});
    for (int64_t i = 0; i < part.n; ++i) raise_top(i, part.seen(i), part.key == 0);
    for (int64_t j = 0; j < part.n_keys; j += kPanel) soften(item, part, j);
    if (part.key > 0) shrink(part.n);
    product<UnitOf<T>>({part.n, padded, units<T>(part.n_keys)}, {w.scores, kRow, 1},
                       w.values + part.key / UnitOf<T>::n * padded, padded, {w.out, padded}, part.key > 0);
  }

  // Updates a query's maximum with its first n scores, and computes the factor for earlier sums.
  void raise_top(int64_t i, int64_t n, bool first) {
    const float* s = w.scores + i * kRow;
    VF most = splat(-kInfinity), other = most;
    int64_t c = 0;
    for (; c + 2 * W <= n; c += 2 * W) {
      most = larger(most, load(s + c) * splat(scale));
      other = larger(other, load(s + c + W) * splat(scale));
    }
    for (; c < n; c += W) most = larger(most, within(load(s + c) * splat(scale), c, n, -kInfinity));
    const float block_top = lane_max(larger(most, other));
    const float top = block_top > w.top[i] ? block_top : w.top[i];
    w.factor[i] = first ? 0.0f : power_of_two(splat(w.top[i] - top))[0];
    w.top[i] = top;
    store(w.totals + i * W, load(w.totals + i * W) * splat(w.factor[i]));
  }

  // Turns the scores of one panel into weights, with dropout, and adds them to each query's total.
  void soften(const Item& item, Part part, int64_t j) {
    const PanelMask mask(a, part.key + j, item.slot, item.head);
    alignas(64) uint32_t words[kPanel];
    const int64_t n = smaller(kPanel, part.n_keys - j);
    for (int64_t i = 0; i < part.n; ++i) {
      mask.draw(part.first + i, words);
      const int64_t seen = part.seen(i) - j;
      if (n == kPanel && seen >= kPanel)
        soften_row(w.scores + i * kRow, j, kPanel, kPanel, {&mask, words, w.top[i], w.totals + i * W});
      else
        soften_row(w.scores + i * kRow, j, n, seen, {&mask, words, w.top[i], w.totals + i * W});
    }
  }

  struct Softener {
    const PanelMask* mask;
    const uint32_t* words;
    float top;
    float* totals;
  };

  // Adds the weights of n keys, of which the first `seen` are attended to, to the lanes of the total. Others become 0.
  WHET_INLINE_MEMBER void soften_row(float* s, int64_t j, int64_t n, int64_t seen, Softener with) const {
    VF sum = load(with.totals), weight[2];
    for (int64_t c = 0; c < n; c += 2 * W) {
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) {
        const int64_t at = c + h * W;
        const VF x = load(s + j + at) * splat(scale) - splat(with.top);
        const VF found = within(power_of_two(x), at, seen, 0.0f);
        sum += found;
        weight[h] = with.mask->apply(found, with.words + at);
      }
      WeightRow{s}.put(UnitOf<T>(), j + c, weight[0], weight[1]);
    }
    store(with.totals, sum);
  }

  void shrink(int64_t n) {
    for (int64_t i = 0; i < n; ++i)
      for (int64_t c = 0; c < padded; c += W) {
        float* at = w.out + i * padded + c;
        store(at, load(at) * splat(w.factor[i]));
      }
  }

  void finish(const Item& item, int64_t first, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
      const int64_t token = item.start + first + i;
      const float total = lane_sum(load(w.totals + i * W));
      spread<T>(w.out + i * padded, a.out, {token, 1, item.head}, a.head_width, a.keep_scale / total);
      a.lse[token * a.heads + item.head] = w.top[i] * kLn2 + __builtin_logf(total);
    }
  }

  const Attention& a;
  const int64_t padded, depth;
  const float scale;
  const Workspace w;
};

template <class T>
void forward(const Attention& a) {
  const WorkList work(a, a.heads, kChunk);
#pragma omp parallel
  {
    Forward<T> one(a, work.max_seqlen);
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < work.count; ++i) one.run(work.items[i]);
  }
}

}  // namespace

void attention(const Attention& a) { a.dtype == kBfloat16 ? forward<bf16>(a) : forward<float>(a); }

}  // namespace WHET_ISA
}  // namespace whet
