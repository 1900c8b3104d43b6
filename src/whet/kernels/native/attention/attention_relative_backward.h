// The gradients of relative vectors (attention_relative.h), and what these add to the gradients of queries and keys.
//
// With X the block of dS by query and distance, Y by key and distance:  dQ += X A,  dA = X' Q,  dK += Y B,  dB = Y' K.
// X and Y are dS itself, read with other strides: zeros around the block stand for pairs that do not exist.
#pragma once

#include "attention_relative.h"

namespace whet {
namespace WHET_ISA {

constexpr int64_t kMostGroups = 8;  // groups of rows with a sum of their own: memory against work for many threads

// Where the gradients of one head's vectors are added, (distances, padded) each, by distance as in DistanceTable.
struct DistanceGradients {
  float *keys, *queries;
};

// A block of dS / scale, kLine to the next query, and which queries and keys it belongs to.
struct BandGradients {
  const float* dscores;
  Rectangle of;
  int64_t padded;
};

// Zeros after the block's keys and queries, where an earlier block may have been larger.
static inline void clear_around(const RelativeSpace& space, int64_t n, int64_t n_keys) {
  const int64_t used = round_up(n_keys, W), below = smaller(n + kBand, kMostQueries + kBand);
  if (used < kPanel)
    for (int64_t i = 0; i < n; ++i)
      std::memset(space.dscores + i * kLine + used, 0, static_cast<size_t>(kPanel - used) * sizeof(float));
  std::memset(space.dscores + n * kLine, 0, static_cast<size_t>((below - n) * kLine) * sizeof(float));
}

static inline void back_by_query(const BandGradients& d, const DistanceTable& table, const float* queries,
                                 float* dqueries, float* sums) {
  if (table.panel == nullptr) return;
  const int64_t padded = d.padded;
  for (int64_t g = 0; g < d.of.n; g += kBand) {
    const int64_t m = smaller(kBand, d.of.n - g), start = d.of.key - (d.of.first + g + m - 1) + table.reach;
    const int64_t distances = d.of.n_keys + m - 1;
    const float* band = d.dscores + g * kLine - (m - 1);
    product<Singles>({m, padded, distances}, {band, kLine + 1, 1}, table.rows + start * padded, padded,
                     {dqueries + g * padded, padded}, true);
    product<Singles>({distances, padded, m}, {band, 1, kLine + 1}, queries + g * padded, padded,
                     {sums + start * padded, padded}, true);
  }
}

static inline void back_by_key(const BandGradients& d, const DistanceTable& table, const float* keys, float* dkeys,
                               float* sums) {
  if (table.panel == nullptr) return;
  const int64_t padded = d.padded;
  for (int64_t g = 0; g < d.of.n_keys; g += kBand) {
    const int64_t m = smaller(kBand, d.of.n_keys - g), start = d.of.first - (d.of.key + g + m - 1) + table.reach;
    const int64_t distances = d.of.n + m - 1;
    const float* band = d.dscores - (m - 1) * kLine + g;
    product<Singles>({m, padded, distances}, {band, kLine + 1, kLine}, table.rows + start * padded, padded,
                     {dkeys + g * padded, padded}, true);
    product<Singles>({distances, padded, m}, {band, kLine, kLine + 1}, keys + g * padded, padded,
                     {sums + start * padded, padded}, true);
  }
}

// The sums of dA and dB over groups of rows. Groups depend on the rows alone, and are added in their order, so that the
// result is the same on any number of threads.
template <class T>
class DistanceSums {
 public:
  DistanceSums(const RelativeTables<T>& by_distance, const WorkList& list, int64_t most_groups)
      : tables(by_distance),
        a(by_distance.a),
        work(list),
        n_rows(list.count / a.key_heads),
        per_group((n_rows + most_groups - 1) / most_groups),
        n_groups(n_rows ? (n_rows + per_group - 1) / per_group : 0) {
    if (a.places == nullptr) return;
    int64_t total = 0;
    offsets = static_cast<int64_t*>(claim(static_cast<size_t>(n_groups + 1) * sizeof(int64_t)));
    for (int64_t g = 0; g < n_groups; ++g) {
      offsets[g] = total;
      total += 2 * a.heads * width(g) * tables.padded;
    }
    memory = static_cast<float*>(claim(static_cast<size_t>(total + 1) * sizeof(float)));
  }
  ~DistanceSums() {
    std::free(memory);
    std::free(offsets);
  }
  DistanceSums(const DistanceSums&) = delete;
  DistanceSums& operator=(const DistanceSums&) = delete;

  // The group's first row, in the order of the work.
  int64_t first(int64_t group) const { return smaller(group * per_group, n_rows); }

  // The sums of one head over a group, set to zero.
  DistanceGradients begin(int64_t group, int64_t head) const {
    if (a.places == nullptr) return {nullptr, nullptr};
    std::memset(sum(group, head), 0, static_cast<size_t>(2 * width(group) * tables.padded) * sizeof(float));
    const int64_t outside = (tables.reach - reach(group)) * tables.padded;  // distances that the group does not have
    return {sum(group, head) - outside, sum(group, head) + width(group) * tables.padded - outside};
  }

  // Writes the tables' gradients.
  void finish() const {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < 2 * a.heads; ++i) {
      const bool of_keys = i < a.heads;
      const View& view = of_keys ? a.drelative_keys : a.drelative_queries;
      if (view.data) write(view, of_keys ? i : i - a.heads, of_keys);
    }
  }

 private:
  int64_t reach(int64_t group) const { return work.items[first(group) * a.key_heads].length - 1; }  // longest first
  int64_t width(int64_t group) const { return 2 * reach(group) + 1; }
  float* sum(int64_t group, int64_t head) const {
    return memory + offsets[group] + 2 * head * width(group) * tables.padded;
  }

  void write(const View& view, int64_t head, bool of_keys) const {
    const int64_t padded = tables.padded;
    float* total = scratch(static_cast<size_t>(a.n_places * padded));
    std::memset(total, 0, static_cast<size_t>(a.n_places * padded) * sizeof(float));
    for (int64_t g = 0; g < n_groups; ++g) {
      const int64_t n = width(g), shift = tables.reach - reach(g);
      const float* from = sum(g, head) + (of_keys ? 0 : n * padded);
      for (int64_t t = 0; t < n; ++t) {
        float* to = total + tables.place(of_keys ? shift + t : tables.n - 1 - shift - t) * padded;
        for (int64_t c = 0; c < padded; c += W) store(to + c, load(to + c) + load(from + t * padded + c));
      }
    }
    spread<T>(total, view, {0, a.n_places, head}, a.head_width, a.scale);
  }

  const RelativeTables<T>& tables;
  const Attention& a;
  const WorkList& work;
  const int64_t n_rows, per_group;  // rows that have tokens

 public:
  const int64_t n_groups;

 private:
  int64_t* offsets = nullptr;
  float* memory = nullptr;
};

}  // namespace WHET_ISA
}  // namespace whet
