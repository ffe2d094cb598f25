// Factors stand in memory as the checkpoint has them, A [r, K] and B [N, r]; products want the other way round.
#pragma once

#include "convert.h"

namespace fastlora {
namespace FASTLORA_ISA {

#if defined(FL_AVX2) || defined(FL_AVX512)
static FL_INLINE __m256 load8(const float* p) { return _mm256_loadu_ps(p); }
static FL_INLINE __m256 load8(const bf16* p) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
static FL_INLINE __m256 load8(const f16* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }

// out [8, 8] = scale * x^T.
template <class T>
static FL_INLINE void transpose8(const T* x, int64_t ld, float scale, float* out, int64_t ldo) {
  const __m256 factor = _mm256_set1_ps(scale);
  __m256 row[8], pair[8], quad[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) row[i] = _mm256_mul_ps(load8(x + i * ld), factor);
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {  // columns 0 1 (4 5) and 2 3 (6 7) of rows i, i + 1
    pair[i] = _mm256_unpacklo_ps(row[i], row[i + 1]);
    pair[i + 1] = _mm256_unpackhi_ps(row[i], row[i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {  // quad[i + c]: columns c and c + 4 of rows i .. i + 3
    quad[i] = _mm256_shuffle_ps(pair[i], pair[i + 2], 0x44);
    quad[i + 1] = _mm256_shuffle_ps(pair[i], pair[i + 2], 0xEE);
    quad[i + 2] = _mm256_shuffle_ps(pair[i + 1], pair[i + 3], 0x44);
    quad[i + 3] = _mm256_shuffle_ps(pair[i + 1], pair[i + 3], 0xEE);
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    _mm256_storeu_ps(out + c * ldo, _mm256_permute2f128_ps(quad[c], quad[4 + c], 0x20));
    _mm256_storeu_ps(out + (c + 4) * ldo, _mm256_permute2f128_ps(quad[c], quad[4 + c], 0x31));
  }
}
#endif

// out [n, rows] = scale * x^T, x [rows, n].
template <class T>
static inline void transpose(const T* x, int64_t ld, int64_t rows, int64_t n, float scale, float* out, int64_t ldo) {
  int64_t i = 0;
#if defined(FL_AVX2) || defined(FL_AVX512)
  for (; i + 8 <= rows; i += 8) {
    int64_t j = 0;
    for (; j + 8 <= n; j += 8) transpose8(x + i * ld + j, ld, scale, out + j * ldo + i, ldo);
    for (; j < n; ++j)
      for (int64_t k = i; k < i + 8; ++k) out[j * ldo + k] = widen(x[k * ld + j]) * scale;
  }
#endif
  for (; i < rows; ++i)
    for (int64_t j = 0; j < n; ++j) out[j * ldo + i] = widen(x[i * ld + j]) * scale;
}

// The same; columns from `rows` to rows rounded up to W are 0.
template <class T>
static inline void pack_transposed(const T* x, int64_t ld, int64_t rows, int64_t n, float scale, float* out, int64_t ldo) {
  transpose(x, ld, rows, n, scale, out, ldo);
  for (int64_t j = 0; j < n; ++j)
    for (int64_t i = rows; i < round_up(rows, W); ++i) out[j * ldo + i] = 0.0f;
}

}  // namespace FASTLORA_ISA
}  // namespace fastlora
