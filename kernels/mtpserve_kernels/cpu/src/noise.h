// Reference: mtpserve_kernels/noise.py (SplitMix64). Random numbers that are a function of (seed, index of the token, stream, token).
#pragma once
#include <cmath>
#include <cstdint>

namespace mtp {

constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15;
constexpr int64_t STREAMS = 3;                // independent numbers for each index
enum Stream : int64_t { DRAFT, COIN, DRAW };  // mtpserve/spec/streams.py

inline uint64_t finalise(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

inline uint64_t keyed(int64_t seed, int64_t index, Stream stream) {
  return finalise(uint64_t(index * STREAMS + stream) * GOLDEN) ^ uint64_t(seed);
}

// In (0, 1), both ends left out.
inline double unit(uint64_t bits) { return (double(bits >> 12) + 0.5) * 0x1p-52; }

// The bits of a token's number; `base` is finalise(key).
inline uint64_t token_bits(uint64_t base, int64_t token) { return finalise(base + uint64_t(token + 1) * GOLDEN); }

inline double exponential(uint64_t bits) { return -std::log1p(-unit(bits)); }

}  // namespace mtp
