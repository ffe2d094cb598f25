// The kernels for x86-64 with AVX2, FMA and F16C. setup.py gives this file, and no other, the flags for them.
#include "kernels.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define FASTLORA_ISA avx2
#include "simd/all.h"

namespace fastlora {
const Kernels* avx2_kernels() { return &avx2::table(); }
}  // namespace fastlora
#else
namespace fastlora {
const Kernels* avx2_kernels() { return nullptr; }
}  // namespace fastlora
#endif
