// dS = scale * dY B and dB = scale * dY^T S, in one pass over dY.
#pragma once

#include "expand.h"

namespace fastlora {
namespace FASTLORA_ISA {

// `factor`, `gradient`: [COLS, width]; `padded`: [ROWS, width].
template <class T>
static void grad_dy_columns(const GradDyArgs& args, Range range, int64_t row0, int64_t rows, float* partial, float* factor,
                            float* gradient, float* padded) {
  const T* dy = static_cast<const T*>(args.dy);
  const int64_t width = round_up(args.r, W);
  alignas(64) float block[ROWS * COLS];
  if (args.ds != nullptr) clear(partial, rows * width);
  for_columns(range, [&](int64_t first, int64_t n) {
    if (args.ds != nullptr) {
      with_dtype(args.b_dtype, [&](auto type) {
        using F = decltype(type);
        pack_rows(static_cast<const F*>(args.b) + first * args.r, args.r, n, args.r, args.scale, factor, width);
      });
    }
    if (args.db != nullptr) clear(gradient, n * width);
    for (int64_t m = 0; m < rows; m += ROWS) {
      const int64_t count = min64(ROWS, rows - m);
      const T* here = dy + (row0 + m) * args.lddy + first;
      if (m + ROWS < rows) prefetch(here + ROWS * args.lddy, args.lddy, min64(ROWS, rows - m - ROWS), n);
      const Block source = fp32_block(here, args.lddy, count, n, block);
      if (args.ds != nullptr) {
        product<false>(count, width, n, source.x, source.ld, factor, width, Add<float>{partial + m * width, width, width});
      }
      if (args.db != nullptr) {
        const float* s = args.s + (row0 + m) * args.lds;
        int64_t lds = args.lds;
        if (width != args.r) {
          pack_rows(s, lds, count, args.r, 1.0f, padded, width);
          s = padded, lds = width;
        }
        product<true>(n, width, count, source.x, source.ld, s, lds, Add<float>{gradient, width, width});
      }
    }
    if (args.db != nullptr) {
      for (int64_t j = 0; j < n; ++j) {
        float* out = args.db + (first + j) * args.r;
        for (int64_t k = 0; k < args.r; ++k) {
          const float value = gradient[j * width + k] * args.scale;
          out[k] = row0 == 0 ? value : out[k] + value;
        }
      }
    }
  });
}

static void grad_dy(const GradDyArgs& args) {
  const int64_t width = round_up(args.r, W), super = min64(SUPER_ROWS, args.M);
  const int64_t stride = round_up((super + 2 * COLS + ROWS) * width, 16);
  const double work = double(args.M) * double(args.N) * double(args.r) * ((args.ds != nullptr) + (args.db != nullptr));
  if (args.M == 0 && args.db != nullptr) clear(args.db, args.N * args.r);
  float* memory = scratch(size_t(stride * args.threads));
  team(args.threads, work, [&](int t, int threads) {
    const Range range = share(args.N, UNIT, t, threads);
    float* partial = memory + t * stride;
    float* factor = partial + super * width;
    for (int64_t row = 0; row < args.M; row += super) {
      const int64_t rows = min64(super, args.M - row);
      with_dtype(args.dy_dtype, [&](auto type) {
        grad_dy_columns<decltype(type)>(args, range, row, rows, partial, factor, factor + COLS * width, factor + 2 * COLS * width);
      });
      if (args.ds == nullptr) continue;
      barrier(threads);
      reduce(memory, stride, width, rows, args.r, 1.0f, args.ds + row * args.ldds, args.ldds, t, threads);
      if (row + super < args.M) barrier(threads);
    }
  });
}

}  // namespace FASTLORA_ISA
}  // namespace fastlora
