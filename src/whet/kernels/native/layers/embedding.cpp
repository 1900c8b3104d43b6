// The sum of up to three embeddings, LayerNorm and dropout in one pass; gradients are written to the touched entries only.
#include "columns.h"
#include "operator.h"
#include "parallel.h"
#include "philox.h"
#include "statistics.h"

namespace whet {
namespace WHET_ISA {

// y = dropout(LayerNorm(word[ids] + position[position_ids] + type[type_ids])), tables fp32.
WHET_ARGUMENTS(Embed,
  int64_t rows, width;
  int32_t dtype;
  float eps;
  Mask mask;
  const int64_t* ids[3];  // null: that table is not used
  const float* tables[3];
  const float* weight;
  const float* bias;
  void* y;
  float* mean;
  float* rstd;
)

WHET_ARGUMENTS(EmbedBackward,
  int64_t rows, width;
  int32_t dtype;
  Mask mask;
  const int64_t* ids[3];
  const float* tables[3];
  const float* weight;
  const float* mean;
  const float* rstd;
  const void* dy;
  float* dsum;      // (rows, width): gradient of the sum, to be scattered
  float* dweight;
  float* dbias;
)

// table_grad[id] = the sum of the values of that id, added in the order of the rows for any number of threads.
WHET_ARGUMENTS(Scatter,
  int64_t rows, width;
  int64_t padding_id;  // rows of this id are skipped; -1: none
  const int64_t* ids;
  const float* values;
  float* table_grad;      // (entries, width)
  const int64_t* order;   // (rows,): a stable sort of the rows by id
  const int64_t* clear;   // (n_clear,): entries to zero first
  int64_t n_clear;
)

namespace {

constexpr int kTables = 3;

// Writes the sum of one token's embeddings to `values`; returns its total.
template <class Args>
VF gather(const Args& a, int64_t row, float* values) {
  VF total = VF{};
  for_vectors(a.width, [&](int64_t c, int n) {
    VF v = VF{};
    for (int t = 0; t < kTables; ++t)
      if (a.ids[t]) v += get(a.tables[t] + a.ids[t][row] * a.width + c, n);
    store(values + c, v);
    total += v;
  });
  return total;
}

template <class T>
void forward(const Embed& a) {
#pragma omp parallel if (is_large(a.rows * a.width))
  {
    float* values = scratch(static_cast<size_t>(a.width + W));
#pragma omp for schedule(static)
    for (int64_t r = 0; r < a.rows; ++r) {
      RowMask mask(a.mask, r);
      const float mean = lane_sum(gather(a, r, values)) / static_cast<float>(a.width);
      const float rstd = inverse_deviation(values, a.width, mean, a.eps);
      a.mean[r] = mean;
      a.rstd[r] = rstd;
      T* y = static_cast<T*>(a.y) + r * a.width;
      for_vectors(a.width, [&](int64_t c, int n) {
        const VF hat = (load(values + c) - splat(mean)) * splat(rstd);
        put(y + c, mask.apply(hat * get(a.weight + c, n) + get(a.bias + c, n), c), n);
      });
    }
  }
}

// Writes the gradient after the dropout to `dsum` (as a first step) and adds to the sums of weight and bias.
template <class T>
void backward_row(const EmbedBackward& a, int64_t r, float* hat, float* dweight, float* dbias) {
  RowMask mask(a.mask, r);
  const T* dy = static_cast<const T*>(a.dy) + r * a.width;
  float* dsum = a.dsum + r * a.width;
  const float mean = a.mean[r], rstd = a.rstd[r];
  gather(a, r, hat);
  VF total_g = VF{}, total_gx = VF{};
  for_vectors(a.width, [&](int64_t c, int n) {
    const VF grad = mask.apply(get(dy + c, n), c);
    const VF x = (load(hat + c) - splat(mean)) * splat(rstd);
    const VF g = grad * get(a.weight + c, n);
    store(hat + c, x);
    store(dweight + c, load(dweight + c) + grad * x);
    store(dbias + c, load(dbias + c) + grad);
    put(dsum + c, g, n);
    total_g += g;
    total_gx += g * x;
  });
  const float mean_g = lane_sum(total_g) / static_cast<float>(a.width);
  const float mean_gx = lane_sum(total_gx) / static_cast<float>(a.width);
  for_vectors(a.width, [&](int64_t c, int n) {
    put(dsum + c, (get(dsum + c, n) - splat(mean_g) - load(hat + c) * splat(mean_gx)) * splat(rstd), n);
  });
}

template <class T>
void backward(const EmbedBackward& a) {
  const Chunks chunks(a.rows);
  ColumnSums sums(chunks, a.width, 3);  // the third is not a sum but a chunk's working row
#pragma omp parallel for schedule(static) if (is_large(a.rows * a.width))
  for (int64_t chunk = 0; chunk < chunks.count; ++chunk) {
    float *dweight = sums.start(chunk, 0), *dbias = sums.start(chunk, 1), *hat = sums.start(chunk, 2);
    for (int64_t r = chunks.begin(chunk); r < chunks.end(chunk); ++r) backward_row<T>(a, r, hat, dweight, dbias);
  }
  sums.total(0, a.dweight);
  sums.total(1, a.dbias);
}

}  // namespace

WHET_OPERATOR(embed, Embed) { a.dtype == kBfloat16 ? forward<bf16>(a) : forward<float>(a); }

WHET_OPERATOR(embed_backward, EmbedBackward) { a.dtype == kBfloat16 ? backward<bf16>(a) : backward<float>(a); }

WHET_OPERATOR(scatter, Scatter) {
#pragma omp parallel for schedule(static) if (is_large(a.n_clear * a.width))
  for (int64_t i = 0; i < a.n_clear; ++i)
    std::memset(a.table_grad + a.clear[i] * a.width, 0, static_cast<size_t>(a.width) * sizeof(float));
#pragma omp parallel for schedule(dynamic, 16) if (is_large(a.rows * a.width))
  for (int64_t i = 0; i < a.rows; ++i) {
    const int64_t id = a.ids[a.order[i]];
    if (id == a.padding_id || (i > 0 && a.ids[a.order[i - 1]] == id)) continue;  // not the first of its id
    float* to = a.table_grad + id * a.width;
    for (int64_t j = i; j < a.rows && a.ids[a.order[j]] == id; ++j) {
      const float* from = a.values + a.order[j] * a.width;
      for_vectors(a.width, [&](int64_t c, int n) { put(to + c, get(to + c, n) + get(from + c, n), n); });
    }
  }
}

}  // namespace WHET_ISA
}  // namespace whet
