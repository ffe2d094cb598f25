// Vectors of W floats, written with GCC's and clang's vector extensions; intrinsics only where those have no word for it.
#pragma once

#include "../kernels.h"

#include <cstring>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#define FL_INLINE inline __attribute__((always_inline))

// Which intrinsics may be used. FASTLORA_WIDTH asks for another width without them: a way to run AVX-512's code without AVX-512.
#if defined(FASTLORA_WIDTH)
#define FL_WIDTH FASTLORA_WIDTH
#elif defined(__AVX512F__)
#define FL_WIDTH 16
#define FL_AVX512
#elif defined(__AVX2__)
#define FL_WIDTH 8
#define FL_AVX2
#else
#define FL_WIDTH 4
#if defined(__SSE2__)
#define FL_SSE2
#endif
#endif

namespace fastlora {
namespace FASTLORA_ISA {

constexpr int W = FL_WIDTH;

typedef float vf __attribute__((vector_size(W * 4)));
typedef int32_t vi __attribute__((vector_size(W * 4)));
typedef uint32_t vu __attribute__((vector_size(W * 4)));
typedef uint64_t vq __attribute__((vector_size(W * 4)));  // W / 2 lanes
typedef uint16_t vh __attribute__((vector_size(W * 2)));
// The same for memory that is aligned to its element only.
typedef float vf_mem __attribute__((vector_size(W * 4), aligned(4), may_alias));
typedef int32_t vi_mem __attribute__((vector_size(W * 4), aligned(4), may_alias));
typedef uint32_t vu_mem __attribute__((vector_size(W * 4), aligned(4), may_alias));
typedef uint16_t vh_mem __attribute__((vector_size(W * 2), aligned(2), may_alias));

static FL_INLINE vf set1(float value) { return value - vf{}; }  // one broadcast; -0.0 and NaN stay what they are
static FL_INLINE vf load(const float* p) { return *reinterpret_cast<const vf_mem*>(p); }
static FL_INLINE void store(float* p, vf value) { *reinterpret_cast<vf_mem*>(p) = value; }
static FL_INLINE vi load_mask(const int32_t* p) { return *reinterpret_cast<const vi_mem*>(p); }
static FL_INLINE void store_mask(int32_t* p, vi value) { *reinterpret_cast<vi_mem*>(p) = value; }

// mask ? value : 0, mask lanes being 0 or -1. A selection: a NaN that is not selected leaves nothing behind.
static FL_INLINE vf keep(vi mask, vf value) { return (vf)(mask & (vi)value); }

static FL_INLINE vf select(vi mask, vf yes, vf no) {
#if defined(FL_AVX2)
  return (vf)_mm256_blendv_ps((__m256)no, (__m256)yes, (__m256)mask);
#else
  return (vf)((mask & (vi)yes) | (~mask & (vi)no));
#endif
}

// min(x, high); a NaN stays.
static FL_INLINE vf clamp_above(vf x, float high) {
#if defined(FL_AVX512)
  return (vf)_mm512_min_ps((__m512)set1(high), (__m512)x);
#elif defined(FL_AVX2)
  return (vf)_mm256_min_ps((__m256)set1(high), (__m256)x);
#else
  return select(x > high, set1(high), x);
#endif
}

// 64-bit products of the lanes' low 32 bits; the high 32 bits of both operands are ignored.
static FL_INLINE vq mul_low32(vq a, vq b) {
#if defined(FL_AVX512)
  return (vq)_mm512_mul_epu32((__m512i)a, (__m512i)b);
#elif defined(FL_AVX2)
  return (vq)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#elif defined(FL_SSE2)
  return (vq)_mm_mul_epu32((__m128i)a, (__m128i)b);
#else
  vq out;
  for (int i = 0; i < W / 2; ++i) out[i] = uint64_t(uint32_t(a[i])) * uint32_t(b[i]);
  return out;
#endif
}

template <bool ODD>
static FL_INLINE vu pick(vu a, vu b) {  // within each 128-bit block: {a[o] a[o+2] b[o] b[o+2]}, o = ODD
#if defined(FL_AVX512)
  return (vu)_mm512_shuffle_ps((__m512)a, (__m512)b, ODD ? 0xDD : 0x88);
#elif defined(FL_AVX2)
  return (vu)_mm256_shuffle_ps((__m256)a, (__m256)b, ODD ? 0xDD : 0x88);
#elif defined(FL_SSE2)
  return (vu)_mm_shuffle_ps((__m128)a, (__m128)b, ODD ? 0xDD : 0x88);
#else
  vu out;
  for (int i = 0; i < W; i += 4) {
    out[i] = a[i + ODD], out[i + 1] = a[i + 2 + ODD];
    out[i + 2] = b[i + ODD], out[i + 3] = b[i + 2 + ODD];
  }
  return out;
#endif
}

static FL_INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
static FL_INLINE int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

}  // namespace FASTLORA_ISA
}  // namespace fastlora
