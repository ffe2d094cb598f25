// Everything of one instruction set, in a namespace of its own: FASTLORA_ISA names it, the compiler's flags choose it.
#pragma once

#ifndef FASTLORA_ISA
#error "define FASTLORA_ISA (generic, avx2, avx512) before including this file"
#endif

#include "vec.h"

#include "convert.h"

#include "philox.h"

#include "tile.h"

#include "block.h"

#include "parallel.h"

#include "shrink.h"

#include "expand.h"

#include "grad_dy.h"

#include "grad_x.h"

#include "glu.h"

#define FASTLORA_TEXT_(x) #x
#define FASTLORA_TEXT(x) FASTLORA_TEXT_(x)

namespace fastlora {
namespace FASTLORA_ISA {

static const Kernels& table() {
  static const Kernels kernels = {FASTLORA_TEXT(FASTLORA_ISA), mask, shrink, expand, grad_dy, grad_x, glu};
  return kernels;
}

}  // namespace FASTLORA_ISA
}  // namespace fastlora
