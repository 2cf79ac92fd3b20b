// Operations on candidate lists, included after indexer_scoring_kernel.h in the same namespaces (hence no guard). Needs
//   store_where(keep, orders, positions, to_orders, to_positions)
//       stores the lanes whose keep is -1 side by side, returns their number; may write a whole vector

inline IntVec lane_numbers() {
  IntVec lanes;
  for (int i = 0; i < kLanes; ++i) lanes[i] = i;
  return lanes;
}

template <class Vec, class T>
inline Vec load_vector(const T* from) {
  static_assert(sizeof(Vec) == kLanes * sizeof(T));
  Vec values;
  std::memcpy(&values, from, sizeof values);
  return values;
}

void append_candidates(TopkCandidates& list, const float* scores, int64_t keys, int64_t first_position) {
  const IntVec lanes = lane_numbers();
  for (int64_t i = 0; i < keys; i += kLanes) {
    const FloatVec score = load_vector<FloatVec>(scores + i);
    const IntVec bits = (IntVec)score;
    const IntVec number = score == 0.0f ? IntVec{} : bits ^ ((bits >> 31) & 0x7FFFFFFF);
    const IntVec order = score != score ? IntVec{} + TopkCandidates::kNan : number;
    const IntVec keep = (order > list.threshold) & (lanes < static_cast<int32_t>(keys - i));
    list.count += store_where(keep, order, lanes + static_cast<int32_t>(first_position + i), list.orders + list.count,
                              list.positions + list.count);
  }
}

inline int32_t count_at_least(const TopkCandidates& list, int32_t order) {
  int32_t n = 0;
  for (int64_t i = 0; i < list.count; ++i) n += list.orders[i] >= order;
  return n;
}

// Keeps the best k keys of more: bisects the order of the k-th best (a count is one pass over a few thousand integers
// in the first cache), then drops what is below and, of its equals, the last ones.
void keep_best(TopkCandidates& list, int64_t k) {
  int32_t low = std::numeric_limits<int32_t>::max(), high = TopkCandidates::kBelowAll;
  for (int64_t i = 0; i < list.count; ++i) {
    low = std::min(low, list.orders[i]);
    high = std::max(high, list.orders[i]);
  }
  int64_t at_least_low = list.count;
  while (low < high && at_least_low > k) {
    const int32_t middle = static_cast<int32_t>((int64_t{low} + high + 1) >> 1);
    const int64_t at_least_middle = count_at_least(list, middle);
    if (at_least_middle < k) {
      high = middle - 1;
    } else {
      low = middle;
      at_least_low = at_least_middle;
    }
  }
  list.threshold = low;

  int32_t last_tie = std::numeric_limits<int32_t>::max();  // position of the last kept key of order `low`
  if (at_least_low > k) {
    int64_t ties = k - count_at_least(list, low + 1);
    for (int64_t i = 0; ties > 0; ++i) {
      ties -= list.orders[i] == low;
      last_tie = list.positions[i];
    }
  }
  const IntVec lanes = lane_numbers();
  int64_t kept = 0;
  for (int64_t i = 0; i < list.count; i += kLanes) {
    const IntVec order = load_vector<IntVec>(list.orders + i), position = load_vector<IntVec>(list.positions + i);
    const IntVec keep = (order >= low) & ((order > low) | (position <= last_tie)) &
                        (lanes < static_cast<int32_t>(std::min(list.count - i, kLanes)));
    kept += store_where(keep, order, position, list.orders + kept, list.positions + kept);
  }
  list.count = kept;
}
