// Attention within each row, backward: the weights are recomputed from the log-sum-exp, block by block (Dao et al. 2022).
//
// With P the softmax, M the mask times 1 / (1 - p), Pd = P M:  dV = Pd' dO,  dP = M (dO V'),
// dS = P (dP - D) with D the row sums of dO O,  dQ = scale dS K,  dK = scale dS' Q.
#include <initializer_list>

#include "attention.h"

namespace whet {
namespace WHET_ISA {
namespace {

// Queries per block, at most. Half as many under a causal mask, which wastes half of the block on the diagonal.
constexpr int64_t kQueries = 96;

struct Workspace {
  float *keys, *key_panels, *value_panels, *dkeys, *dvalues;
  float *queries, *dout, *queries_by_token, *dout_by_token, *dqueries, *scores, *dscores, *by_key, *top, *dots;

  static int64_t size(int64_t max_seqlen, int64_t padded) {
    return 5 * round_up(max_seqlen, kPanel) * padded + 5 * kQueries * padded + 3 * kQueries * kPanel + 2 * kQueries +
           15 * 16;
  }
  Workspace(int64_t max_seqlen, int64_t padded) {
    Cutter cut{scratch(static_cast<size_t>(size(max_seqlen, padded)))};
    const int64_t row = round_up(max_seqlen, kPanel) * padded;
    for (float** piece : {&keys, &key_panels, &value_panels, &dkeys, &dvalues}) *piece = cut.take(row);
    for (float** piece : {&queries, &dout, &queries_by_token, &dout_by_token, &dqueries})
      *piece = cut.take(kQueries * padded);
    for (float** piece : {&scores, &dscores, &by_key}) *piece = cut.take(kQueries * kPanel);
    for (float** piece : {&top, &dots}) *piece = cut.take(kQueries);
  }
};

// Pd and dS / scale of the same keys, of two queries.
struct Gradients {
  VF weight[2], dscore[2];
};

// Their destinations: Pd over the scores, dS once by query and once by key, as units.
struct Places {
  float *weights, *dscores, *by_key;

  WHET_INLINE_MEMBER void put(Singles, int64_t i, int64_t c, const Gradients& g) const {
    for (int h = 0; h < 2; ++h) {
      store(weights + (i + h) * kPanel + c, g.weight[h]);
      store(dscores + (i + h) * kPanel + c, g.dscore[h]);
    }
  }
#if defined(__AVX512BF16__)
  WHET_INLINE_MEMBER void put(Pairs, int64_t i, int64_t c, const Gradients& g) const {
    const __m512i d = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(g.dscore[1], g.dscore[0]));
    const __m512i p = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(g.weight[1], g.weight[0]));
    store(weights + i / 2 * kPanel + c, zipped(p));
    store(by_key + i / 2 * kPanel + c, zipped(d));
    float* row = dscores + i * kPanel + c / 2;
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(row), _mm512_castsi512_si256(d));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(row + kPanel), _mm512_extracti64x4_epi64(d, 1));
  }
  // From 16 elements of each of two queries, the pairs of each key.
  static WHET_INLINE_MEMBER VF zipped(__m512i x) {
    const __m512i low = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(x));
    const __m512i high = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(x, 1));
    return reinterpret_cast<VF>(_mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
  }
#endif
};

template <class T>
class Backward {
 public:
  Backward(const Attention& args, int64_t max_seqlen)
      : a(args),
        group(args.heads / args.key_heads),
        padded(round_up(args.head_width, W)),
        depth(units<T>(args.head_width)),
        block(args.causal ? kQueries / 2 : kQueries),
        w(max_seqlen, padded) {}

  void run(const Item& item) {
    const Span row{item.start, item.length, item.head}, keys{item.start, item.keys, item.head};
    const size_t bytes = static_cast<size_t>(item.length * padded) * sizeof(float);
    lay_in_panels<T>(a.v, keys, a.head_width, w.keys, w.value_panels);
    lay_in_panels<T>(a.k, keys, a.head_width, w.keys, w.key_panels);
    lay_by_token<T>(a.k, keys, a.head_width, w.keys);
    std::memset(w.dkeys, 0, bytes);
    std::memset(w.dvalues, 0, bytes);
    for (int64_t head = item.head * group; head < (item.head + 1) * group; ++head)
      for (int64_t q = 0; q < item.length; q += block)
        back(item, {item.start + q, smaller(block, item.length - q), head});
    spread<T>(w.dkeys, a.dk, row, a.head_width, a.scale);
    spread<T>(w.dvalues, a.dv, row, a.head_width, 1.0f);
  }

 private:
  void back(const Item& item, Span span) {
    gather<T>(a.q, span, a.head_width, w.queries);
    gather<T>(a.dout, span, a.head_width, w.dout);
    if (kPaired<T>) {
      lay_by_token<T>(a.q, span, a.head_width, w.queries_by_token);
      lay_by_token<T>(a.dout, span, a.head_width, w.dout_by_token);
    }
    for (int64_t i = 0; i < span.n; ++i) {
      w.top[i] = a.lse[(span.token + i) * a.heads + span.head] * kLog2E;
      w.dots[i] = dot(row_of<T>(a.dout, span.token + i, span.head), row_of<T>(a.out, span.token + i, span.head));
    }
    if (span.n % 2) w.top[span.n] = w.dots[span.n] = 0.0f;
    const int64_t first = span.token - item.start, end = a.causal ? first + span.n : item.keys;
    for (int64_t key = 0; key < end; key += kPanel) add_panel(item, span, key, smaller(kPanel, end - key));
    spread<T>(w.dqueries, a.dq, span, a.head_width, a.scale);
  }

  float dot(const T* dout, const T* out) const {
    VF total = VF{};
    for_vectors(a.head_width, [&](int64_t c, int n) { total += get(dout + c, n) * get(out + c, n); });
    return lane_sum(total);
  }

  void add_panel(const Item& item, Span span, int64_t key, int64_t n_keys) {
    using Unit = UnitOf<T>;
    scores<T>(w.queries, span.n, w.key_panels, depth, key, n_keys, {w.scores, kPanel});
    scores<T>(w.dout, span.n, w.value_panels, depth, key, n_keys, {w.dscores, kPanel});
    differentiate(item, span, key, n_keys);
    const Size by_key{n_keys, padded, units<T>(span.n)};
    const float* dout = kPaired<T> ? w.dout_by_token : w.dout;
    const float* queries = kPaired<T> ? w.queries_by_token : w.queries;
    product<Unit>(by_key, {w.scores, 1, kPanel}, dout, padded, {w.dvalues + key * padded, padded}, true);
    product<Unit>(by_key, {kPaired<T> ? w.by_key : w.dscores, 1, kPanel}, queries, padded,
                  {w.dkeys + key * padded, padded}, true);
    product<Unit>({span.n, padded, units<T>(n_keys)}, {w.dscores, kPanel, 1}, w.keys + key / Unit::n * padded, padded,
                  {w.dqueries, padded}, key > 0);
  }

  void differentiate(const Item& item, Span span, int64_t key, int64_t n_keys) {
    const PanelMask mask(a, key, item.slot, span.head);
    alignas(64) uint32_t words[2][kPanel];
    for (int64_t i = 0; i < span.n; i += 2) {
      const int64_t query = span.token + i - item.start;
      const int64_t rest = a.causal ? query + 1 - key : n_keys;
      const int64_t seen[2] = {smaller(n_keys, rest), i + 1 < span.n ? smaller(n_keys, a.causal ? rest + 1 : rest) : 0};
      mask.draw(query, words[0]);
      mask.draw(query + 1, words[1]);
      if (seen[0] == kPanel && seen[1] == kPanel)
        differentiate_pair(mask, words, i, kPanel, {kPanel, kPanel});
      else
        differentiate_pair(mask, words, i, n_keys, {seen[0], seen[1]});
    }
  }

  struct Seen {
    int64_t by[2];
  };

  // In: scores, and dO V' in dscores. Out: Pd in scores, dS / scale in dscores. Keys that are not attended to become 0.
  WHET_INLINE_MEMBER void differentiate_pair(const PanelMask& mask, const uint32_t (*words)[kPanel], int64_t i,
                                             int64_t n, Seen seen) {
    const Places places{w.scores, w.dscores, w.by_key};
    const VF scale = splat(a.scale * kLog2E), keep = splat(a.keep_scale);
    for (int64_t c = 0; c < n; c += W) {
      Gradients g;
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) {
        const int64_t at = (i + h) * kPanel + c;
        const VF found = power_of_two(load(w.scores + at) * scale - splat(w.top[i + h]));
        const VF weight = within(found, c, seen.by[h], 0.0f);
        g.weight[h] = mask.apply(weight * keep, words[h] + c);
        const VF dweight = within(load(w.dscores + at), c, seen.by[h], 0.0f);
        g.dscore[h] = g.weight[h] * dweight - weight * splat(w.dots[i + h]);
      }
      places.put(UnitOf<T>(), i, c, g);
    }
  }

  const Attention& a;
  const int64_t group, padded, depth, block;
  const Workspace w;
};

template <class T>
void backward(const Attention& a) {
  const WorkList work(a, a.key_heads, INT64_MAX / 2);
#pragma omp parallel
  {
    Backward<T> one(a, work.max_seqlen);
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < work.count; ++i) one.run(work.items[i]);
  }
}

}  // namespace

void attention_backward(const Attention& a) { a.dtype == kBfloat16 ? backward<bf16>(a) : backward<float>(a); }

}  // namespace WHET_ISA
}  // namespace whet
