// S[:, i] = dropout_i(X) A_i^T for several projections of one X, in one pass over X.
#pragma once

#include "parallel.h"

namespace fastlora {
namespace FASTLORA_ISA {

// Where projection `index` starts in a row of stacked ranks, each padded to whole vectors; index == count: the row's length.
static inline int64_t padded_offset(const Projection* projections, int index) {
  int64_t offset = 0;
  for (int i = 0; i < index; ++i) offset += round_up(projections[i].r, W);
  return offset;
}

static inline void pack_factor_transposed(const void* a, int dtype, int64_t first, int64_t ld, int64_t rows, int64_t n, float scale,
                                          float* out, int64_t ldo) {
  with_dtype(dtype, [&](auto type) {
    pack_transposed(static_cast<const decltype(type)*>(a) + first, ld, rows, n, scale, out, ldo);
  });
}

template <class T>
static void shrink_columns(const ShrinkArgs& args, Range range, int64_t row0, int64_t rows, float* partial, float* factor) {
  const T* x = static_cast<const T*>(args.x);
  const int64_t width = padded_offset(args.projections, args.count);
  alignas(64) float block[ROWS * COLS];
  clear(partial, rows * width);
  for_columns(range, [&](int64_t first, int64_t n) {
    for (int p = 0; p < args.count; ++p) {  // [n, width]
      const Projection& one = args.projections[p];
      pack_factor_transposed(one.a, one.a_dtype, first, args.K, one.r, n, args.dropout.inverse,
                             factor + padded_offset(args.projections, p), width);
    }
    for (int64_t m = 0; m < rows; m += ROWS) {
      const int64_t count = min64(ROWS, rows - m);
      const T* here = x + (row0 + m) * args.ldx + first;
      if (m + ROWS < rows) prefetch(here + ROWS * args.ldx, args.ldx, min64(ROWS, rows - m - ROWS), n);
      float* out = partial + m * width;
      if (!args.dropout.on) {
        const Block source = fp32_block(here, args.ldx, count, n, block);
        product<false>(count, width, n, source.x, source.ld, factor, width, Add<float>{out, width, width});
        continue;
      }
      for (int p = 0; p < args.count; ++p) {
        const Projection& one = args.projections[p];
        const int64_t offset = padded_offset(args.projections, p), padded = round_up(one.r, W);
        Philox philox(one.seed, args.dropout.threshold);
        dropout_block(philox, here, args.ldx, row0 + m, count, {first, n, args.K}, block, nullptr);
        product<false>(count, padded, n, block, COLS, factor + offset, width, Add<float>{out + offset, width, padded});
      }
    }
  });
}

static void shrink(const ShrinkArgs& args) {
  int64_t ranks = 0;
  for (int p = 0; p < args.count; ++p) ranks += args.projections[p].r;
  const int64_t width = padded_offset(args.projections, args.count);
  const int64_t super = min64(SUPER_ROWS, args.M);
  const int64_t stride = round_up((super + COLS) * width, 16);
  const double work = double(args.M) * double(args.K) * (double(ranks) + (args.dropout.on ? MASK_COST * args.count : 0));
  float* memory = scratch(size_t(stride * args.threads));
  team(args.threads, work, [&](int t, int threads) {
    const Range range = share(args.K, UNIT, t, threads);
    float* partial = memory + t * stride;  // [super, width], then the packed factors [COLS, width]
    for (int64_t row = 0; row < args.M; row += super) {
      const int64_t rows = min64(super, args.M - row);
      with_dtype(args.x_dtype, [&](auto type) {
        shrink_columns<decltype(type)>(args, range, row, rows, partial, partial + super * width);
      });
      barrier(threads);
      int64_t column = 0;
      for (int p = 0; p < args.count; ++p) {
        const int64_t r = args.projections[p].r;
        reduce(memory + padded_offset(args.projections, p), stride, width, rows, r, 1.0f, args.out + row * args.ldo + column,
               args.ldo, t, threads);
        column += r;
      }
      if (row + super < args.M) barrier(threads);
    }
  });
}

static void mask(const MaskArgs& args) {
  const double work = double(args.rows) * double(args.cols) * MASK_COST;
  team(args.threads, work, [&](int t, int threads) {
    Philox philox(args.seed, args.dropout.on ? args.dropout.threshold : 0);
    const Range range = share(args.rows, 1, t, threads);
    for (int64_t row = range.first; row < range.last; ++row) {
      float* out = args.out + row * args.cols;
      philox.row(first_counter(row, 0, args.cols), args.cols, [&](int64_t j, vi mask) {
        const int64_t left = args.cols - j;
        const vf value = keep(mask, set1(args.dropout.inverse));
        if (left >= W) {
          store(out + j, value);
        } else if (left > 0) {
          store_part(out + j, value, left);
        }
      });
    }
  });
}

}  // namespace FASTLORA_ISA
}  // namespace fastlora
