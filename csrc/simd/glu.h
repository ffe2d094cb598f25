// h = act(gate) * up, and its gradients: dgate = dh * up * act'(gate), dup = dh * act(gate). act is torch's silu, gelu (erf) or
// gelu (tanh), in fp32 to about 2 units in the last place; NaN and infinities give what torch's formulas give.
#pragma once

#include "parallel.h"

namespace fastlora {
namespace FASTLORA_ISA {

// exp(x): x = n log 2 + f, a polynomial of degree 6 in f (error 2e-8), 2^n in two steps so that the ends round as they should.
static FL_INLINE vf exp_vec(vf x) {
  const vf low = set1(-104.0f), high = set1(89.0f);
  x = select(x < low, low, x);  // a NaN is neither: it stays
  x = select(x > high, high, x);
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
  const vi exponent = (vi)shifted - 0x4B400000;
  const vi half = exponent >> 1;
  const vf one = (vf)((half + 127) << 23), two = (vf)((exponent - half + 127) << 23);
  return y * one * two;
}

static FL_INLINE vf sigmoid(vf x) { return 1.0f / (1.0f + exp_vec(-x)); }

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
  t = select(t > 10.0f, set1(10.0f), t);
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
    const vf s = sigmoid(g);
    *value = g * s;
    *slope = s * (1.0f + g * (1.0f - s));
  } else if (ACT == GELU) {
    const vf cdf = normal_cdf(g);
    *value = g * cdf;
    *slope = cdf + g * (exp_vec(g * g * -0.5f) * 0.3989422804014327f);
  } else {  // 0.5 (1 + tanh u) = sigmoid(2 u), u = sqrt(2/pi) (g + 0.044715 g^3)
    const vf square = g * g;
    const vf s = sigmoid(g * (1.5957691216057308f + square * (1.5957691216057308f * 0.044715f)));
    *value = g * s;
    *slope = s + g * s * (1.0f - s) * (1.5957691216057308f + square * (3.0f * 1.5957691216057308f * 0.044715f));
  }
}

template <int ACT>
static FL_INLINE vf activation_value(vf g) {
  vf value, slope;
  activation<ACT>(g, &value, &slope);
  return value;
}

template <int ACT, class T>
static void glu_range(const GluArgs& args, int64_t first, int64_t last) {
  const T* gate = static_cast<const T*>(args.gate);
  const T* up = static_cast<const T*>(args.up);
  const T* dh = static_cast<const T*>(args.dh);
  T *dgate = static_cast<T*>(args.dgate), *dup = static_cast<T*>(args.dup), *h = static_cast<T*>(args.h);
  const auto step = [&](int64_t i, auto get, auto put) {
    const vf g = get(gate + i), u = get(up + i);
    if (dh == nullptr) return put(h + i, activation_value<ACT>(g) * u);
    vf value, slope;
    activation<ACT>(g, &value, &slope);
    const vf d = get(dh + i);
    put(dgate + i, d * u * slope);
    put(dup + i, d * value);
    if (h != nullptr) put(h + i, value * u);
  };
  int64_t i = first;
  for (; i + W <= last; i += W) {
    step(i, [](const T* p) { return load(p); }, [](T* p, vf value) { store(p, value); });
  }
  if (i < last) {
    const int64_t n = last - i;
    step(i, [n](const T* p) { return load_part(p, n); }, [n](T* p, vf value) { store_part(p, value, n); });
  }
}

static void glu(const GluArgs& args) {
  team(args.threads, 32.0 * double(args.n), [&](int t, int threads) {
    const Range range = share(args.n, 1024, t, threads);
    with_dtype(args.dtype, [&](auto type) {
      using T = decltype(type);
      if (args.activation == SILU) glu_range<SILU, T>(args, range.first, range.last);
      if (args.activation == GELU) glu_range<GELU, T>(args, range.first, range.last);
      if (args.activation == GELU_TANH) glu_range<GELU_TANH, T>(args, range.first, range.last);
    });
  });
}

}  // namespace FASTLORA_ISA
}  // namespace fastlora
