// Running exact top-k of one row: keys arrive in ascending position, the list keeps those that can still be among the
// best, in that order. Once the list holds k keys, a later key has to beat the k-th best strictly: ties go to the
// smaller position.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

namespace sparse_cp_ops {

// Unsigned order of the scores: NaN (1) below every number, -0.0 equal to +0.0; 0 stands for "below everything".
inline uint32_t score_order(float score) {
  const uint32_t bits = std::bit_cast<uint32_t>(score);
  if (score != score) return 1;
  if (score == 0.0f) return 0x80000000u;
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

struct TopkCandidates {
  uint32_t* order;     // [capacity] score_order of each key
  int32_t* positions;  // [capacity] ascending
  int64_t count;
  uint32_t threshold;  // a new key needs a larger order

  // Room for `keys` more is the caller's concern.
  void append(const float* scores, int64_t keys, int64_t first_position) {
    int64_t n = count;
    for (int64_t i = 0; i < keys; ++i) {
      const uint32_t value = score_order(scores[i]);
      order[n] = value;
      positions[n] = static_cast<int32_t>(first_position + i);
      n += value > threshold;
    }
    count = n;
  }

  // Keeps the best k <= count keys: finds the order of the k-th by three digits, then drops what is below it and, of
  // its equals, the last ones.
  void keep_best(int64_t k) {
    constexpr int kShift[] = {21, 10, 0}, kBits[] = {11, 11, 10};
    uint32_t prefix = 0;
    int64_t wanted = k;  // of the keys that share the digits found so far, how many are kept
    for (int pass = 0; pass < 3; ++pass) {
      uint32_t histogram[1 << 11] = {};
      const uint32_t digits = (1u << kBits[pass]) - 1;
      const int above = kShift[pass] + kBits[pass];
      for (int64_t i = 0; i < count; ++i)
        if (above == 32 || order[i] >> above == prefix) ++histogram[order[i] >> kShift[pass] & digits];
      uint32_t digit = digits;
      while (histogram[digit] < wanted) wanted -= histogram[digit--];
      prefix = prefix << kBits[pass] | digit;
    }
    threshold = prefix;
    int64_t n = 0;
    for (int64_t i = 0; i < count; ++i) {
      const bool tie = order[i] == threshold;
      const bool keep = order[i] > threshold || (tie && wanted > 0);
      wanted -= tie;
      order[n] = order[i];
      positions[n] = positions[i];
      n += keep;
    }
    count = n;
  }
};

}  // namespace sparse_cp_ops
