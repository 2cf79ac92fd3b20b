// The scoring kernel, included by indexer_scoring.cpp in one namespace for each instruction level (hence no guard). The
// namespace defines before:
//   kLanes, kSteps             lanes of a vector, words of a decoded query head or key
//   kHeadBlock                 heads summed at once: kHeadBlock * kVectorBlock accumulators hide the latency of the sum
//   FloatVec, WordVec          vectors of kLanes floats and of as many 32-bit words
//   multiply_add(sum, q, k)    sum + q . k over the one or two values of a word
//   decode(bytes, words)       4 e4m3 bytes a lane -> 128/kSteps words a lane, kKeyTile apart
//   query_word(q8, step)       word `step` of a query head

constexpr int kVectorBlock = 2;

inline WordVec load_words(const uint32_t* from) {
  WordVec words;
  std::memcpy(&words, from, sizeof words);
  return words;
}

void decode_query(const uint8_t* q8, int64_t heads, uint32_t* words) {
  for (int64_t head = 0; head < heads; ++head)
    for (int64_t step = 0; step < kSteps; ++step)
      words[(head / 8 * kSteps + step) * 8 + head % 8] = query_word(q8 + head * kIndexDim, step);
}

void decode_keys(const uint8_t* k8, uint32_t* words) {
  alignas(64) uint32_t columns[kIndexDim / 4][kKeyGroup];  // 4 bytes of each key side by side
  for (int64_t key = 0; key < kKeyGroup; ++key)
    for (int64_t i = 0; i < kIndexDim / 4; ++i) std::memcpy(&columns[i][key], k8 + key * kIndexDim + 4 * i, 4);
  for (int64_t i = 0; i < kIndexDim / 4; ++i)
    for (int64_t key = 0; key < kKeyGroup; key += kLanes)
      decode(load_words(&columns[i][key]), words + i * (4 * kSteps / kIndexDim) * kKeyTile + key);
}

void score_tile(const uint32_t* query, const float* weights, int64_t heads, const uint32_t* key_tile,
                const float* scales, int64_t keys, float* scores) {
  for (int64_t first = 0; first < keys; first += kVectorBlock * kLanes) {
    FloatVec total[kVectorBlock] = {};
    for (int64_t head = 0; head < heads; head += kHeadBlock) {
      const uint32_t* q = query + head / 8 * 8 * kSteps + head % 8;
      const uint32_t* k = key_tile + first;
      FloatVec dot[kHeadBlock][kVectorBlock] = {};
      for (int64_t step = 0; step < kSteps; ++step, q += 8, k += kKeyTile) {
        WordVec key_words[kVectorBlock];
        for (int v = 0; v < kVectorBlock; ++v) key_words[v] = load_words(k + v * kLanes);
        for (int h = 0; h < kHeadBlock; ++h) {
          const WordVec query_words = q[h] - WordVec{};  // broadcast
          for (int v = 0; v < kVectorBlock; ++v) dot[h][v] = multiply_add(dot[h][v], query_words, key_words[v]);
        }
      }
      for (int h = 0; h < kHeadBlock; ++h)
        for (int v = 0; v < kVectorBlock; ++v)  // relu that passes NaN on; no FMA, so that all fp32 levels agree
          total[v] += weights[head + h] * (dot[h][v] < 0.0f ? FloatVec{} : dot[h][v]);
    }
    for (int v = 0; v < kVectorBlock; ++v) {
      FloatVec scale;
      std::memcpy(&scale, scales + first + v * kLanes, sizeof scale);
      total[v] *= scale;
      std::memcpy(scores + first + v * kLanes, &total[v], sizeof total[v]);
    }
  }
}
