// Blocks of a matrix brought into the first-level cache: widened to fp32, dropped out, transposed or padded.
#pragma once

#include "philox.h"
#include "tile.h"

namespace fastlora {
namespace FASTLORA_ISA {

constexpr int ROWS = 48;  // of a block: a multiple of every tile's rows
constexpr int COLS = 96;  // of a block: a multiple of every tile's rows, of Philox::GROUP and of 2 W

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

// out [rows, COLS] = x where kept, 0 elsewhere (not yet scaled by 1/(1-p)); `kept` [rows, COLS] is left for a later use.
// `x` is the block's first element, `row` its row in the matrix.
template <class T>
static inline void dropout_block(Philox& philox, const T* x, int64_t ld, int64_t row, int64_t rows, Columns cols, float* out,
                                 int32_t* kept) {
  for (int64_t i = 0; i < rows; ++i, x += ld, out += COLS) {
    uint64_t counter = first_counter(row + i, cols.first, cols.total);
    for (int64_t j = 0; j < cols.n; j += Philox::GROUP, counter += Philox::GROUP / 4) {
      vi first, second;
      philox.group(counter, &first, &second);
      if (kept != nullptr) store_mask(kept + i * COLS + j, first), store_mask(kept + i * COLS + j + W, second);
      if (__builtin_expect(j + 2 * W <= cols.n, 1)) {
        store(out + j, keep(first, load(x + j)));
        store(out + j + W, keep(second, load(x + j + W)));
      } else {
        const int64_t head = min64(W, cols.n - j), tail = cols.n - j - head;
        store(out + j, keep(first, load_part(x + j, head)));
        store(out + j + W, keep(second, load_part(x + j + W, tail)));
      }
    }
  }
}

static inline void mask_block(Philox& philox, int64_t row, int64_t rows, Columns cols, int32_t* kept) {
  for (int64_t i = 0; i < rows; ++i) philox.row(first_counter(row + i, cols.first, cols.total), cols.n, kept + i * COLS);
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

// out [n, ldo] = scale * x^T, x [rows, n]; columns from `rows` to rows rounded up to W are 0.
template <class T>
static inline void pack_transposed(const T* x, int64_t ld, int64_t rows, int64_t n, float scale, float* out, int64_t ldo) {
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < n; ++j) out[j * ldo + i] = widen(x[i * ld + j]) * scale;
  for (int64_t i = rows; i < round_up(rows, W); ++i)
    for (int64_t j = 0; j < n; ++j) out[j * ldo + i] = 0.0f;
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
