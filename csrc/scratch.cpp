// Memory that a thread keeps between calls (see kernels.h).
#include "kernels.h"

#include <cstdlib>
#include <new>

namespace fastlora {
namespace {

constexpr size_t KEEP = size_t(64) << 20;  // bytes; what is larger is given back at the next smaller request

struct Arena {
  float* data = nullptr;
  size_t bytes = 0;
  ~Arena() { std::free(data); }
};

thread_local Arena arena;

}  // namespace

float* scratch(size_t floats) {
  const size_t bytes = (floats * sizeof(float) + 4095) / 4096 * 4096;
  if (bytes > arena.bytes || (arena.bytes > KEEP && bytes <= KEEP)) {
    std::free(arena.data);
    arena.bytes = 0;
    arena.data = static_cast<float*>(std::aligned_alloc(4096, bytes));
    if (arena.data == nullptr) throw std::bad_alloc();
    arena.bytes = bytes;
  }
  return arena.data;
}

}  // namespace fastlora
