// What the binding and the kernels agree on: plain structs and a table of functions for each instruction set.
//
// Letters as in the documentation: M tokens, K in, N out, r rank. Row-major everywhere; `ld*` are row strides in elements.
// Nothing here (and nothing that the kernels include) instantiates a template of the standard library: each instruction set is
// a translation unit of its own, and the linker would keep one copy of such a template, possibly one this machine cannot run.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fastlora {

enum DType : int { F32 = 0, BF16 = 1, F16 = 2 };
enum Activation : int { SILU = 0, GELU = 1, GELU_TANH = 2 };

// One LoRA factor A [r, K], contiguous, with the seed of its dropout and, in a backward pass, where its gradient goes.
struct Projection {
  const void* a;
  int a_dtype;
  int64_t r;
  uint64_t seed;
  float* da;  // [r, K], or null: not wanted
};

// Dropout of probability p: an element is kept when its 32 random bits are >= threshold, and scaled by inverse = 1/(1-p).
struct Dropout {
  bool on;
  uint32_t threshold;
  float inverse;
};

struct MaskArgs {
  float* out;  // [rows, cols], 1 / (1-p) = kept, 0 = dropped
  int64_t rows, cols;
  Dropout dropout;
  uint64_t seed;
  int threads;
};

struct ShrinkArgs {
  const void* x;
  int x_dtype;
  int64_t ldx, M, K;
  const Projection* projections;
  int count;
  Dropout dropout;
  float* out;
  int64_t ldo;
  int threads;
};

struct ExpandArgs {
  void* y;
  int y_dtype;
  int64_t ldy, M, N;
  const float* s;
  int64_t lds, r;
  const void* b;
  int b_dtype;
  float scale;
  int threads;
};

struct GradDyArgs {
  const void* dy;
  int dy_dtype;
  int64_t lddy, M, N;
  const float* s;
  int64_t lds, r;
  const void* b;
  int b_dtype;
  float scale;
  float* ds;  // [M, r] with row stride ldds, or null
  int64_t ldds;
  float* db;  // [N, r], or null
  int threads;
};

struct GradXArgs {
  const void* x;
  int x_dtype;
  int64_t ldx, M, K;
  const float* ds;
  int64_t ldds;
  const Projection* projections;
  int count;
  Dropout dropout;
  void* dx;  // added to in place, or null
  int dx_dtype;
  int64_t lddx;
  int threads;
};

struct GluArgs {
  const void* dh;  // null in a forward pass
  const void* gate;
  const void* up;
  void* dgate;  // null in a forward pass
  void* dup;    // null in a forward pass
  void* h;      // null when not wanted
  int dtype;
  int64_t n;
  int activation;
  int threads;
};

struct Kernels {
  const char* name;
  void (*mask)(const MaskArgs&);
  void (*shrink)(const ShrinkArgs&);
  void (*expand)(const ExpandArgs&);
  void (*grad_dy)(const GradDyArgs&);
  void (*grad_x)(const GradXArgs&);
  void (*glu)(const GluArgs&);
};

const Kernels& generic_kernels();
const Kernels* avx2_kernels();    // null where the target is not x86-64
const Kernels* avx512_kernels();  // null where the target is not x86-64

// At least `floats` floats of 64-byte aligned, uninitialised memory that belongs to the calling thread and stays valid until its
// next call. Kept between calls: memory fresh from the system costs a page fault every 4 KiB, as much as the arithmetic here.
float* scratch(size_t floats);

}  // namespace fastlora
