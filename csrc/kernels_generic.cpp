// The kernels for any machine: GCC vector extensions of four floats (SSE2, NEON), no intrinsics needed.
#define FASTLORA_ISA generic
#include "simd/all.h"

namespace fastlora {
const Kernels& generic_kernels() { return generic::table(); }
}  // namespace fastlora
