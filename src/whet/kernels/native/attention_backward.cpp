// Attention within each row, backward: the weights are recomputed from the log-sum-exp, block by block (Dao et al. 2022).
//
// With P the softmax, M the mask times 1 / (1 - p), Pd = P M:  dV = Pd' dO,  dP = M (dO V'),
// dS = P (dP - D) with D the row sums of dO O,  dQ = scale dS K,  dK = scale dS' Q.
#include <initializer_list>

#include "attention.h"

namespace whet {
namespace WHET_ISA {
namespace {

constexpr int64_t kKeys = 256;  // keys a block: two blocks of weights stay in the second-level cache

struct Workspace {
  float *keys, *key_panels, *value_panels, *dkeys, *dvalues, *queries, *dout, *dqueries, *weights, *dweights, *dots;

  static int64_t size(int64_t longest, int64_t padded) {
    return 5 * round_up(longest, kPanel) * padded + 3 * kQueries * padded + 2 * kQueries * kKeys + kQueries + 11 * 16;
  }
  Workspace(int64_t longest, int64_t padded) {
    Cutter cut{scratch(static_cast<size_t>(size(longest, padded)))};
    const int64_t row = round_up(longest, kPanel) * padded;
    for (float** piece : {&keys, &key_panels, &value_panels, &dkeys, &dvalues}) *piece = cut.take(row);
    for (float** piece : {&queries, &dout, &dqueries}) *piece = cut.take(kQueries * padded);
    for (float** piece : {&weights, &dweights}) *piece = cut.take(kQueries * kKeys);
    dots = cut.take(kQueries);
  }
};

// In: scores in s, dO V' in d. Out: Pd in s, dS / scale in d. `limit` keys of `width` are seen.
struct Query {
  float lse, dot, keep_scale;
  int64_t first_key, limit, width;
};

void differentiate(float* s, float* d, Query q, WeightMask& mask) {
  int64_t c = 0;
  for (; c < q.limit; c += W) {
    const VF weight = within(exponential(load(s + c) - splat(q.lse)), c, q.limit, 0.0f);
    const VF dropped = mask.apply(weight * splat(q.keep_scale), q.first_key + c);
    store(s + c, dropped);
    store(d + c, dropped * load(d + c) - weight * splat(q.dot));
  }
  for (; c < q.width; c += W) {
    store(s + c, VF{});
    store(d + c, VF{});
  }
}

template <class T>
class Backward {
 public:
  Backward(const Attention& args, int64_t longest)
      : a(args), group(args.heads / args.key_heads), padded(round_up(args.head_width, W)), w(longest, padded) {}

  void run(const Item& item) {
    const Span row{item.start, item.length, item.head};
    const size_t bytes = static_cast<size_t>(item.length * padded) * sizeof(float);
    gather<T>(a.v, row, a.head_width, 1.0f, w.keys);
    transpose(w.keys, item.length, padded, w.value_panels);
    gather<T>(a.k, row, a.head_width, 1.0f, w.keys);
    transpose(w.keys, item.length, padded, w.key_panels);
    std::memset(w.dkeys, 0, bytes);
    std::memset(w.dvalues, 0, bytes);
    for (int64_t head = item.head * group; head < (item.head + 1) * group; ++head)
      for (int64_t q = 0; q < item.length; q += kQueries)
        back(item, head, q, smaller(kQueries, item.length - q));
    spread<T>(w.dkeys, a.dk, row, a.head_width, 1.0f);
    spread<T>(w.dvalues, a.dv, row, a.head_width, 1.0f);
  }

 private:
  void back(const Item& item, int64_t head, int64_t first, int64_t n) {
    const Span span{item.start + first, n, head};
    gather<T>(a.q, span, a.head_width, a.scale, w.queries);
    gather<T>(a.dout, span, a.head_width, 1.0f, w.dout);
    for (int64_t i = 0; i < n; ++i) w.dots[i] = dot(w.dout + i * padded, row_of<T>(a.out, span.token + i, head));
    const int64_t end = a.causal ? first + n : item.length;
    for (int64_t key = 0; key < end; key += kKeys) add_block(item, span, key, smaller(kKeys, end - key));
    spread<T>(w.dqueries, a.dq, span, a.head_width, a.scale);
  }

  float dot(const float* dout, const T* out) const {
    VF total = VF{};
    for_vectors(a.head_width, [&](int64_t c, int n) { total += load(dout + c) * get(out + c, n); });
    return lane_sum(total);
  }

  void add_block(const Item& item, Span span, int64_t key, int64_t n_keys) {
    scores(w.queries, span.n, w.key_panels, padded, key, n_keys, {w.weights, kKeys});
    scores(w.dout, span.n, w.value_panels, padded, key, n_keys, {w.dweights, kKeys});
    differentiate_rows(item, span, key, n_keys);
    const Size by_key{n_keys, padded, span.n};
    product(by_key, {w.weights, 1, kKeys}, w.dout, padded, {w.dvalues + key * padded, padded}, true);
    product(by_key, {w.dweights, 1, kKeys}, w.queries, padded, {w.dkeys + key * padded, padded}, true);
    product({span.n, padded, n_keys}, {w.dweights, kKeys, 1}, w.keys + key * padded, padded, {w.dqueries, padded},
            key > 0);
  }

  void differentiate_rows(const Item& item, Span span, int64_t key, int64_t n_keys) {
    for (int64_t i = 0; i < span.n; ++i) {
      const int64_t token = span.token + i, query = token - item.start;
      const int64_t seen = a.causal ? smaller(n_keys, query + 1 - key) : n_keys;
      WeightMask mask(a, query, item.slot, span.head);
      const Query q{a.lse[token * a.heads + span.head], w.dots[i], a.keep_scale, key, seen, round_up(n_keys, kPanel)};
      differentiate(w.weights + i * kKeys, w.dweights + i * kKeys, q, mask);
    }
  }

  const Attention& a;
  const int64_t group, padded;
  const Workspace w;
};

template <class T>
void backward(const Attention& a) {
  const WorkList work(a, a.key_heads, INT64_MAX / 2);
#pragma omp parallel
  {
    Backward<T> one(a, work.longest);
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < work.count; ++i) one.run(work.items[i]);
  }
}

}  // namespace

void attention_backward(const Attention& a) { a.dtype == kBfloat16 ? backward<bf16>(a) : backward<float>(a); }

}  // namespace WHET_ISA
}  // namespace whet
