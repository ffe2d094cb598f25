// Blocks of a matrix brought into the first-level cache: widened to fp32, dropped out, transposed or padded.
#pragma once

#include "philox.h"
#include "tile.h"
#include "transpose.h"

namespace fastlora {
namespace FASTLORA_ISA {

constexpr int ROWS = 48;  // of a block: a multiple of every tile's rows
constexpr int COLS = 96;  // of a block: a multiple of every tile's rows, of 2 W and of Philox::GROUP

// A block's columns [first, first + n) of a matrix with `total` columns.
struct Columns {
  int64_t first, n, total;
};

// out [rows, COLS] = x [rows, n] in fp32.
template <class T>
static inline void widen_block(const T* x, int64_t ld, int64_t rows, int64_t n, float* out) {
  for (int64_t i = 0; i < rows; ++i, x += ld, out += COLS) {
    int64_t j = 0;
    for (; j + W <= n; j += W) store(out + j, load(x + j));
    if (j < n) store(out + j, load_part(x + j, n - j));
  }
}

struct Block {
  const float* x;
  int64_t ld;
};

// x [rows, n] in fp32: where it lies, or in `out` [rows, COLS]. (A copy of fp32 costs an eighth of a product of rank 16, also where the
// rows' distance is a power of two and the block pushes itself out of the first-level cache.)
template <class T>
static inline Block fp32_block(const T* x, int64_t ld, int64_t rows, int64_t n, float* out) {
  if constexpr (sizeof(T) == sizeof(float)) {
    return {x, ld};
  } else {
    widen_block(x, ld, rows, n, out);
    return {out, COLS};
  }
}

// out [rows, COLS] = x where kept, 0 elsewhere (not yet scaled by 1/(1-p)); `kept` [rows, COLS] is left for a later use.
// `x` is the block's first element, `row` its row in the matrix.
template <class T>
static inline void dropout_block(Philox& philox, const T* x, int64_t ld, int64_t row, int64_t rows, Columns cols, float* out,
                                 int32_t* kept) {
  for (int64_t i = 0; i < rows; ++i, x += ld, out += COLS) {
    philox.row(first_counter(row + i, cols.first, cols.total), cols.n, [&](int64_t j, vi mask) {
      const int64_t left = cols.n - j;
      if (kept != nullptr) store_mask(kept + i * COLS + j, mask);
      if (__builtin_expect(left >= W, 1)) {
        store(out + j, keep(mask, load(x + j)));
      } else if (left > 0) {
        store(out + j, keep(mask, load_part(x + j, left)));
      }
    });
  }
}

static inline void mask_block(Philox& philox, int64_t row, int64_t rows, Columns cols, int32_t* kept) {
  for (int64_t i = 0; i < rows; ++i, kept += COLS) {
    philox.row(first_counter(row + i, cols.first, cols.total), cols.n, [&](int64_t j, vi mask) { store_mask(kept + j, mask); });
  }
}

// out [rows, ldo] = scale * x [rows, n]; columns from n to n rounded up to W are 0.
template <class T>
static inline void pack_rows(const T* x, int64_t ld, int64_t rows, int64_t n, float scale, float* out, int64_t ldo) {
  for (int64_t i = 0; i < rows; ++i, x += ld, out += ldo) {
    int64_t j = 0;
    for (; j + W <= n; j += W) store(out + j, load(x + j) * scale);
    if (j < n) store(out + j, load_part(x + j, n - j) * scale);
  }
}

static inline void clear(float* p, int64_t n) { memset(p, 0, size_t(n) * sizeof(float)); }

// Asks for the block that comes next while this one is worked on: its rows lie on pages of their own, where the hardware's
// prefetchers do not follow.
template <class T>
static inline void prefetch(const T* x, int64_t ld, int64_t rows, int64_t n) {
  for (int64_t i = 0; i < rows; ++i, x += ld) {
    const char* p = reinterpret_cast<const char*>(x);
    for (int64_t at = 0; at < n * int64_t(sizeof(T)); at += 64) __builtin_prefetch(p + at, 0, 2);
  }
}

}  // namespace FASTLORA_ISA
}  // namespace fastlora
