// When a loop is worth several threads.
#pragma once

#include <cstdint>

namespace whet {

// Elements of a layer below which one thread does all the work. Starting threads and waiting for the last one costs 2 us
// while they still spin from the loop before, and 10 to 50 us once they sleep; a layer takes 0.2 to 1 ns an element. So
// this many elements take one thread about as long as waking the others. torch has the same number (GRAIN_SIZE).
constexpr int64_t kGrain = 32768;

static inline bool is_large(int64_t elements) { return elements >= kGrain; }

}  // namespace whet
