// Scores that depend on the distance of a query and a key through vectors (He et al. 2021, disentangled attention):
//
//   score(i, j) += scale (q_i . A[j - i] + k_j . B[j - i]), with A and B rows of two tables, chosen by `places`.
//
// Some neighbouring queries times the rows of A for a range of distances give a band: the product's row g, moved by g
// columns, has a key in each column. So no score is gathered. The keys' products with B, whose distances count the other
// way, are the same for the transposed block. Backward reads dS as such bands, through row strides that are one longer.
#pragma once

#include "attention.h"

namespace whet {
namespace WHET_ISA {

constexpr int64_t kBand = 16;                     // vectors whose distances are computed together
constexpr int64_t kBandColumns = 512 + 2 * kBand;  // at least kBand more than the tokens that they meet
constexpr int64_t kLine = kPanel + kBand;         // one query's dS to the next's: with zeros between them
constexpr int64_t kMostQueries = 96;

// Both layouts of one head's table by distance, from -reach to reach.
struct DistanceTable {
  const float* panel;  // (units of the width, ld): transposed; null: no such term
  const float* rows;   // (distances, padded): fp32, for backward
  int64_t ld, reach;
};

// Vectors of neighbouring tokens of a row, from its token `first` on.
struct Vectors {
  const float* data;
  int64_t ld, first, n;
};

// Working memory of one thread.
struct RelativeSpace {
  float *band, *turned, *keys, *wide_keys, *wide_queries, *dscores;

  static int64_t size(int64_t max_seqlen, int64_t padded) {
    return kBand + kPanel * (kMostQueries + kBand) + kBand * kBandColumns + kMostQueries * kPanel +
           2 * max_seqlen * padded + kMostQueries * padded + (kMostQueries + 2 * kBand) * kLine + kBand + 16 * 16;
  }
  void take(Cutter& cut, int64_t max_seqlen, int64_t padded) {
    band = cut.take(kBand + kPanel * (kMostQueries + kBand) + kBand * kBandColumns) + kBand;
    turned = cut.take(kMostQueries * kPanel);
    keys = cut.take(max_seqlen * padded);
    wide_keys = cut.take(max_seqlen * padded);
    wide_queries = cut.take(kMostQueries * padded);
    const int64_t n = (kMostQueries + 2 * kBand) * kLine + kBand;
    dscores = cut.take(n);
    std::memset(dscores, 0, static_cast<size_t>(n) * sizeof(float));
    dscores += kBand * kLine;
  }
};

// The tables of all heads by distance, packed once for all rows of a call.
template <class T>
class RelativeTables {
 public:
  RelativeTables(const Attention& args, int64_t max_seqlen, bool with_rows)
      : a(args),
        reach(max_seqlen > 0 ? max_seqlen - 1 : 0),
        n(2 * reach + 1),
        depth(units<T>(args.head_width)),
        padded(round_up(args.head_width, W)),
        ld((round_up(n + W, 16) / 16 | 1) * 16),  // an odd number of cache lines: the rows of a tile do not collide
        panel_size(round_up(depth, 4) * ld),
        size(panel_size + (with_rows ? n * padded : 0)) {
    if (a.places == nullptr) return;
    memory = static_cast<float*>(claim(static_cast<size_t>(2 * a.heads * size) * sizeof(float)));
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < 2 * a.heads; ++i) pack(i, with_rows);
  }
  ~RelativeTables() { std::free(memory); }
  RelativeTables(const RelativeTables&) = delete;
  RelativeTables& operator=(const RelativeTables&) = delete;

  // By j - i, which queries are multiplied with.
  DistanceTable of_keys(int64_t head) const { return table(head, a.relative_keys); }
  // By i - j, which keys are multiplied with.
  DistanceTable of_queries(int64_t head) const { return table(a.heads + head, a.relative_queries); }

  // The row of a table for the distance j - i = t - reach.
  int64_t place(int64_t t) const { return a.places[t - reach + a.reach]; }

  const Attention& a;
  const int64_t reach, n, depth, padded, ld, panel_size, size;

 private:
  DistanceTable table(int64_t i, const View& view) const {
    if (view.data == nullptr) return {nullptr, nullptr, ld, reach};
    return {memory + i * size, memory + i * size + panel_size, ld, reach};
  }

  void pack(int64_t i, bool with_rows) {
    const bool of_keys = i < a.heads;
    const View& view = of_keys ? a.relative_keys : a.relative_queries;
    if (view.data == nullptr) return;
    const int64_t head = of_keys ? i : i - a.heads, stored = round_up(depth, W);
    float* staging = scratch(static_cast<size_t>(kPanel * stored + round_up(depth, 4) * kPanel));
    float* panel = staging + kPanel * stored;
    for (int64_t t = 0; t < ld; t += kPanel) {
      const int64_t m = n - t < 0 ? 0 : smaller(kPanel, n - t);
      for (int64_t j = 0; j < m; ++j) {
        const Span row{place(of_keys ? t + j : n - 1 - t - j), 1, head};
        gather<T>(view, row, a.head_width, staging + j * stored);
        if (with_rows) gather_wide<T>(view, row, a.head_width, memory + i * size + panel_size + (t + j) * padded);
      }
      transpose({reinterpret_cast<const char*>(staging), m, stored * 4}, depth, panel);
      const size_t bytes = static_cast<size_t>(smaller(kPanel, ld - t)) * sizeof(float);
      for (int64_t c = 0; c < depth; ++c) std::memcpy(memory + i * size + c * ld + t, panel + c * kPanel, bytes);
    }
  }

  float* memory = nullptr;
};

// block (queries, keys) += each query times the table's row at its distance to each key.
template <class Unit>
static void add_by_query(const DistanceTable& table, Vectors queries, Rectangle of, int64_t depth, float* band,
                         Block block) {
  for (int64_t g = 0; g < of.n; g += kBand) {
    const int64_t m = smaller(kBand, of.n - g), start = of.key - (of.first + g + m - 1) + table.reach;
    product<Unit>({m, round_up(of.n_keys + m - 1, W), depth}, {queries.data + g * queries.ld, queries.ld, 1},
                  table.panel + start, table.ld, {band, kBandColumns}, false);
    for (int64_t i = 0; i < m; ++i) {
      const float* from = band + i * kBandColumns + (m - 1 - i);
      float* to = block.data + (g + i) * block.ld;
      for (int64_t c = 0; c < of.n_keys; c += W) store(to + c, load(to + c) + load(from + c));
    }
  }
}

// block (queries, keys) += each key times the table's row at its distance to each query; at most a panel of keys.
template <class Unit>
static void add_by_key(const DistanceTable& table, Vectors keys, Rectangle of, int64_t depth,
                       const RelativeSpace& space, Block block) {
  const int64_t ld = kMostQueries + kBand;
  for (int64_t g = 0; g < of.n_keys; g += kBand) {
    const int64_t m = smaller(kBand, of.n_keys - g), start = of.first - (of.key + g + m - 1) + table.reach;
    product<Unit>({m, round_up(of.n + m - 1, W), depth}, {keys.data + g * keys.ld, keys.ld, 1}, table.panel + start,
                  table.ld, {space.band + g * ld - (m - 1), ld + 1}, false);
  }
  transpose({reinterpret_cast<const char*>(space.band), of.n_keys, ld * 4}, of.n, space.turned);
  for (int64_t i = 0; i < of.n; ++i) {
    float* to = block.data + i * block.ld;
    for (int64_t c = 0; c < of.n_keys; c += W) store(to + c, load(to + c) + load(space.turned + i * kPanel + c));
  }
}

// Adds both terms to a block of scores that are not scaled yet.
template <class T>
static void add_relative(const RelativeTables<T>& tables, int64_t head, Vectors queries, Vectors keys,
                         const RelativeSpace& space, Block block) {
  const DistanceTable of_keys = tables.of_keys(head), of_queries = tables.of_queries(head);
  const Rectangle all{queries.first, queries.n, keys.first, keys.n};
  if (of_keys.panel) add_by_query<UnitOf<T>>(of_keys, queries, all, tables.depth, space.band, block);
  if (of_queries.panel == nullptr) return;
  for (int64_t j = 0; j < keys.n; j += kPanel) {
    const Rectangle part{queries.first, queries.n, keys.first + j, smaller(kPanel, keys.n - j)};
    add_by_key<UnitOf<T>>(of_queries, {keys.data + j * keys.ld, keys.ld, part.key, part.n_keys}, part, tables.depth,
                          space, {block.data + j, block.ld});
  }
}

}  // namespace WHET_ISA
}  // namespace whet
