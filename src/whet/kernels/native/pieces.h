// Tensors of any size, split into chunks of work.
#pragma once

#include <cstdint>
#include <cstdlib>

#include "scratch.h"
#include "vec.h"

namespace whet {
namespace WHET_ISA {

constexpr int64_t kChunk = 32768;  // elements per piece of work: large enough to stream, small enough to balance

// Tensors of any size, split into chunks; finds the tensor of a chunk.
class Pieces {
 public:
  Pieces(const int64_t* sizes, int64_t n_tensors)
      : sizes_(sizes),
        n_tensors_(n_tensors),
        first_(static_cast<int64_t*>(claim(static_cast<size_t>(n_tensors + 1) * sizeof(int64_t)))) {
    first_[0] = 0;
    for (int64_t i = 0; i < n_tensors; ++i) first_[i + 1] = first_[i] + (sizes[i] + kChunk - 1) / kChunk;
  }
  ~Pieces() { std::free(first_); }
  Pieces(const Pieces&) = delete;
  Pieces& operator=(const Pieces&) = delete;

  struct Piece {
    int64_t tensor, begin, n;
  };

  int64_t count() const { return first_[n_tensors_]; }

  Piece operator[](int64_t chunk) const {
    int64_t low = 0, high = n_tensors_ - 1;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (first_[middle + 1] > chunk)
        high = middle;
      else
        low = middle + 1;
    }
    const int64_t begin = (chunk - first_[low]) * kChunk;
    const int64_t rest = sizes_[low] - begin;
    return {low, begin, rest < kChunk ? rest : kChunk};
  }

 private:
  const int64_t* sizes_;
  const int64_t n_tensors_;
  int64_t* first_;
};

// Calls part(begin, n) for the parts of a piece that are in use: all of it, or row by row those whose byte is not 0.
// A row is a separate part even if its neighbours are in use, so that sums over parts do not depend on other rows.
template <class Part>
WHET_INLINE void for_rows_in_use(const Pieces::Piece& piece, const uint8_t* in_use, int64_t width, Part part) {
  if (!in_use) {
    part(piece.begin, piece.n);
    return;
  }
  const int64_t end = piece.begin + piece.n;
  for (int64_t at = piece.begin, row = at / width; at < end; ++row) {
    const int64_t next = (row + 1) * width < end ? (row + 1) * width : end;
    if (in_use[row]) part(at, next - at);
    at = next;
  }
}

}  // namespace WHET_ISA
}  // namespace whet
