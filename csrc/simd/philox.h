// Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3; SC 2011), the generator of
// triton.language.random. Dropout reads it so: element (row, col) of a matrix of `cols` columns has the index
//     e = row * 4 * ceil(cols / 4) + col,
// its 32 bits are word e & 3 of the block of counter (low, high of e >> 2, 0, 0) under the key (low, high of the seed), and it
// is kept when those bits are >= threshold. Every row starts a fresh counter, and all four words of a block are used.
#pragma once

#include "vec.h"

namespace fastlora {
namespace FASTLORA_ISA {

constexpr uint32_t MUL_A = 0xD2511F53u, MUL_B = 0xCD9E8D57u;
constexpr uint32_t KEY_A = 0x9E3779B9u, KEY_B = 0xBB67AE85u;
constexpr int ROUNDS = 10;

static inline void philox_block(uint64_t counter, uint64_t seed, uint32_t out[4]) {
  uint32_t c0 = uint32_t(counter), c1 = uint32_t(counter >> 32), c2 = 0, c3 = 0;
  uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
  for (int i = 0; i < ROUNDS; ++i, k0 += KEY_A, k1 += KEY_B) {
    const uint64_t a = uint64_t(MUL_A) * c0, b = uint64_t(MUL_B) * c2;
    c0 = uint32_t(b >> 32) ^ c1 ^ k0;
    c1 = uint32_t(b);
    c2 = uint32_t(a >> 32) ^ c3 ^ k1;
    c3 = uint32_t(a);
  }
  out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
}

// Masks for one seed. GROUP elements at a time: W / 2 counters, each in a 64-bit lane, whose multiplication gives the low and the
// high word at once. A word is carried in the low half of its lane, whatever the high half holds. Three groups are interleaved where
// there are three: a group alone waits for its own multiplications (0.84 against 0.54 ns an element on Zen 3).
class Philox {
 public:
  static constexpr int GROUP = 2 * W;  // elements

  Philox(uint64_t seed, uint32_t threshold) : seed_(seed), threshold_(threshold) {
    uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
    for (int i = 0; i < ROUNDS; ++i, k0 += KEY_A, k1 += KEY_B) key0_[i] = vq{} + k0, key1_[i] = vq{} + k1;
    // Lane 2i holds counter i and lane 2i + 1 counter W/4 + i: the order in which pick() leaves the words sorted by element.
    for (int i = 0; i < W / 4; ++i) lane_[2 * i] = uint64_t(i), lane_[2 * i + 1] = uint64_t(W / 4 + i);
    set_high(0);
  }

  // Calls put(i, mask) for i = 0, W, 2 W, .. < n rounded up to GROUP: lane j of the mask is -1 where element i + j is kept, else 0.
  // Element 0 is word 0 of `counter`.
  template <class F>
  FL_INLINE void row(uint64_t counter, int64_t n, F put) {
    int64_t i = 0;
    for (; i + 2 * GROUP < n; i += 3 * GROUP, counter += 3 * GROUP / 4) groups<3>(counter, i, put);
    for (; i < n; i += GROUP, counter += GROUP / 4) groups<1>(counter, i, put);
  }

 private:
  template <int GROUPS, class F>
  FL_INLINE void groups(uint64_t counter, int64_t at, F put) {
    const uint32_t low = uint32_t(counter), high = uint32_t(counter >> 32);
    if (__builtin_expect(high != high_, 0)) set_high(high);
    if (__builtin_expect(low > 0xFFFFFFFFu - GROUPS * GROUP / 4, 0)) {  // the counter's low word overflows among these
      for (int i = 0; i < GROUPS * GROUP; i += W) put(at + i, vector_scalar(counter + uint64_t(i / 4)));
      return;
    }
    const vq a_mul = vq{} + MUL_A, b_mul = vq{} + MUL_B;
    vq a[GROUPS], b[GROUPS], c0[GROUPS], c2[GROUPS];
    // Rounds 1 to 3, less what is the same for all counters while c1 is, and c2 and c3 are 0.
#pragma GCC unroll 4
    for (int g = 0; g < GROUPS; ++g) {
      a[g] = mul_low32(lane_ + (low + uint32_t(g * (GROUP / 4))), a_mul);
      b[g] = mul_low32((a[g] >> 32) ^ key1_[0], b_mul);
      c2[g] = a[g] ^ second2_;
    }
#pragma GCC unroll 4
    for (int g = 0; g < GROUPS; ++g) {
      a[g] = mul_low32((b[g] >> 32) ^ key0_[1], a_mul);
      const vq next = mul_low32(c2[g], b_mul);
      c0[g] = (next >> 32) ^ b[g] ^ key0_[2];
      c2[g] = (a[g] >> 32) ^ third2_;
      b[g] = next;
    }
#pragma GCC unroll 16
    for (int i = 3; i < ROUNDS; ++i) {
#pragma GCC unroll 4
      for (int g = 0; g < GROUPS; ++g) {
        const vq a_old = a[g] ^ key1_[i], b_old = b[g] ^ key0_[i];
        a[g] = mul_low32(c0[g], a_mul);
        b[g] = mul_low32(c2[g], b_mul);
        c0[g] = (b[g] >> 32) ^ b_old;
        c2[g] = (a[g] >> 32) ^ a_old;
      }
    }
    const vu threshold = vu{} + threshold_;
#pragma GCC unroll 4
    for (int g = 0; g < GROUPS; ++g) {
      // Words c0, b, c2, a of each counter; in element order: c0 b c2 a of counter 0, of counter 1, ...
      const vu head = pick<false>((vu)c0[g], (vu)b[g]), tail = pick<false>((vu)c2[g], (vu)a[g]);
      put(at + g * GROUP, (vi)(pick<false>(head, tail) >= threshold));
      put(at + g * GROUP + W, (vi)(pick<true>(head, tail) >= threshold));
    }
  }

  void set_high(uint32_t high) {
    high_ = high;
    const uint32_t c0 = high ^ uint32_t(key0_[0][0]);  // after round 1, for every counter
    const uint64_t a = uint64_t(MUL_A) * c0;
    second2_ = key1_[1] ^ (vq{} + (a >> 32));
    third2_ = key1_[2] ^ (vq{} + uint64_t(uint32_t(a)));
  }

  __attribute__((noinline)) vi vector_scalar(uint64_t counter) const {
    int32_t lanes[W];
    for (int i = 0; i < W; i += 4) {
      uint32_t words[4];
      philox_block(counter + uint64_t(i / 4), seed_, words);
      for (int j = 0; j < 4; ++j) lanes[i + j] = words[j] >= threshold_ ? -1 : 0;
    }
    return load_mask(lanes);
  }

  vq key0_[ROUNDS], key1_[ROUNDS], lane_, second2_, third2_;
  uint64_t seed_;
  uint32_t threshold_, high_ = 0;
};

static FL_INLINE uint64_t first_counter(int64_t row, int64_t col, int64_t cols) {
  return uint64_t(row) * uint64_t((cols + 3) / 4) + uint64_t(col / 4);
}

}  // namespace FASTLORA_ISA
}  // namespace fastlora
