// fastlora._C: raw pointers, sizes and strides in, nothing of torch. Cheap checks here; shapes are the caller's business.
#include <pybind11/pybind11.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "kernels.h"

namespace py = pybind11;
using namespace fastlora;

namespace {

const Kernels* detect() {
  const char* wish = std::getenv("FASTLORA_SIMD");
  const std::string name = wish == nullptr ? "" : wish;
  if (name != "" && name != "avx512" && name != "avx2" && name != "generic") {
    throw std::invalid_argument("FASTLORA_SIMD is '" + name + "': it takes avx512, avx2 or generic");
  }
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (avx512 && avx512_kernels() != nullptr && (name == "" || name == "avx512")) return avx512_kernels();
  if (avx2 && avx2_kernels() != nullptr && name != "generic") return avx2_kernels();
#endif
  return &generic_kernels();
}

const Kernels* kernels = nullptr;

template <class T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

void check(bool ok, const char* argument, const std::string& got, const char* takes) {
  if (!ok) throw py::value_error(std::string(argument) + " is " + got + ": it takes " + takes);
}

void check_dtype(const char* argument, int code) {
  check(code == F32 || code == BF16 || code == F16, argument, std::to_string(code), "F32 (0), BF16 (1) or F16 (2)");
}

void check_size(const char* argument, int64_t size) { check(size >= 0, argument, std::to_string(size), "a size >= 0"); }

void check_rank(int64_t r) { check(r >= 1, "r", std::to_string(r), "a rank >= 1"); }

void check_stride(const char* argument, int64_t stride, int64_t row) {
  check(stride >= row, argument, std::to_string(stride), ("a row stride >= " + std::to_string(row)).c_str());
}

void check_pointer(const char* argument, uintptr_t address) { check(address != 0, argument, "0", "a pointer"); }

int check_threads(int threads) {
  check(threads >= 1, "threads", std::to_string(threads), "a number >= 1");
  return threads;
}

Dropout make_dropout(double p) {
  check(p >= 0.0 && p < 1.0, "p", std::to_string(p), "a probability in [0, 1)");
  return {p > 0.0, uint32_t(std::floor(p * 4294967296.0)), float(1.0 / (1.0 - p))};
}

// A seed's 64 bits, from a signed or an unsigned integer.
uint64_t seed_bits(py::handle seed) {
  const uint64_t bits = PyLong_AsUnsignedLongLongMask(seed.ptr());
  if (bits == uint64_t(-1) && PyErr_Occurred()) throw py::error_already_set();
  return bits;
}

std::vector<Projection> make_projections(const py::list& list, bool gradient, bool needs_a) {
  std::vector<Projection> out;
  out.reserve(list.size());
  for (const py::handle item : list) {
    const auto tuple = py::reinterpret_borrow<py::tuple>(item);
    const size_t length = gradient ? 5 : 4;
    if (!py::isinstance<py::tuple>(item) || tuple.size() != length) {
      throw py::value_error(gradient ? "proj takes tuples (a_ptr, a_dtype, r, seed, da_ptr or 0)"
                                     : "proj takes tuples (a_ptr, a_dtype, r, seed)");
    }
    const auto a = tuple[0].cast<uintptr_t>();
    Projection one{pointer<const void>(a), tuple[1].cast<int>(), tuple[2].cast<int64_t>(), seed_bits(tuple[3]), nullptr};
    if (gradient) one.da = pointer<float>(tuple[4].cast<uintptr_t>());
    check_dtype("a_dtype", one.a_dtype);
    check_rank(one.r);
    if (needs_a) check_pointer("a", a);
    out.push_back(one);
  }
  return out;
}

int64_t total_rank(const std::vector<Projection>& projections) {
  int64_t sum = 0;
  for (const Projection& one : projections) sum += one.r;
  return sum;
}

void philox_mask(uintptr_t out, int64_t rows, int64_t cols, double p, const py::int_& seed, int threads) {
  check_size("rows", rows);
  check_size("cols", cols);
  const MaskArgs args{pointer<float>(out), rows, cols, make_dropout(p), seed_bits(seed), check_threads(threads)};
  if (rows == 0 || cols == 0) return;
  check_pointer("out", out);
  py::gil_scoped_release release;
  kernels->mask(args);
}

void shrink(uintptr_t x, int x_dtype, int64_t ldx, int64_t M, int64_t K, const py::list& proj, double p, uintptr_t out, int64_t ldo,
            int threads) {
  check_dtype("x_dtype", x_dtype);
  check_size("M", M);
  check_size("K", K);
  const auto projections = make_projections(proj, false, M > 0 && K > 0);
  const ShrinkArgs args{pointer<const void>(x), x_dtype, ldx, M, K, projections.data(), int(projections.size()), make_dropout(p),
                        pointer<float>(out), ldo, check_threads(threads)};
  if (M == 0 || projections.empty()) return;
  if (M > 1) check_stride("ldx", ldx, K), check_stride("ldo", ldo, total_rank(projections));
  if (K > 0) check_pointer("x", x);
  check_pointer("out", out);
  py::gil_scoped_release release;
  kernels->shrink(args);
}

void expand(uintptr_t y, int y_dtype, int64_t ldy, int64_t M, int64_t N, uintptr_t s, int64_t lds, int64_t r, uintptr_t b, int b_dtype,
            double scale, int threads) {
  check_dtype("y_dtype", y_dtype);
  check_dtype("b_dtype", b_dtype);
  check_size("M", M);
  check_size("N", N);
  check_rank(r);
  const ExpandArgs args{pointer<void>(y), y_dtype, ldy, M, N, pointer<const float>(s), lds, r, pointer<const void>(b), b_dtype,
                        float(scale), check_threads(threads)};
  if (M == 0 || N == 0) return;
  if (M > 1) check_stride("ldy", ldy, N), check_stride("lds", lds, r);
  check_pointer("y", y), check_pointer("s", s), check_pointer("b", b);
  py::gil_scoped_release release;
  kernels->expand(args);
}

void grad_dy(uintptr_t dy, int dy_dtype, int64_t lddy, int64_t M, int64_t N, uintptr_t s, int64_t lds, int64_t r, uintptr_t b,
             int b_dtype, double scale, uintptr_t ds, int64_t ldds, uintptr_t db, int threads) {
  check_dtype("dy_dtype", dy_dtype);
  check_dtype("b_dtype", b_dtype);
  check_size("M", M);
  check_size("N", N);
  check_rank(r);
  const GradDyArgs args{pointer<const void>(dy), dy_dtype, lddy, M, N, pointer<const float>(s), lds, r, pointer<const void>(b),
                        b_dtype, float(scale), pointer<float>(ds), ldds, pointer<float>(db), check_threads(threads)};
  if (ds == 0 && db == 0) return;
  if (M > 1) {
    check_stride("lddy", lddy, N);
    if (db != 0) check_stride("lds", lds, r);
    if (ds != 0) check_stride("ldds", ldds, r);
  }
  if (M > 0 && N > 0) {
    check_pointer("dy", dy);
    if (db != 0) check_pointer("s", s);
    if (ds != 0) check_pointer("b", b);
  }
  py::gil_scoped_release release;
  kernels->grad_dy(args);
}

void grad_x(uintptr_t x, int x_dtype, int64_t ldx, int64_t M, int64_t K, uintptr_t ds, int64_t ldds, const py::list& proj, double p,
            uintptr_t dx, int dx_dtype, int64_t lddx, int threads) {
  check_dtype("x_dtype", x_dtype);
  check_dtype("dx_dtype", dx_dtype);
  check_size("M", M);
  check_size("K", K);
  const auto projections = make_projections(proj, true, dx != 0 && M > 0 && K > 0);
  const GradXArgs args{pointer<const void>(x), x_dtype, ldx, M, K, pointer<const float>(ds), ldds, projections.data(),
                       int(projections.size()), make_dropout(p), pointer<void>(dx), dx_dtype, lddx, check_threads(threads)};
  bool any_da = false;
  for (const Projection& one : projections) any_da |= one.da != nullptr;
  if (K == 0 || projections.empty() || (dx == 0 && !any_da)) return;
  if (M > 1) {
    if (any_da) check_stride("ldx", ldx, K);
    if (dx != 0) check_stride("lddx", lddx, K);
    check_stride("ldds", ldds, total_rank(projections));
  }
  if (M > 0) {
    check_pointer("ds", ds);
    if (any_da) check_pointer("x", x);
  }
  py::gil_scoped_release release;
  kernels->grad_x(args);
}

void run_glu(const GluArgs& args) {
  check_dtype("dtype", args.dtype);
  check_size("n", args.n);
  check(args.activation >= SILU && args.activation <= GELU_TANH, "activation", std::to_string(args.activation),
        "0 (silu), 1 (gelu) or 2 (gelu_tanh)");
  check_threads(args.threads);
  if (args.n == 0) return;
  py::gil_scoped_release release;
  kernels->glu(args);
}

void glu_forward(uintptr_t gate, uintptr_t up, uintptr_t out, int dtype, int64_t n, int activation, int threads) {
  if (n > 0) check_pointer("gate", gate), check_pointer("up", up), check_pointer("out", out);
  run_glu({nullptr, pointer<const void>(gate), pointer<const void>(up), nullptr, nullptr, pointer<void>(out), dtype, n, activation,
           threads});
}

void glu_backward(uintptr_t dh, uintptr_t gate, uintptr_t up, uintptr_t dgate, uintptr_t dup, uintptr_t h, int dtype, int64_t n,
                  int activation, int threads) {
  if (n > 0) {
    check_pointer("dh", dh), check_pointer("gate", gate), check_pointer("up", up);
    check_pointer("dgate", dgate), check_pointer("dup", dup);
  }
  run_glu({pointer<const void>(dh), pointer<const void>(gate), pointer<const void>(up), pointer<void>(dgate), pointer<void>(dup),
           pointer<void>(h), dtype, n, activation, threads});
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  kernels = detect();
  m.doc() =
      "CPU kernels of fastlora: pointers are integers, matrices row-major, row strides (ld*) in elements. Dropout selects: a dropped"
      " element adds nothing even where it is NaN or infinite (torch multiplies by its mask, which leaves a NaN).";
  m.attr("F32") = int(F32);
  m.attr("BF16") = int(BF16);
  m.attr("F16") = int(F16);
  m.def("simd_level", [] { return kernels->name; }, "The instruction set in use: 'avx512', 'avx2' or 'generic'.");
  using py::arg;
  m.def("philox_mask", &philox_mask, arg("out"), arg("rows"), arg("cols"), arg("p"), arg("seed"), arg("threads"),
        "out [rows, cols] float32 = 1 / (1-p) where dropout of probability p keeps the element, 0 where it does not.");
  m.def("shrink", &shrink, arg("x"), arg("x_dtype"), arg("ldx"), arg("M"), arg("K"), arg("proj"), arg("p"), arg("out"), arg("ldo"),
        arg("threads"), "out[:, off_i:off_i+r_i] = dropout_i(x) @ A_i^T for proj = [(a, a_dtype, r, seed), ...], in one pass over x.");
  m.def("expand", &expand, arg("y"), arg("y_dtype"), arg("ldy"), arg("M"), arg("N"), arg("s"), arg("lds"), arg("r"), arg("b"),
        arg("b_dtype"), arg("scale"), arg("threads"), "y += scale * s @ B^T, in place.");
  m.def("grad_dy", &grad_dy, arg("dy"), arg("dy_dtype"), arg("lddy"), arg("M"), arg("N"), arg("s"), arg("lds"), arg("r"), arg("b"),
        arg("b_dtype"), arg("scale"), arg("ds"), arg("ldds"), arg("db"), arg("threads"),
        "ds = scale * dy @ B and db = scale * dy^T @ s, in one pass over dy; 0 skips either.");
  m.def("grad_x", &grad_x, arg("x"), arg("x_dtype"), arg("ldx"), arg("M"), arg("K"), arg("ds"), arg("ldds"), arg("proj"), arg("p"),
        arg("dx"), arg("dx_dtype"), arg("lddx"), arg("threads"),
        "dA_i = ds_i^T dropout_i(x), dx += sum_i mask_i * (ds_i @ A_i) / (1-p), for proj = [(a, a_dtype, r, seed, da or 0), ...].");
  m.def("glu_forward", &glu_forward, arg("gate"), arg("up"), arg("out"), arg("dtype"), arg("n"), arg("activation"), arg("threads"),
        "out = act(gate) * up; activation 0 silu, 1 gelu (erf), 2 gelu (tanh).");
  m.def("glu_backward", &glu_backward, arg("dh"), arg("gate"), arg("up"), arg("dgate"), arg("dup"), arg("h"), arg("dtype"), arg("n"),
        arg("activation"), arg("threads"), "dgate = dh * up * act'(gate), dup = dh * act(gate), h = act(gate) * up (0 skips h).");
}
