// The one micro-kernel: out[i, :] += sum_k x[i*rs + k*cs] * p[k, :], a tile of MR rows and NV vectors held in registers.
// Every product here is an instance of it: shrink and dS (rows of x are tokens), dB and dA (rows of x are columns), expand.
#pragma once

#include "convert.h"

namespace fastlora {
namespace FASTLORA_ISA {

// Rows of accumulators for NV vectors: 12 accumulators of 16 registers (AVX2, SSE2), 12 or 24 of 32 (AVX-512).
template <int NV>
constexpr int tile_rows() {
  return W == 16 ? 12 : 12 / NV;
}

// Where a tile's sum goes: added to `out`, of which the first `cols` columns exist.
template <class T>
struct Add {
  T* out;
  int64_t ld, cols;
  FL_INLINE void put(int64_t i, int64_t col, vf sum) const {
    T* p = out + i * ld + col;
    if (__builtin_expect(col + W <= cols, 1)) {
      store(p, load(p) + sum);
    } else if (col < cols) {
      store_part(p, load_part(p, cols - col) + sum, cols - col);
    }
  }
  FL_INLINE Add rows_from(int64_t i) const { return {out + i * ld, ld, cols}; }
  FL_INLINE Add cols_from(int64_t col) const { return {out + col, ld, cols - col}; }
};

// The same where `kept` [rows, cols] is -1, and nothing where it is 0.
template <class Out>
struct AddKept {
  Out add;
  const int32_t* kept;
  int64_t ldk;
  FL_INLINE void put(int64_t i, int64_t col, vf sum) const { add.put(i, col, keep(load_mask(kept + i * ldk + col), sum)); }
  FL_INLINE AddKept rows_from(int64_t i) const { return {add.rows_from(i), kept + i * ldk, ldk}; }
  FL_INLINE AddKept cols_from(int64_t col) const { return {add.cols_from(col), kept + col, ldk}; }
};

template <int MR, int NV, class Out>
static FL_INLINE void tile(const float* x, int64_t rs, int64_t cs, const float* p, int64_t ldp, int64_t n, Out out) {
  vf sum[MR][NV] = {};
  for (int64_t k = 0; k < n; ++k) {
    vf row[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) row[v] = load(p + k * ldp + v * W);
#pragma GCC unroll 16
    for (int i = 0; i < MR; ++i) {
      const vf value = set1(x[i * rs + k * cs]);
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) sum[i][v] += value * row[v];
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < MR; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) out.put(i, v * W, sum[i][v]);
  }
}

// All `rows` rows of one panel of NV vectors.
template <int NV, class Out>
static inline void panel(int64_t rows, const float* x, int64_t rs, int64_t cs, const float* p, int64_t ldp, int64_t n, Out out) {
  constexpr int MR = tile_rows<NV>();
  int64_t i = 0;
  for (; i + MR <= rows; i += MR) tile<MR, NV>(x + i * rs, rs, cs, p, ldp, n, out.rows_from(i));
  const int64_t rest = rows - i;
  if (rest & 8) tile<8, NV>(x + i * rs, rs, cs, p, ldp, n, out.rows_from(i)), i += 8;
  if (rest & 4) tile<4, NV>(x + i * rs, rs, cs, p, ldp, n, out.rows_from(i)), i += 4;
  if (rest & 2) tile<2, NV>(x + i * rs, rs, cs, p, ldp, n, out.rows_from(i)), i += 2;
  if (rest & 1) tile<1, NV>(x + i * rs, rs, cs, p, ldp, n, out.rows_from(i));
}

// out[i, j] += sum_k x(i, k) p[k, j] for i < rows, j < width, k < n. `p` is readable up to a multiple of W columns.
// x(i, k) = x[i * ld + k], or x[k * ld + i] when TRANSPOSED.
template <bool TRANSPOSED, class Out>
static inline void product(int64_t rows, int64_t width, int64_t n, const float* x, int64_t ld, const float* p, int64_t ldp, Out out) {
  const int64_t rs = TRANSPOSED ? 1 : ld, cs = TRANSPOSED ? ld : 1;
  int64_t j = 0;
  for (; j + W < width; j += 2 * W) panel<2>(rows, x, rs, cs, p + j, ldp, n, out.cols_from(j));
  if (j < width) panel<1>(rows, x, rs, cs, p + j, ldp, n, out.cols_from(j));
}

}  // namespace FASTLORA_ISA
}  // namespace fastlora
