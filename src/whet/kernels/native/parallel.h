// When a loop is worth several threads.
#pragma once

#include <cstdint>

namespace whet {

// Elements of a layer below which one thread does all the work. Threads that still spin from the loop before start within
// some microseconds, and threads that sleep within tens of them. One thread takes below a nanosecond an element, so this
// many take it about as long as waking the others. It is the number that torch has for its own loops (GRAIN_SIZE).
constexpr int64_t kGrain = 32768;

static inline bool is_large(int64_t elements) { return elements >= kGrain; }

}  // namespace whet
