// XXH3-128 of long inputs (default secret, seed 0) in pieces that a device computes side by side; the specification is
// doc/xxhash_spec.md of github.com/Cyan4973/xxHash. The input is a row of blocks of 16 stripes of 8 words. What a
// stripe adds to the 8 accumulators does not depend on what they are: only the scrambling behind each block is a chain.
#pragma once

#include <cstdint>

namespace sparse_cp_ops::xxh3 {

inline constexpr int kLanes = 8;  // accumulators, and words of a stripe
inline constexpr int kBlockStripes = 16;
inline constexpr int kStripeBytes = kLanes * 8;
inline constexpr int kBlockBytes = kBlockStripes * kStripeBytes;
inline constexpr int kShortBytes = 240;  // inputs up to here are hashed in another way

inline constexpr uint64_t kPrime32_1 = 0x9e3779b1;
inline constexpr uint64_t kPrime64_1 = 0x9e3779b185ebca87, kPrime64_2 = 0xc2b2ae3d27d4eb4f;

// Where the words of the secret start that a step mixes in, in bytes.
inline constexpr int kScrambleSecret = 128, kLastStripeSecret = 121, kLowSecret = 11, kHighSecret = 117;

static __constant__ const uint64_t kSecret[24] = {
    0xbe4ba423396cfeb8, 0x1cad21f72c81017c, 0xdb979083e96dd4de, 0x1f67b3b7a4a44072, 0x78e5c0cc4ee679cb,
    0x2172ffcc7dd05a82, 0x8e2443f7744608b8, 0x4c263a81e69035e0, 0xcb00c391bb52283c, 0xa32e531b8b65d088,
    0x4ef90da297486471, 0xd8acdea946ef1938, 0x3f349ce33f76faa8, 0x1d4f0bc7c7bbdcf9, 0x3159b4cd4be0518a,
    0x647378d9c97e9fc8, 0xc3ebd33483acc5ea, 0xeb6313faffa081c5, 0x49daf0b751dd0d17, 0x9e68d429265516d3,
    0xfca1477d58be162b, 0xce31d07ad1b8f88f, 0x280416958f3acb45, 0x7e404bbbcafbd7af};
static __constant__ const uint64_t kInitial[kLanes] = {0xc2b2ae3d,         kPrime64_1,         kPrime64_2,
                                                       0x165667b19e3779f9, 0x85ebca77c2b2ae63, 0x85ebca77,
                                                       0x27d4eb2f165667c5, kPrime32_1};

// A word of the secret at any byte.
__device__ __forceinline__ uint64_t secret_word(int byte) {
  const int word = byte / 8, shift = byte % 8 * 8;
  return shift == 0 ? kSecret[word] : kSecret[word] >> shift | kSecret[word + 1] << (64 - shift);
}

// What a stripe adds to the accumulator of a word; `other` is the word of the neighbouring lane, lane ^ 1.
__device__ __forceinline__ uint64_t contribution(uint64_t word, uint64_t other, uint64_t secret) {
  const uint64_t keyed = word ^ secret;
  return other + (keyed & 0xffffffff) * (keyed >> 32);
}

__device__ __forceinline__ uint64_t scramble(uint64_t accumulator, uint64_t secret) {
  return (accumulator ^ accumulator >> 47 ^ secret) * kPrime32_1;
}

// One half of the hash from all accumulators.
__device__ __forceinline__ uint64_t merge(const uint64_t (&accumulators)[kLanes], int secret, uint64_t start) {
  uint64_t sum = start;
#pragma unroll
  for (int lane = 0; lane < kLanes; lane += 2) {
    const uint64_t a = accumulators[lane] ^ secret_word(secret + 8 * lane);
    const uint64_t b = accumulators[lane + 1] ^ secret_word(secret + 8 * lane + 8);
    sum += a * b ^ __umul64hi(a, b);
  }
  sum = (sum ^ sum >> 37) * 0x165667919e3779f9;
  return sum ^ sum >> 32;
}

}  // namespace sparse_cp_ops::xxh3
