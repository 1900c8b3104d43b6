// Attention within each row, forward: blocks of queries against blocks of keys with a running softmax
// (Milakov and Gimelshein 2018; Dao et al. 2022), so that no T x T array exists.
#include <initializer_list>

#include "attention_relative.h"

namespace whet {
namespace WHET_ISA {
namespace {

constexpr int64_t kQueries = 36;          // queries per block, a multiple of the tile height: its scores stay cached
constexpr int64_t kKeys = 512;            // keys per block
constexpr int64_t kRow = kKeys + 16;      // one query's scores to the next's: no power of 2, to avoid cache conflicts
constexpr int64_t kRelativeQueries = 48;   // with relative vectors: the band of a key then fills complete tiles
constexpr int64_t kChunk = 16 * kQueries;  // queries per piece of work: several threads share long rows
static_assert(kChunk % kRelativeQueries == 0 && kRelativeQueries <= kMostQueries, "a chunk holds complete blocks");
static_assert(kKeys + 2 * kBand <= kBandColumns, "a band is wider than its keys");

struct Workspace {
  float *key_panels, *values, *staging, *queries, *out, *scores, *totals, *top, *factor;
  RelativeSpace relative;

  static int64_t size(int64_t max_seqlen, int64_t padded, int64_t block) {
    return 2 * round_up(max_seqlen, kPanel) * padded + kPanel * padded + 2 * block * padded + block * kRow +
           (2 + W) * block + 9 * 16;
  }
  Workspace(int64_t max_seqlen, int64_t padded, int64_t block, bool is_relative) {
    const int64_t more = is_relative ? RelativeSpace::size(max_seqlen, padded) : 0;
    Cutter cut{scratch(static_cast<size_t>(size(max_seqlen, padded, block) + more))};
    key_panels = cut.take(round_up(max_seqlen, kPanel) * padded);
    values = cut.take(round_up(max_seqlen, kPanel) * padded);
    staging = cut.take(kPanel * padded);
    queries = cut.take(block * padded);
    out = cut.take(block * padded);
    scores = cut.take(block * kRow);
    for (float** piece : {&top, &factor}) *piece = cut.take(block);
    totals = cut.take(block * W);
    if (is_relative) relative.take(cut, max_seqlen, padded);
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

// A block of scores, of a query block whose keys begin at `begin`.
struct Part : Rectangle {
  int64_t begin;

  bool is_first() const { return key == begin; }
};

template <class T>
class Forward {
 public:
  Forward(const Attention& args, const RelativeTables<T>& tables, int64_t max_seqlen)
      : a(args),
        by_distance(tables),
        padded(round_up(args.head_width, W)),
        depth(units<T>(args.head_width)),
        block(args.places ? kRelativeQueries : kQueries),
        scale(args.scale * kLog2E),
        w(max_seqlen, padded, block, args.places != nullptr) {}

  void run(const Item& item) {
    const int64_t last = smaller(item.length, item.first + kChunk);
    const Band band(a, item);
    pack(item, band.of(item.first, last - item.first));
    for (int64_t q = item.first; q < last; q += block) attend(item, q, smaller(block, last - q));
  }

 private:
  void pack(const Item& item, Range seen) {
    packed = seen.begin;
    if (seen.empty()) return;
    const Span keys{item.start + seen.begin, seen.end - seen.begin, item.head / (a.heads / a.key_heads)};
    lay_in_panels<T>(a.k, keys, a.head_width, w.staging, w.key_panels);
    lay_by_token<T>(a.v, keys, a.head_width, w.values);
    if (a.places) gather<T>(a.k, keys, a.head_width, w.relative.keys);
  }

  void attend(const Item& item, int64_t first, int64_t n) {
    gather<T>(a.q, {item.start + first, n, item.head}, a.head_width, w.queries);
    for (int64_t i = 0; i < n; ++i) {
      w.top[i] = -kInfinity;
      store(w.totals + i * W, VF{});
    }
    const Range seen = Band(a, item).of(first, n);
    if (seen.empty()) std::memset(w.out, 0, static_cast<size_t>(n * padded) * sizeof(float));
    for (int64_t key = seen.begin; key < seen.end; key += kKeys)
      add_block(item, {{first, n, key, smaller(kKeys, seen.end - key)}, seen.begin});
    finish(item, first, n);
  }

  void add_block(const Item& item, Part part) {
    const Band band(a, item);
    const int64_t place = part.key - packed;
    scores<T>(w.queries, part.n, w.key_panels, depth, place, part.n_keys, {w.scores, kRow});
    if (a.bias) add_bias(a, item.head, part, {w.scores, kRow});
    if (a.places) add_vectors(item.head, part);
    for (int64_t i = 0; i < part.n; ++i) {
      const Range seen = band.of(part.first + i).from(part.key);
      raise_top(i, {seen.begin > 0 ? seen.begin : 0, smaller(seen.end, part.n_keys)}, part.is_first());
    }
    for (int64_t j = 0; j < part.n_keys; j += kPanel) soften(item, part, j);
    if (!part.is_first()) shrink(part.n);
    product<UnitOf<T>>({part.n, padded, units<T>(part.n_keys)}, {w.scores, kRow, 1},
                       w.values + place / UnitOf<T>::n * padded, padded, {w.out, padded}, !part.is_first());
  }

  void add_vectors(int64_t head, Part part) const {
    const int64_t ld = round_up(depth, W);
    add_relative<T>(by_distance, head, {w.queries, ld, part.first, part.n},
                    {w.relative.keys + (part.key - packed) * ld, ld, part.key, part.n_keys}, w.relative,
                    {w.scores, kRow});
  }

  // Updates a query's maximum with the scores that it sees, and computes the factor for earlier sums.
  void raise_top(int64_t i, Range seen, bool first) {
    const float* s = w.scores + i * kRow;
    VF most = splat(-kInfinity), other = most;
    w.factor[i] = first ? 0.0f : 1.0f;
    if (seen.empty()) return;
    int64_t c = seen.begin / W * W;
    for (; c < seen.begin; c += W) most = within(load(s + c) * splat(scale), c, seen, -kInfinity);
    for (; c + 2 * W <= seen.end; c += 2 * W) {
      most = larger(most, load(s + c) * splat(scale));
      other = larger(other, load(s + c + W) * splat(scale));
    }
    for (; c < seen.end; c += W) most = larger(most, within(load(s + c) * splat(scale), c, seen, -kInfinity));
    const float block_top = lane_max(larger(most, other));
    const float top = block_top > w.top[i] ? block_top : w.top[i];
    w.factor[i] = first ? 0.0f : power_of_two(splat(w.top[i] - top))[0];
    w.top[i] = top;
    store(w.totals + i * W, load(w.totals + i * W) * splat(w.factor[i]));
  }

  // Turns the scores of one panel into weights, with dropout, and adds them to each query's total.
  void soften(const Item& item, Part part, int64_t j) {
    const PanelMask mask(a, part.key + j, item.slot, item.head);
    const Band band(a, item);
    alignas(64) uint32_t words[kPanel];
    const int64_t n = smaller(kPanel, part.n_keys - j);
    for (int64_t i = 0; i < part.n; ++i) {
      mask.draw(part.first + i, words);
      const Range seen = band.of(part.first + i).from(part.key + j);
      if (n == kPanel && seen.begin <= 0 && seen.end >= kPanel)
        soften_row(w.scores + i * kRow, j, kPanel, {0, kPanel}, {&mask, words, w.top[i], w.totals + i * W});
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

  // Adds the weights of n keys, of which those `seen` are attended to, to the lanes of the total. Others become 0.
  WHET_INLINE_MEMBER void soften_row(float* s, int64_t j, int64_t n, Range seen, Softener with) const {
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

  // A query that sees no key gives 0, as torch's own attention does.
  void finish(const Item& item, int64_t first, int64_t n) {
    const Band band(a, item);
    for (int64_t i = 0; i < n; ++i) {
      const bool blind = band.of(first + i).empty();
      const int64_t token = item.start + first + i;
      const float total = lane_sum(load(w.totals + i * W)), factor = blind ? 0.0f : a.keep_scale / total;
      spread<T>(w.out + i * padded, a.out, {token, 1, item.head}, a.head_width, factor);
      a.lse[token * a.heads + item.head] = blind ? kInfinity : w.top[i] * kLn2 + __builtin_logf(total);
    }
  }

  const Attention& a;
  const RelativeTables<T>& by_distance;
  const int64_t padded, depth, block;
  const float scale;
  const Workspace w;
  int64_t packed = 0;  // the first of the row's keys in the workspace
};

template <class T>
void forward(const Attention& a) {
  const WorkList work(a, a.heads, kChunk);
  const RelativeTables<T> tables(a, work.max_seqlen, false);
#pragma omp parallel
  {
    Forward<T> one(a, tables, work.max_seqlen);
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < work.count; ++i) one.run(work.items[i]);
  }
}

}  // namespace

WHET_OPERATOR(attention, Attention) { a.dtype == kBfloat16 ? forward<bf16>(a) : forward<float>(a); }

}  // namespace WHET_ISA
}  // namespace whet
