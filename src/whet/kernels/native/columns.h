// Sums over rows (gradients of biases and weights) that do not depend on the number of threads.
//
// The rows are split into chunks whose size depends only on the number of rows. Each chunk is summed by one thread, and
// the partial sums are added in the order of the chunks.
#pragma once

#include <cstdlib>

#include "parallel.h"
#include "scratch.h"
#include "vec.h"

namespace whet {
namespace WHET_ISA {

constexpr int64_t kRowsPerChunk = 32, kMaxChunks = 128;

struct Chunks {
  int64_t rows, size, count;

  explicit Chunks(int64_t n_rows) : rows(n_rows) {
    const int64_t wanted = (n_rows + kRowsPerChunk - 1) / kRowsPerChunk;
    const int64_t most = wanted < kMaxChunks ? wanted : kMaxChunks;
    size = most ? (n_rows + most - 1) / most : 0;
    count = size ? (n_rows + size - 1) / size : 0;
  }
  int64_t begin(int64_t chunk) const { return chunk * size; }
  int64_t end(int64_t chunk) const { return (chunk + 1) * size < rows ? (chunk + 1) * size : rows; }
};

// `kinds` column sums of `width` for every chunk; padded so that vectors never cross into a neighbour.
class ColumnSums {
 public:
  ColumnSums(const Chunks& chunks, int64_t width, int kinds)
      : chunks_(chunks),
        width_(width),
        padded_((width + 15) / 16 * 16),
        kinds_(kinds),
        partial_(scratch(static_cast<size_t>(chunks.count * kinds * padded_))) {}

  // The zeroed sums of one chunk; the thread that works on it adds to them.
  float* start(int64_t chunk, int kind) {
    float* sums = partial_ + (chunk * kinds_ + kind) * padded_;
    std::memset(sums, 0, static_cast<size_t>(padded_) * sizeof(float));
    return sums;
  }

  void total(int kind, float* out) const {
    if (!out) return;
    const int64_t n_parts = (width_ + kPart - 1) / kPart;
#pragma omp parallel for schedule(static) if (is_large(chunks_.count * width_))
    for (int64_t part = 0; part < n_parts; ++part) {
      const int64_t first = part * kPart;
      const int64_t n = width_ - first < kPart ? width_ - first : kPart;
      for_vectors(n, [&](int64_t c, int lanes) {
        VF sum = VF{};
        for (int64_t chunk = 0; chunk < chunks_.count; ++chunk)
          sum += load(partial_ + (chunk * kinds_ + kind) * padded_ + first + c);
        put(out + first + c, sum, lanes);
      });
    }
  }

 private:
  static constexpr int64_t kPart = 256;
  const Chunks chunks_;
  const int64_t width_, padded_;
  const int kinds_;
  float* const partial_;
};

}  // namespace WHET_ISA
}  // namespace whet
