// bfloat16 and float16 in memory, fp32 in registers. Stores round to nearest, ties to even; a NaN stays a NaN.
#pragma once

#include "vec.h"

namespace fastlora {
namespace FASTLORA_ISA {

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

static FL_INLINE uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}
static FL_INLINE float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

static FL_INLINE float widen(float value) { return value; }
static FL_INLINE float widen(bf16 value) { return float_of(uint32_t(value.bits) << 16); }
static FL_INLINE float widen(f16 value) {
  const uint32_t magnitude = value.bits & 0x7FFFu, sign = uint32_t(value.bits & 0x8000u) << 16;
  if (magnitude >= 0x7C00u) return float_of(sign | (magnitude << 13) | 0x7F800000u);  // inf, NaN
  if (magnitude < 0x0400u) return float_of(sign | bits_of(float(magnitude) * 0x1p-24f));  // subnormal
  return float_of(sign | ((magnitude << 13) + (112u << 23)));
}

static FL_INLINE void narrow(float value, float* out) { *out = value; }
static FL_INLINE void narrow(float value, bf16* out) {
  const uint32_t u = bits_of(value);
  const bool nan = (u & 0x7FFFFFFFu) > 0x7F800000u;
  out->bits = uint16_t(nan ? (u >> 16) | 0x40u : (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16);
}
static FL_INLINE void narrow(float value, f16* out) {
  const uint32_t u = bits_of(value) & 0x7FFFFFFFu, sign = bits_of(value) >> 31 << 15;
  uint32_t half;
  if (u >= 0x47800000u) {  // 65536 and up, inf, NaN
    half = u > 0x7F800000u ? 0x7E00u : 0x7C00u;
  } else if (u < 0x38800000u) {  // below 2^-14: adding 0.5 leaves the subnormal, rounded, in the low bits
    half = bits_of(float_of(u) + 0.5f) - 0x3F000000u;
  } else {
    half = (u - 0x38000000u + 0xFFFu + ((u >> 13) & 1u)) >> 13;
  }
  out->bits = uint16_t(half | sign);
}

static FL_INLINE vf load(const bf16* p) {
#if defined(FL_AVX512)
  return (vf)((vu)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))) << 16);
#elif defined(FL_AVX2)
  return (vf)((vu)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))) << 16);
#else
  const vh bits = *reinterpret_cast<const vh_mem*>(p);
  return (vf)(__builtin_convertvector(bits, vu) << 16);
#endif
}
static FL_INLINE void store(bf16* p, vf value) {
  const vu u = (vu)value;
  const vu rounded = u + 0x7FFFu + ((u >> 16) & 1u);
  const vu out = (vu)select(value == value, (vf)rounded, (vf)(u | 0x400000u)) >> 16;
#if defined(FL_AVX512)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16((__m512i)out));
#elif defined(FL_AVX2)
  const __m256i packed = _mm256_packus_epi32((__m256i)out, (__m256i)out);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08)));
#else
  *reinterpret_cast<vh_mem*>(p) = __builtin_convertvector(out, vh);
#endif
}

static FL_INLINE vf load(const f16* p) {
#if defined(FL_AVX512)
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(FL_AVX2)
  return (vf)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  vf out;
  for (int i = 0; i < W; ++i) out[i] = widen(p[i]);
  return out;
#endif
}
static FL_INLINE void store(f16* p, vf value) {
#if defined(FL_AVX512)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtps_ph((__m512)value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(FL_AVX2)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
  for (int i = 0; i < W; ++i) narrow(value[i], p + i);
#endif
}

// The first n < W elements; the rest are 0.
template <class T>
static inline vf load_part(const T* p, int64_t n) {
  float lanes[W] = {};
  for (int64_t i = 0; i < n; ++i) lanes[i] = widen(p[i]);
  return load(lanes);
}
template <class T>
static inline void store_part(T* p, vf value, int64_t n) {
  float lanes[W];
  store(lanes, value);
  for (int64_t i = 0; i < n; ++i) narrow(lanes[i], p + i);
}

// Calls f(T{}) with T the element type of a dtype code.
template <class F>
static inline void with_dtype(int dtype, F f) {
  if (dtype == F32) f(float{});
  if (dtype == BF16) f(bf16{});
  if (dtype == F16) f(f16{});
}

}  // namespace FASTLORA_ISA
}  // namespace fastlora
