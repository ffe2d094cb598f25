// dA_i = dS_i^T dropout_i(X) and dX += sum_i mask_i * (dS_i A_i) / (1-p), in one pass over X and dX. A mask is made once for both.
#pragma once

#include "grad_dy.h"

namespace fastlora {
namespace FASTLORA_ISA {

// What a thread needs besides its block of X; `ranks` is the sum of the ranks, `width` that of the padded ranks.
struct GradXMemory {
  float* factor;    // [ranks, COLS]: A / (1-p)
  float* gradient;  // [COLS, width]: dA^T
  float* padded;    // [ROWS, widest]: dS_i when r_i is no whole number of vectors
  float* sum;       // [ROWS, COLS]: dX of half precision and several projections, so that it is rounded once
};

template <class T, class D>
static void grad_x_columns(const GradXArgs& args, Range range, const GradXMemory& memory) {
  const T* x = static_cast<const T*>(args.x);
  D* dx = static_cast<D*>(args.dx);
  const bool in_place = sizeof(D) == sizeof(float) || args.count == 1;
  const int64_t width = padded_offset(args.projections, args.count);
  const bool dropout = args.dropout.on;
  const float inverse = args.dropout.inverse;
  bool any_da = false;
  for (int p = 0; p < args.count; ++p) any_da |= args.projections[p].da != nullptr;
  alignas(64) float block[ROWS * COLS];
  alignas(64) int32_t kept[ROWS * COLS];

  for_columns(range, [&](int64_t first, int64_t n) {
    if (dx != nullptr) {
      float* out = memory.factor;
      for (int p = 0; p < args.count; ++p) {
        const Projection& one = args.projections[p];
        with_dtype(one.a_dtype, [&](auto type) {
          using F = decltype(type);
          pack_rows(static_cast<const F*>(one.a) + first, args.K, one.r, n, inverse, out, COLS);
        });
        out += one.r * COLS;
      }
    }
    if (any_da) clear(memory.gradient, n * width);

    for (int64_t m = 0; m < args.M; m += ROWS) {
      const int64_t rows = min64(ROWS, args.M - m), ahead = min64(ROWS, args.M - m - ROWS);
      const T* x_here = x + m * args.ldx + first;
      D* dx_here = dx + m * args.lddx + first;
      if (any_da) prefetch(x_here + ROWS * args.ldx, args.ldx, ahead, n);
      if (dx != nullptr) prefetch(dx_here + ROWS * args.lddx, args.lddx, ahead, n);
      Block source{block, COLS};
      if (any_da && !dropout) source = fp32_block(x_here, args.ldx, rows, n, block);

      if (dx != nullptr && !in_place) widen_block(dx_here, args.lddx, rows, n, memory.sum);

      const float* factor = memory.factor;
      const float* ds = args.ds + m * args.ldds;
      int64_t offset = 0;
      for (int p = 0; p < args.count; ++p) {
        const Projection& one = args.projections[p];
        const int64_t padded = round_up(one.r, W);
        if (dropout && (dx != nullptr || one.da != nullptr)) {
          Philox philox(one.seed, args.dropout.threshold);
          const Columns cols{first, n, args.K};
          if (one.da != nullptr) {
            dropout_block(philox, x_here, args.ldx, m, rows, cols, block, kept);
          } else {
            mask_block(philox, m, rows, cols, kept);
          }
        }
        if (one.da != nullptr) {
          const float* right = ds;
          int64_t ld = args.ldds;
          if (padded != one.r) {
            pack_rows(ds, args.ldds, rows, one.r, 1.0f, memory.padded, padded);
            right = memory.padded, ld = padded;
          }
          product<true>(n, padded, rows, source.x, source.ld, right, ld, Add<float>{memory.gradient + offset, width, padded});
        }
        const auto add_to_dx = [&](auto to) {
          if (dropout) {
            product<false>(rows, n, one.r, ds, args.ldds, factor, COLS, AddKept<decltype(to)>{to, kept, COLS});
          } else {
            product<false>(rows, n, one.r, ds, args.ldds, factor, COLS, to);
          }
        };
        if (dx != nullptr && in_place) add_to_dx(Add<D>{dx_here, args.lddx, n});
        if (dx != nullptr && !in_place) add_to_dx(Add<float>{memory.sum, COLS, n});
        ds += one.r, factor += one.r * COLS, offset += padded;
      }
      if (dx != nullptr && !in_place) {
        for (int64_t i = 0; i < rows; ++i) {
          const float* from = memory.sum + i * COLS;
          D* to = dx_here + i * args.lddx;
          int64_t j = 0;
          for (; j + W <= n; j += W) store(to + j, load(from + j));
          if (j < n) store_part(to + j, load(from + j), n - j);
        }
      }
    }
    int64_t offset = 0;
    for (int p = 0; p < args.count; ++p) {
      const Projection& one = args.projections[p];
      if (one.da != nullptr) {
        transpose(memory.gradient + offset, width, n, one.r, inverse, one.da + first, args.K);
      }
      offset += round_up(one.r, W);
    }
  });
}

static void grad_x(const GradXArgs& args) {
  int64_t ranks = 0, widest = 0;
  int products = 0;
  for (int p = 0; p < args.count; ++p) {
    ranks += args.projections[p].r;
    widest = args.projections[p].r > widest ? args.projections[p].r : widest;
    products += (args.projections[p].da != nullptr) + (args.dx != nullptr);
  }
  widest = round_up(widest, W);
  const int64_t width = padded_offset(args.projections, args.count);
  const int64_t factor = ranks * COLS, gradient = COLS * width, padded = ROWS * widest, sum = ROWS * COLS;
  const int64_t stride = round_up(factor + gradient + padded + sum, 16);
  const double mean_rank = args.count > 0 ? double(ranks) / args.count : 0;
  const double work = double(args.M) * double(args.K) * (mean_rank * products + (args.dropout.on ? MASK_COST * args.count : 0));
  float* all = scratch(size_t(stride * args.threads));
  team(args.threads, work, [&](int t, int threads) {
    float* mine = all + t * stride;
    const GradXMemory memory{mine, mine + factor, mine + factor + gradient, mine + factor + gradient + padded};
    const Range range = share(args.K, UNIT, t, threads);
    with_dtype(args.x_dtype, [&](auto x_type) {
      with_dtype(args.dx_dtype, [&](auto dx_type) { grad_x_columns<decltype(x_type), decltype(dx_type)>(args, range, memory); });
    });
  });
}

}  // namespace FASTLORA_ISA
}  // namespace fastlora
