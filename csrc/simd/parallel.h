// Threads. All kernels share one scheme: a thread owns a range of columns (so no two write the same element of dA, dB, dX or Y)
// and walks over all rows; sums over columns (S, dS) are kept a thread and added in the order of the threads, at most
// SUPER_ROWS rows at a time. So results do not depend on scheduling, and no memory grows with M.
#pragma once

#include "block.h"

#ifdef _OPENMP
#include <omp.h>
#endif

namespace fastlora {
namespace FASTLORA_ISA {

constexpr int64_t SUPER_ROWS = 4096;
// Below this many multiply-adds (about 10 us) waking a thread costs more than it saves. Philox is 32 of them an element.
constexpr double SERIAL_BELOW = 5e5;
constexpr double MASK_COST = 32;

// Runs f(thread, threads) on every thread of a team. Either one or all that were asked for: libgomp ends the threads that a
// smaller team leaves over, and has to start them again.
template <class F>
static inline void team(int threads, double work, F f) {
#ifdef _OPENMP
  if (threads > 1 && work >= SERIAL_BELOW) {
#pragma omp parallel num_threads(threads)
    f(omp_get_thread_num(), omp_get_num_threads());
    return;
  }
#endif
  f(0, 1);
}

static inline void barrier(int threads) {
#ifdef _OPENMP
  if (threads > 1) {
#pragma omp barrier
  }
#endif
}

struct Range {
  int64_t first, last;
};

// Thread t's share of n, in whole units (the last one may be cut).
static inline Range share(int64_t n, int64_t unit, int t, int threads) {
  const int64_t units = (n + unit - 1) / unit;
  return {min64(n, units * t / threads * unit), min64(n, units * (t + 1) / threads * unit)};
}

constexpr int64_t UNIT = 32;  // columns: a whole number of Philox groups and of cache lines of half-precision elements

// Calls f(first, n) for blocks of at most COLS columns that cover the range, as even as whole units allow.
template <class F>
static inline void for_columns(Range range, F f) {
  const int64_t total = range.last - range.first;
  const int blocks = int((total + COLS - 1) / COLS);
  for (int b = 0; b < blocks; ++b) {
    const Range part = share(total, UNIT, b, blocks);
    if (part.last > part.first) f(range.first + part.first, part.last - part.first);
  }
}

// Sums of the threads' partial [rows, width], row stride `ldp`, into out [rows, width], each thread a share of the rows.
static inline void reduce(const float* partial, int64_t stride, int64_t ldp, int64_t rows, int64_t width, float scale, float* out,
                          int64_t ldo, int t, int threads) {
  const Range range = share(rows, 1, t, threads);
  for (int64_t i = range.first; i < range.last; ++i) {
    for (int64_t j = 0; j < width; j += W) {
      vf sum = load(partial + i * ldp + j);
      for (int k = 1; k < threads; ++k) sum += load(partial + k * stride + i * ldp + j);
      sum *= scale;
      if (j + W <= width) {
        store(out + i * ldo + j, sum);
      } else {
        store_part(out + i * ldo + j, sum, width - j);
      }
    }
  }
}

}  // namespace FASTLORA_ISA
}  // namespace fastlora
