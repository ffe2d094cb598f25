// h = act(gate) * up, and its gradients: dgate = dh * up * act'(gate), dup = dh * act(gate). act is torch's silu, gelu (erf) or
// gelu (tanh), in fp32, the error at most 5e-7 of the value plus 1e-7 (torch's own 2.5e-7); NaN and infinities give what torch's
// formulas give.
#pragma once

#include "parallel.h"

namespace fastlora {
namespace FASTLORA_ISA {

// exp(x): x = n log 2 + f, a polynomial of degree 6 in f (error 2e-8), times 2^n. Infinite from 88.38 on (n = 128), 0 below
// -87.33 (n = -126: what would be subnormal), so that 1 / (1 + exp) and products with the result are right to 1e-38.
static FL_INLINE vf exp_vec(vf x) {
  const vi alive = ~(x < -87.33f);  // a NaN is
  x = clamp_above(x, 89.0f);
  const vf shifted = x * 1.44269504089f + 12582912.0f;  // 1.5 * 2^23: rounds to an integer in the low bits
  const vf n = shifted - 12582912.0f;
  vf f = x - n * 0.693359375f;
  f = f + n * 2.12194440e-4f;
  vf y = f * 1.3930435e-3f + 8.3333478e-3f;
  y = y * f + 4.1666493e-2f;
  y = y * f + 1.6666664e-1f;
  y = y * f + 0.5f;
  y = y * f + 1.0f;
  y = y * f + 1.0f;
  const vf power = (vf)(((vi)shifted - (0x4B400000 - 127)) << 23);
  return keep(alive, y * power);
}

struct Sigmoid {
  vf value, rest;  // s(x) and 1 - s(x), neither by a difference of near equals
};

static FL_INLINE Sigmoid sigmoid(vf x) {
  const vf e = exp_vec(-x), s = 1.0f / (1.0f + e);
  return {s, select(x > 0.0f, e * s, 1.0f - s)};
}

// The normal distribution function. erfc(|x|/sqrt 2) keeps the relative accuracy of the left tail.
static FL_INLINE vf normal_cdf(vf g) {
  const vf a = g * 0.70710678118654752f;
  vf t = (vf)((vi)a & 0x7FFFFFFF);
  const vf square = a * a;
  // |a| <= 0.9277: erf(a) = a + a * P(a^2)
  vf near = square * -5.96761703e-4f + 4.99119423e-3f;
  near = near * square - 2.67681349e-2f;
  near = near * square + 1.12819925e-1f;
  near = near * square - 3.76125336e-1f;
  near = near * square + 1.28379166e-1f;
  near = near * a + a;
  // beyond: erfc(t) = exp(Q(t)); at 10 it is 0 in fp32
  t = clamp_above(t, 10.0f);
  vf far = t * -1.72853470e-5f + 3.83197126e-4f;
  far = far * (t * t) + (t * -3.88396438e-3f + 2.42546219e-2f);
  far = far * t - 1.06777877e-1f;
  far = far * t - 6.34846687e-1f;
  far = far * t - 1.28717512e-1f;
  far = far * t - t;
  const vf tail = exp_vec(far) * 0.5f;
  const vf outer = select(a < 0.0f, tail, 1.0f - tail);
  return select((vf)((vi)a & 0x7FFFFFFF) > 0.927734375f, outer, near * 0.5f + 0.5f);
}

// value = act(g), slope = act'(g).
template <int ACT>
static FL_INLINE void activation(vf g, vf* value, vf* slope) {
  if (ACT == SILU) {
    const Sigmoid s = sigmoid(g);
    *value = g * s.value;
    *slope = s.value * (1.0f + g * s.rest);
  } else if (ACT == GELU) {
    const vf cdf = normal_cdf(g);
    *value = g * cdf;
    *slope = cdf + g * (exp_vec(g * g * -0.5f) * 0.3989422804014327f);
  } else {  // 0.5 (1 + tanh u) = sigmoid(2 u), u = sqrt(2/pi) (g + 0.044715 g^3)
    const vf square = g * g;
    const Sigmoid s = sigmoid(g * (1.5957691216057308f + square * (1.5957691216057308f * 0.044715f)));
    *value = g * s.value;
    *slope = s.value + g * s.value * s.rest * (1.5957691216057308f + square * (3.0f * 1.5957691216057308f * 0.044715f));
  }
}

template <int ACT>
static FL_INLINE vf activation_value(vf g) {
  vf value, slope;
  activation<ACT>(g, &value, &slope);
  return value;
}

template <int ACT, class T>
static void glu_forward_range(const GluArgs& args, int64_t first, int64_t last) {
  const T* gate = static_cast<const T*>(args.gate);
  const T* up = static_cast<const T*>(args.up);
  T* h = static_cast<T*>(args.h);
  int64_t i = first;
  for (; i + W <= last; i += W) store(h + i, activation_value<ACT>(load(gate + i)) * load(up + i));
  const int64_t n = last - i;
  if (n > 0) store_part(h + i, activation_value<ACT>(load_part(gate + i, n)) * load_part(up + i, n), n);
}

template <int ACT, class T>
static void glu_backward_range(const GluArgs& args, int64_t first, int64_t last) {
  const T* gate = static_cast<const T*>(args.gate);
  const T* up = static_cast<const T*>(args.up);
  const T* dh = static_cast<const T*>(args.dh);
  T *dgate = static_cast<T*>(args.dgate), *dup = static_cast<T*>(args.dup), *h = static_cast<T*>(args.h);
  vf value, slope;
  int64_t i = first;
  for (; i + W <= last; i += W) {
    const vf u = load(up + i), d = load(dh + i);
    activation<ACT>(load(gate + i), &value, &slope);
    store(dgate + i, d * u * slope);
    store(dup + i, d * value);
    if (h != nullptr) store(h + i, value * u);
  }
  const int64_t n = last - i;
  if (n > 0) {
    const vf u = load_part(up + i, n), d = load_part(dh + i, n);
    activation<ACT>(load_part(gate + i, n), &value, &slope);
    store_part(dgate + i, d * u * slope, n);
    store_part(dup + i, d * value, n);
    if (h != nullptr) store_part(h + i, value * u, n);
  }
}

template <int ACT>
static void glu_threads(const GluArgs& args) {
  team(args.threads, 32.0 * double(args.n), [&](int t, int threads) {
    const Range range = share(args.n, 1024, t, threads);
    with_dtype(args.dtype, [&](auto type) {
      using T = decltype(type);
      if (args.dh == nullptr) glu_forward_range<ACT, T>(args, range.first, range.last);
      if (args.dh != nullptr) glu_backward_range<ACT, T>(args, range.first, range.last);
    });
  });
}

static void glu(const GluArgs& args) {
  if (args.activation == SILU) glu_threads<SILU>(args);
  if (args.activation == GELU) glu_threads<GELU>(args);
  if (args.activation == GELU_TANH) glu_threads<GELU_TANH>(args);
}

}  // namespace FASTLORA_ISA
}  // namespace fastlora
