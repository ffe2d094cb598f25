// Y += scale * S B^T in place.
#pragma once

#include "shrink.h"

namespace fastlora {
namespace FASTLORA_ISA {

template <class T>
static void expand_columns(const ExpandArgs& args, Range range, float* factor) {
  T* y = static_cast<T*>(args.y);
  for_columns(range, [&](int64_t first, int64_t n) {
    with_dtype(args.b_dtype, [&](auto type) {  // B^T [r, COLS]
      using F = decltype(type);
      pack_transposed(static_cast<const F*>(args.b) + first * args.r, args.r, n, args.r, args.scale, factor, COLS);
    });
    for (int64_t m = 0; m < args.M; m += ROWS) {
      const int64_t rows = min64(ROWS, args.M - m);
      T* here = y + m * args.ldy + first;
      if (m + ROWS < args.M) prefetch(here + ROWS * args.ldy, args.ldy, min64(ROWS, args.M - m - ROWS), n);
      product<false>(rows, n, args.r, args.s + m * args.lds, args.lds, factor, COLS, Add<T>{here, args.ldy, n});
    }
  });
}

static void expand(const ExpandArgs& args) {
  const int64_t stride = args.r * COLS;
  float* memory = scratch(size_t(stride * args.threads));
  team(args.threads, double(args.M) * double(args.N) * double(args.r), [&](int t, int threads) {
    const Range range = share(args.N, UNIT, t, threads);
    with_dtype(args.y_dtype, [&](auto type) { expand_columns<decltype(type)>(args, range, memory + t * stride); });
  });
}

}  // namespace FASTLORA_ISA
}  // namespace fastlora
