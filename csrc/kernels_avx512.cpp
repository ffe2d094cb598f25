// The kernels for x86-64 with AVX-512 (F, BW, DQ, VL). setup.py gives this file, and no other, the flags for them.
#include "kernels.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define FASTLORA_ISA avx512
#include "simd/all.h"

namespace fastlora {
const Kernels* avx512_kernels() { return &avx512::table(); }
}  // namespace fastlora
#else
namespace fastlora {
const Kernels* avx512_kernels() { return nullptr; }
}  // namespace fastlora
#endif
