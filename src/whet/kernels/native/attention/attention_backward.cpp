// Attention within each row, backward: the weights are recomputed from the log-sum-exp, block by block (Dao et al. 2022).
//
// With P the softmax, M the mask times 1 / (1 - p), Pd = P M:  dV = Pd' dO,  dP = M (dO V'),
// dS = P (dP - D) with D the row sums of dO O,  dQ = scale dS K,  dK = scale dS' Q,  dbias = the sums of dS by distance.
// What relative vectors add is in attention_relative_backward.h.
#include <initializer_list>

#include "attention_relative_backward.h"

namespace whet {
namespace WHET_ISA {
namespace {

// Queries per block, at most. Half as many under a causal mask or a window, which waste half of a block at their edge.
constexpr int64_t kQueries = kMostQueries;

struct Workspace {
  float *keys, *key_panels, *value_panels, *dkeys, *dvalues;
  float *queries, *dout, *queries_by_token, *dout_by_token, *dqueries, *scores, *dscores, *by_key, *top, *dots, *dbias;
  RelativeSpace relative;

  static int64_t size(int64_t max_seqlen, int64_t padded) {
    return 5 * round_up(max_seqlen, kPanel) * padded + 5 * kQueries * padded + 3 * kQueries * kPanel + 2 * kQueries +
           2 * max_seqlen + 3 * W + 16 * 16;
  }
  Workspace(int64_t max_seqlen, int64_t padded, bool is_relative) {
    const int64_t more = is_relative ? RelativeSpace::size(max_seqlen, padded) : 0;
    Cutter cut{scratch(static_cast<size_t>(size(max_seqlen, padded) + more))};
    const int64_t row = round_up(max_seqlen, kPanel) * padded;
    for (float** piece : {&keys, &key_panels, &value_panels, &dkeys, &dvalues}) *piece = cut.take(row);
    for (float** piece : {&queries, &dout, &queries_by_token, &dout_by_token, &dqueries})
      *piece = cut.take(kQueries * padded);
    for (float** piece : {&scores, &dscores, &by_key}) *piece = cut.take(kQueries * kPanel);
    for (float** piece : {&top, &dots}) *piece = cut.take(kQueries);
    dbias = cut.take(2 * max_seqlen + 3 * W);
    if (is_relative) relative.take(cut, max_seqlen, padded);
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
  Backward(const Attention& args, const RelativeTables<T>& tables, int64_t max_seqlen)
      : a(args),
        by_distance(tables),
        group(args.heads / args.key_heads),
        padded(round_up(args.head_width, W)),
        depth(units<T>(args.head_width)),
        block(args.causal || args.window >= 0 ? kQueries / 2 : kQueries),
        w(max_seqlen, padded, args.places != nullptr) {}

  // `sums`: where the gradients of relative vectors are added.
  void run(const Item& item, DistanceGradients sums) {
    const Span row{item.start, item.length, item.head}, keys{item.start, item.keys, item.head};
    const size_t bytes = static_cast<size_t>(item.length * padded) * sizeof(float);
    lay_in_panels<T>(a.v, keys, a.head_width, w.keys, w.value_panels);
    lay_in_panels<T>(a.k, keys, a.head_width, w.keys, w.key_panels);
    lay_by_token<T>(a.k, keys, a.head_width, w.keys);
    if (a.places) {
      gather<T>(a.k, keys, a.head_width, w.relative.keys);
      gather_wide<T>(a.k, keys, a.head_width, w.relative.wide_keys);
    }
    std::memset(w.dkeys, 0, bytes);
    std::memset(w.dvalues, 0, bytes);
    for (int64_t head = item.head * group; head < (item.head + 1) * group; ++head) {
      if (a.dbias) std::memset(w.dbias, 0, static_cast<size_t>(2 * item.length + 3 * W) * sizeof(float));
      for (int64_t q = 0; q < item.length; q += block)
        back(item, {item.start + q, smaller(block, item.length - q), head}, sums);
      if (a.dbias) keep_dbias(item, head);
    }
    spread<T>(w.dkeys, a.dk, row, a.head_width, a.scale);
    spread<T>(w.dvalues, a.dv, row, a.head_width, 1.0f);
  }

 private:
  // Keeps the sums of this row, by distance from 1 - length on.
  void keep_dbias(const Item& item, int64_t head) const {
    const size_t n = static_cast<size_t>(2 * item.length - 1);
    std::memcpy(a.dbias_rows + 2 * (item.start * a.heads + head * item.length), w.dbias + W, n * sizeof(float));
  }

  void back(const Item& item, Span span, DistanceGradients sums) {
    gather<T>(a.q, span, a.head_width, w.queries);
    if (a.places) gather_wide<T>(a.q, span, a.head_width, w.relative.wide_queries);
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
    const int64_t first = span.token - item.start;
    const Range seen = Band(a, item).of(first, span.n);
    if (seen.empty()) std::memset(w.dqueries, 0, static_cast<size_t>(span.n * padded) * sizeof(float));
    for (int64_t key = seen.begin; key < seen.end; key += kPanel)
      add_panel(item, span, {{first, span.n, key, smaller(kPanel, seen.end - key)}, key == seen.begin}, sums);
    spread<T>(w.dqueries, a.dq, span, a.head_width, a.scale);
  }

  float dot(const T* dout, const T* out) const {
    VF total = VF{};
    for_vectors(a.head_width, [&](int64_t c, int n) { total += get(dout + c, n) * get(out + c, n); });
    return lane_sum(total);
  }

  struct Panel : Rectangle {
    bool is_first;
  };

  void add_panel(const Item& item, Span span, Panel panel, DistanceGradients sums) {
    using Unit = UnitOf<T>;
    const int64_t key = panel.key, n_keys = panel.n_keys;
    scores<T>(w.queries, span.n, w.key_panels, depth, key, n_keys, {w.scores, kPanel});
    scores<T>(w.dout, span.n, w.value_panels, depth, key, n_keys, {w.dscores, kPanel});
    if (a.bias) add_bias(a, span.head, panel, {w.scores, kPanel});
    if (a.places) add_vectors(span.head, panel);
    differentiate(item, span.head, panel);
    const Size by_key{n_keys, padded, units<T>(span.n)};
    const float* dout = kPaired<T> ? w.dout_by_token : w.dout;
    const float* queries = kPaired<T> ? w.queries_by_token : w.queries;
    product<Unit>(by_key, {w.scores, 1, kPanel}, dout, padded, {w.dvalues + key * padded, padded}, true);
    product<Unit>(by_key, {kPaired<T> ? w.by_key : w.dscores, 1, kPanel}, queries, padded,
                  {w.dkeys + key * padded, padded}, true);
    product<Unit>({span.n, padded, units<T>(n_keys)}, {w.dscores, kPanel, 1}, w.keys + key / Unit::n * padded, padded,
                  {w.dqueries, padded}, !panel.is_first);
    if (a.places) differentiate_vectors(span.head, panel, sums);
  }

  void add_vectors(int64_t head, Panel panel) const {
    const int64_t ld = round_up(depth, W);
    add_relative<T>(by_distance, head, {w.queries, ld, panel.first, panel.n},
                    {w.relative.keys + panel.key * ld, ld, panel.key, panel.n_keys}, w.relative, {w.scores, kPanel});
  }

  void differentiate_vectors(int64_t head, Panel panel, DistanceGradients sums) const {
    clear_around(w.relative, panel.n, panel.n_keys);
    const float* keys = w.relative.wide_keys + panel.key * padded;
    const BandGradients of{w.relative.dscores, panel, padded};
    back_by_query(of, by_distance.of_keys(head), w.relative.wide_queries, w.dqueries, sums.keys);
    back_by_key(of, by_distance.of_queries(head), keys, w.dkeys + panel.key * padded, sums.queries);
  }

  void differentiate(const Item& item, int64_t head, const Panel& panel) {
    const PanelMask mask(a, panel.key, item.slot, head);
    const Band band(a, item);
    const Range all{0, kPanel};
    alignas(64) uint32_t words[2][kPanel];
    for (int64_t i = 0; i < panel.n; i += 2) {
      const int64_t query = panel.first + i;
      const Range first = band.of(query).from(panel.key);
      const Range second = i + 1 < panel.n ? band.of(query + 1).from(panel.key) : Range{0, 0};
      mask.draw(query, words[0]);
      mask.draw(query + 1, words[1]);
      float* dbias = a.dbias ? w.dbias + W + panel.key - query + item.length - 1 : nullptr;
      float* dscores = a.places ? w.relative.dscores : nullptr;
      if (panel.n_keys == kPanel && first.begin <= 0 && first.end >= kPanel && second.begin <= 0 &&
          second.end >= kPanel)
        differentiate_pair({&mask, words, dbias, dscores}, i, kPanel, {all, all});
      else
        differentiate_pair({&mask, words, dbias, dscores}, i, panel.n_keys, {first, second});
    }
  }

  struct Seen {
    Range by[2];
  };

  struct Differentiator {
    const PanelMask* mask;
    const uint32_t (*words)[kPanel];
    float* dbias;    // where the first query's gradients by distance are added; null: not wanted
    float* dscores;  // dS / scale once more, for relative vectors; null: not wanted
  };

  // In: scores, and dO V' in dscores. Out: Pd in scores, dS / scale in dscores. Keys that are not attended to become 0.
  WHET_INLINE_MEMBER void differentiate_pair(Differentiator with, int64_t i, int64_t n, Seen seen) {
    const Places places{w.scores, w.dscores, w.by_key};
    const VF scale = splat(a.scale * kLog2E), keep = splat(a.keep_scale);
    for (int64_t c = 0; c < n; c += W) {
      Gradients g;
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) {
        const int64_t at = (i + h) * kPanel + c;
        const VF found = power_of_two(load(w.scores + at) * scale - splat(w.top[i + h]));
        const VF weight = within(found, c, seen.by[h], 0.0f);
        g.weight[h] = with.mask->apply(weight * keep, with.words[h] + c);
        const VF dweight = within(load(w.dscores + at), c, seen.by[h], 0.0f);
        g.dscore[h] = g.weight[h] * dweight - weight * splat(w.dots[i + h]);
        if (with.dbias) store(with.dbias + c - h, load(with.dbias + c - h) + g.dscore[h]);
        if (with.dscores) store(with.dscores + (i + h) * kLine + c, g.dscore[h]);
      }
      places.put(UnitOf<T>(), i, c, g);
    }
  }

  const Attention& a;
  const RelativeTables<T>& by_distance;
  const int64_t group, padded, depth, block;
  const Workspace w;
};

// Adds the rows' gradients of the bias in the order of the rows, so that the sum is the same on any number of threads.
void sum_dbias(const Attention& a) {
  const int64_t width = 2 * a.reach + 1;
#pragma omp parallel for schedule(static)
  for (int64_t head = 0; head < a.heads; ++head) {
    float* total = a.dbias + head * width;
    std::memset(total, 0, static_cast<size_t>(width) * sizeof(float));
    for (int64_t r = 0; r < a.n_rows; ++r) {
      const int64_t start = a.cu_seqlens[r], length = a.cu_seqlens[r + 1] - start;
      const float* row = a.dbias_rows + 2 * (start * a.heads + head * length);
      for (int64_t d = 0; d < 2 * length - 1; ++d) total[a.reach + 1 - length + d] += row[d];
    }
  }
}

template <class T>
void backward(const Attention& a) {
  const WorkList work(a, a.key_heads, INT64_MAX / 2);
  const RelativeTables<T> tables(a, work.max_seqlen, true);
  DistanceSums<T> sums(tables, work, a.places ? kMostGroups : INT32_MAX);
#pragma omp parallel
  {
    Backward<T> one(a, tables, work.max_seqlen);
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < sums.n_groups * a.key_heads; ++i) {
      const int64_t group = i / a.key_heads, head = i % a.key_heads;
      const DistanceGradients of = sums.begin(group, head);
      for (int64_t row = sums.first(group); row < sums.first(group + 1); ++row)
        one.run(work.items[row * a.key_heads + head], of);
    }
  }
  if (a.dbias) sum_dbias(a);
  if (a.places) sums.finish();
}

}  // namespace

WHET_OPERATOR(attention_backward, Attention) { a.dtype == kBfloat16 ? backward<bf16>(a) : backward<float>(a); }

}  // namespace WHET_ISA
}  // namespace whet
