// Attention of one row over its listed records: the kernel of sparse_mla_fp8_cp for one instruction set level. Included
// once a level inside the namespace of that level, after sparse_mla_vec.h: no include guard.
//
// Blocks of 64 keys, in the order of the list. A block is unpacked once into cache-resident panels, then
//   logits  [64 keys][heads]  = key values broadcast x query columns, heads in the vector lanes,
//   softmax  online in base 2, a lane a head,
//   sums    [heads][512]     += weights broadcast x key values, values in the vector lanes.
// A lane never meets another lane and blocks start at fixed places of the row's list, so a head's bits depend neither
// on the other heads of the call nor on other rows.

inline constexpr int64_t kBlock = 64;
inline constexpr int64_t kPanels = kLatentDim / kPanel;
inline constexpr int64_t kTilePanels = kScaleTile / kPanel;
inline constexpr int64_t kPanelStride = kBlock * kPanel + kPanel;  // not a power of two: panels share no cache sets
inline constexpr int64_t kTileUnits = kScaleTile / kUnitValues;
inline constexpr int64_t kLatentUnits = kLatentDim / kUnitValues;
inline constexpr int64_t kRopeUnits = kRopeDim / kUnitValues;
// Pairs are kept beside the fp32 panels; single values are read from the panels, only the RoPE part needs a row.
inline constexpr int64_t kRowUnits = kUnitValues == 2 ? kLatentUnits + kRopeUnits : kRopeUnits;

constexpr int64_t padded(int64_t heads) { return (heads + kWidth - 1) / kWidth * kWidth; }

// Working memory of a thread, zero at first. Lanes beyond the heads are never written and never read back.
struct Scratch {
  float* values;   // [kPanels][kPanelStride], a panel is [kBlock][kPanel]: e4m3 / kValueUnit
  Unit* rows;      // [kBlock][kRowUnits]
  float* scales;   // [kLatentTiles][kBlock]
  Unit* query;     // [kLatentUnits + kRopeUnits][padded heads]
  float* logits;   // [padded heads / kWidth][kBlock][kWidth], then the softmax weights
  float* weights;  // like logits: weight * scale of one tile
  float* sums;     // [kPanels][heads][kPanel]
  float* peak;     // [padded heads] largest logit so far
  float* total;    // [padded heads] sum of exponentials
  float* decay;    // [padded heads] what the sums of earlier blocks are multiplied with
};

// Carves the scratch out of `memory` (64-byte aligned); returns its size, also for memory = nullptr.
inline int64_t carve(Scratch& s, float* memory, int64_t heads) {
  int64_t used = 0;
  const auto take = [&](int64_t count) {
    float* start = memory + used;
    used += (count + 15) / 16 * 16;
    return start;
  };
  const int64_t lanes = padded(heads);
  s.values = take(kPanels * kPanelStride);
  s.rows = reinterpret_cast<Unit*>(take(kBlock * kRowUnits));
  s.scales = take(kLatentTiles * kBlock);
  s.query = reinterpret_cast<Unit*>(take((kLatentUnits + kRopeUnits) * lanes));
  s.logits = take(lanes * kBlock);
  s.weights = take(lanes * kBlock);
  s.sums = take(heads * kLatentDim);
  s.peak = take(lanes);
  s.total = take(lanes);
  s.decay = take(lanes);
  return used;
}

inline void load_query(const SparseMlaParams& p, int64_t row, int64_t head_begin, int64_t heads, Unit* query) {
  const int64_t lanes = padded(heads);
  for (int64_t head = 0; head < heads; ++head) {
    const uint16_t* source =
        static_cast<const uint16_t*>(p.q) + row * p.q_row_stride + (head_begin + head) * p.q_head_stride;
    for (int64_t unit = 0; unit < kLatentUnits + kRopeUnits; ++unit) {
#if SCO_SPARSE_MLA_LEVEL == 3
      std::memcpy(query + unit * lanes + head, source + 2 * (unit < kLatentUnits ? pair_at(unit) : unit), 4);
#else
      query[unit * lanes + head] = bf16_to_float(source[unit]);
#endif
    }
  }
}

inline void load_block(const SparseMlaParams& p, const int64_t* offsets, int64_t count, int64_t list_left,
                       const Scratch& s) {
  constexpr int64_t kAhead = 4;  // records are scattered: fetch one while the four before it are unpacked
  for (int64_t key = 0; key < count; ++key) {
    const uint8_t* record = p.kv_cache + offsets[key];
    if (key + kAhead < list_left)
      for (int64_t line = 0; line < kMlaRecordBytes; line += 64)
        __builtin_prefetch(p.kv_cache + offsets[key + kAhead] + line);
    Unit* row = s.rows + key * kRowUnits;
    for (int64_t tile = 0; tile < kLatentTiles; ++tile) {
      float scale;
      std::memcpy(&scale, record + kMlaScaleOffset + tile * 4, 4);
      float* panels = s.values + tile * kTilePanels * kPanelStride + key * kPanel;
      const bool nan = unpack_tile(record + tile * kScaleTile, panels, kPanelStride, row + tile * kTileUnits);
      s.scales[tile * kBlock + key] = nan ? std::numeric_limits<float>::quiet_NaN() : scale;
    }
#if SCO_SPARSE_MLA_LEVEL == 3
    std::memcpy(row + kLatentUnits, record + kMlaRopeOffset, kRopeDim * 2);
#else
    for (int64_t d = 0; d < kRopeDim; ++d) {
      uint16_t bits;
      std::memcpy(&bits, record + kMlaRopeOffset + d * 2, 2);
      row[d] = bf16_to_float(bits);
    }
#endif
  }
}

// sum[key][vector] += products of kKeys keys, `stride` units apart, with the query columns over `units` units.
template <int kKeys, int kVectors>
SCO_INLINE void add_products(const Unit* keys, int64_t stride, const Unit* query, int64_t lanes, int64_t units,
                             F (&sum)[kKeys][kVectors]) {
  for (int64_t unit = 0; unit < units; ++unit) {
    F column[kVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v)
      column[v] = load(reinterpret_cast<const float*>(query + unit * lanes + v * kWidth));
#pragma GCC unroll 16
    for (int k = 0; k < kKeys; ++k)
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) sum[k][v] = dot(keys[k * stride + unit], column[v], sum[k][v]);
  }
}

// Logits, not yet scaled, of `count` keys for kVectors * kWidth heads from lane `lane` on. A tile's part of the query
// stays in the nearest cache while the keys pass; the tile's scale is applied to its finished fp32 sum.
template <int kKeys, int kVectors>
inline void compute_logits(const Scratch& s, int64_t lanes, int64_t lane, int64_t count) {
  for (int64_t tile = 0; tile <= kLatentTiles; ++tile) {
    const bool rope = tile == kLatentTiles;
    for (int64_t key = 0; key < count; key += kKeys) {
      F sum[kKeys][kVectors] = {};
      const Unit* query = s.query + tile * kTileUnits * lanes + lane;
      const Unit* rows = s.rows + key * kRowUnits;
      if (rope) {
        add_products(rows + kRowUnits - kRopeUnits, kRowUnits, query, lanes, kRopeUnits, sum);
      } else {
#if SCO_SPARSE_MLA_LEVEL == 3
        add_products(rows + tile * kTileUnits, kRowUnits, query, lanes, kTileUnits, sum);
#else
        for (int64_t panel = 0; panel < kTilePanels; ++panel)
          add_products(s.values + (tile * kTilePanels + panel) * kPanelStride + key * kPanel, kPanel,
                       query + panel * kPanel * lanes, lanes, kPanel, sum);
#endif
      }
#pragma GCC unroll 16
      for (int k = 0; k < kKeys; ++k) {
        const float scale = rope ? 1.0f : s.scales[tile * kBlock + key + k];
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) {
          float* logit = s.logits + (lane + v * kWidth) * kBlock + (key + k) * kWidth;
          const F product = rope ? sum[k][v] : sum[k][v] * splat(kValueUnit) * splat(scale);
          store(logit, tile == 0 ? product : load(logit) + product);
        }
      }
    }
  }
}

// logits -> weights relative to the largest logit so far. A logit of -inf weighs nothing, even as the largest.
inline void update_softmax(const Scratch& s, int64_t lanes, int64_t count, float log2_scale) {
  const F minus_infinity = splat(-std::numeric_limits<float>::infinity());
  for (int64_t lane = 0; lane < lanes; lane += kWidth) {
    float* logits = s.logits + lane * kBlock;
    const F old_peak = load(s.peak + lane);
    F peak = old_peak;
    for (int64_t key = 0; key < count; ++key) {
      const F logit = load(logits + key * kWidth) * splat(log2_scale);
      store(logits + key * kWidth, logit);
      peak = larger(logit, peak);
    }
    const F shift = peak == minus_infinity ? F{} : peak;
    const F decay = exp2_nonpositive(old_peak - shift);
    F total = load(s.total + lane) * decay;
    for (int64_t key = 0; key < count; ++key) {
      const F weight = exp2_nonpositive(load(logits + key * kWidth) - shift);
      store(logits + key * kWidth, weight);
      total += weight;
    }
    store(s.peak + lane, peak);
    store(s.decay + lane, decay);
    store(s.total + lane, total);
  }
}

// sums = sums * decay + weights * values for one panel of a block.
inline void add_values(const Scratch& s, int64_t panel, int64_t heads, int64_t count) {
  const float* values = s.values + panel * kPanelStride;
  for (int64_t head = 0; head < heads; head += kSumHeads) {
    float* sums = s.sums + (panel * heads + head) * kPanel;
    const float* weights = s.weights + head / kWidth * kWidth * kBlock + head % kWidth;
    F sum[kSumHeads][2];
#pragma GCC unroll 8
    for (int h = 0; h < kSumHeads; ++h) {
      const F decay = splat(s.decay[head + h]);
      sum[h][0] = load(sums + h * kPanel) * decay;
      sum[h][1] = load(sums + h * kPanel + kWidth) * decay;
    }
    for (int64_t key = 0; key < count; ++key) {
      const F first = load(values + key * kPanel), second = load(values + key * kPanel + kWidth);
#pragma GCC unroll 8
      for (int h = 0; h < kSumHeads; ++h) {
        const F weight = splat(weights[key * kWidth + h]);
        sum[h][0] = fma(weight, first, sum[h][0]);
        sum[h][1] = fma(weight, second, sum[h][1]);
      }
    }
#pragma GCC unroll 8
    for (int h = 0; h < kSumHeads; ++h) {
      store(sums + h * kPanel, sum[h][0]);
      store(sums + h * kPanel + kWidth, sum[h][1]);
    }
  }
}

inline void store_result(const SparseMlaParams& p, int64_t row, int64_t head_begin, int64_t heads, const Scratch& s) {
  for (int64_t head = 0; head < heads; ++head) {
    const int64_t state = row * p.heads + head_begin + head;
    const float total = s.total[head];
    const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
    p.lse[state] = s.peak[head] * std::numbers::ln2_v<float> + std::log(total);  // total 0: -inf, as peak
    uint16_t* out = static_cast<uint16_t*>(p.out) + state * kLatentDim;
    for (int64_t panel = 0; panel < kPanels; ++panel) {
      const float* sums = s.sums + (panel * heads + head) * kPanel;
      for (int64_t d = 0; d < kPanel; ++d) out[panel * kPanel + d] = float_to_bf16(sums[d] * inverse);
    }
  }
}

// out and lse of heads [head_begin, head_begin + heads) of a row from the records at `offsets`.
inline void attend_row(const SparseMlaParams& p, int64_t row, int64_t head_begin, int64_t heads, const int64_t* offsets,
                       int64_t count, float* memory) {
  Scratch s;
  carve(s, memory, heads);
  const int64_t lanes = padded(heads);
  load_query(p, row, head_begin, heads, s.query);
  std::fill_n(s.sums, heads * kLatentDim, 0.0f);
  std::fill_n(s.peak, lanes, -std::numeric_limits<float>::infinity());
  std::fill_n(s.total, lanes, 0.0f);
  const float log2_scale = p.softmax_scale * std::numbers::log2e_v<float>;
  for (int64_t start = 0; start < count; start += kBlock) {
    const int64_t block = std::min(kBlock, count - start);
    load_block(p, offsets + start, block, count - start, s);
    if (lanes % (2 * kWidth) == 0) {
      for (int64_t lane = 0; lane < lanes; lane += 2 * kWidth) compute_logits<kLogitSums / 2, 2>(s, lanes, lane, block);
    } else {
      for (int64_t lane = 0; lane < lanes; lane += kWidth) compute_logits<kLogitSums, 1>(s, lanes, lane, block);
    }
    update_softmax(s, lanes, block, log2_scale);
    for (int64_t tile = 0; tile < kLatentTiles; ++tile) {
      for (int64_t lane = 0; lane < lanes; lane += kWidth)
        for (int64_t key = 0; key < block; ++key) {
          const int64_t at = lane * kBlock + key * kWidth;
          store(s.weights + at, load(s.logits + at) * splat(kValueUnit) * splat(s.scales[tile * kBlock + key]));
        }
      for (int64_t panel = tile * kTilePanels; panel < (tile + 1) * kTilePanels; ++panel)
        add_values(s, panel, heads, block);
    }
  }
  store_result(p, row, head_begin, heads, s);
}

inline int64_t scratch_floats(int64_t heads) {
  Scratch s;
  return carve(s, nullptr, heads);
}
