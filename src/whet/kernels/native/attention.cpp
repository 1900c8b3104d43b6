// Attention within each row, forward: blocks of queries against blocks of keys with a running softmax
// (Milakov and Gimelshein 2018; Dao et al. 2022), so that no T x T array exists.
#include "attention.h"

namespace whet {
namespace WHET_ISA {
namespace {

constexpr int64_t kKeys = 512;             // keys a block
constexpr int64_t kChunk = 8 * kQueries;   // queries a piece of work: long rows are shared by several threads

struct Workspace {
  float *key_panels, *values, *staging, *queries, *out, *weights, *top, *total, *factor;

  static int64_t size(int64_t longest, int64_t padded) {
    return 2 * round_up(longest, kPanel) * padded + kPanel * padded + 2 * kQueries * padded + kQueries * kKeys +
           3 * kQueries + 9 * 16;
  }
  Workspace(int64_t longest, int64_t padded) {
    Cutter cut{scratch(static_cast<size_t>(size(longest, padded)))};
    key_panels = cut.take(round_up(longest, kPanel) * padded);
    values = cut.take(round_up(longest, kPanel) * padded);
    staging = cut.take(kPanel * padded);
    queries = cut.take(kQueries * padded);
    out = cut.take(kQueries * padded);
    weights = cut.take(kQueries * kKeys);
    top = cut.take(kQueries);
    total = cut.take(kQueries);
    factor = cut.take(kQueries);
  }
};

// A block of keys, and of those how many one query may see.
struct Keys {
  int64_t first, n, limit;
};

// Turns a query's scores into exp(score - top), updates top and total, and returns what earlier sums shrink by.
float soften(float* s, Keys keys, WeightMask& mask, float& top, float& total) {
  const int64_t width = round_up(keys.n, kPanel);
  VF most = splat(-kInfinity);
  for (int64_t c = 0; c < keys.limit; c += W) most = larger(most, within(load(s + c), c, keys.limit, -kInfinity));
  const float block_top = lane_max(most);
  const float new_top = block_top > top ? block_top : top;
  const float shrink = exponential(splat(top - new_top))[0];
  VF sum = VF{};
  int64_t c = 0;
  for (; c < keys.limit; c += W) {
    const VF weight = within(exponential(load(s + c) - splat(new_top)), c, keys.limit, 0.0f);
    sum += weight;
    store(s + c, mask.apply(weight, keys.first + c));
  }
  for (; c < width; c += W) store(s + c, VF{});
  total = total * shrink + lane_sum(sum);
  top = new_top;
  return shrink;
}

template <class T>
class Forward {
 public:
  Forward(const Attention& args, int64_t longest)
      : a(args), padded(round_up(args.head_width, W)), w(longest, padded) {}

  void run(const Item& item) {
    const int64_t last = smaller(item.length, item.first + kChunk);
    pack(item, a.causal ? last : item.length);
    for (int64_t q = item.first; q < last; q += kQueries) attend(item, q, smaller(kQueries, last - q));
  }

 private:
  void pack(const Item& item, int64_t n_keys) {
    const int64_t key_head = item.head / (a.heads / a.key_heads);
    for (int64_t j = 0; j < n_keys; j += kPanel) {
      const Span span{item.start + j, smaller(kPanel, n_keys - j), key_head};
      gather<T>(a.k, span, a.head_width, 1.0f, w.staging);
      transpose(w.staging, span.n, padded, w.key_panels + j * padded);
    }
    gather<T>(a.v, {item.start, n_keys, key_head}, a.head_width, 1.0f, w.values);
  }

  void attend(const Item& item, int64_t first, int64_t n) {
    gather<T>(a.q, {item.start + first, n, item.head}, a.head_width, a.scale, w.queries);
    for (int64_t i = 0; i < n; ++i) {
      w.top[i] = -kInfinity;
      w.total[i] = 0.0f;
    }
    const int64_t end = a.causal ? first + n : item.length;
    for (int64_t key = 0; key < end; key += kKeys) add_block(item, first, n, {key, smaller(kKeys, end - key), 0});
    finish(item, first, n);
  }

  void add_block(const Item& item, int64_t first, int64_t n, Keys keys) {
    scores(w.queries, n, w.key_panels, padded, keys.first, keys.n, {w.weights, kKeys});
    for (int64_t i = 0; i < n; ++i) {
      const int64_t query = first + i;
      const int64_t seen = a.causal ? smaller(keys.n, query + 1 - keys.first) : keys.n;
      WeightMask mask(a, query, item.slot, item.head);
      w.factor[i] = soften(w.weights + i * kKeys, {keys.first, keys.n, seen}, mask, w.top[i], w.total[i]);
    }
    if (keys.first > 0) shrink(n);
    product({n, padded, keys.n}, {w.weights, kKeys, 1}, w.values + keys.first * padded, padded, {w.out, padded},
            keys.first > 0);
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
      spread<T>(w.out + i * padded, a.out, {token, 1, item.head}, a.head_width, a.keep_scale / w.total[i]);
      a.lse[token * a.heads + item.head] = w.top[i] + __builtin_logf(w.total[i]);
    }
  }

  const Attention& a;
  const int64_t padded;
  const Workspace w;
};

template <class T>
void forward(const Attention& a) {
  const WorkList work(a, a.heads, kChunk);
#pragma omp parallel
  {
    Forward<T> one(a, work.longest);
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < work.count; ++i) one.run(work.items[i]);
  }
}

}  // namespace

void attention(const Attention& a) { a.dtype == kBfloat16 ? forward<bf16>(a) : forward<float>(a); }

}  // namespace WHET_ISA
}  // namespace whet
