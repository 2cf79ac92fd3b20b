// Decoding to fp32 words, for the levels without bf16 dot products. Included before indexer_scoring_kernel.h in the
// same namespace (hence no guard).

constexpr int64_t kSteps = kIndexDim;

inline uint32_t query_word(const uint8_t* q8, int64_t step) { return std::bit_cast<uint32_t>(e4m3_to_float(q8[step])); }

inline void decode(WordVec bytes, uint32_t* words) {
  for (int64_t i = 0; i < 4; ++i) {
    const WordVec magnitude = bytes & 0x7F;
    // e4m3 has exponent bias 7, fp32 127. A subnormal (m * 2^-9) gets the exponent of 2^-6 and loses its leading one.
    const FloatVec subnormal = (FloatVec)((magnitude << 20) + (121u << 23)) - 0x1p-6f;
    const WordVec finite = magnitude < 8 ? (WordVec)subnormal : (magnitude << 20) + (120u << 23);
    const WordVec value = magnitude == kFp8Nan ? WordVec{} + kFloatNan : finite;
    const WordVec word = value | (bytes & 0x80) << 24;
    std::memcpy(words + i * kKeyTile, &word, sizeof word);
    bytes >>= 8;
  }
}
