// One token from a row of logits: the largest, or a draw from softmax(logits / temperature) cut by top_k, top_p and min_p.
#pragma once
#include <cmath>
#include <limits>

#include "threads.h"

namespace mtp {
// Random numbers that are a function of (seed, index of the token, stream, token): mtpserve_kernels/noise.py (SplitMix64).
constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15;
constexpr int64_t STREAMS = 3;                // independent numbers for each index
enum Stream : int64_t { DRAFT, COIN, DRAW };  // mtpserve/spec/verify/streams.py

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

constexpr int64_t SMALL_LOGITS = 1 << 16;  // that are read before a second thread has started

struct Largest {
  float value;    // NaNs are left out
  int64_t token;  // the first that is NaN, else the first of the largest
  bool nan;

  bool finite() const { return !nan && std::abs(value) < std::numeric_limits<float>::infinity(); }
};

Largest largest(const float* row, int64_t vocab);

struct Cuts {
  float temperature;  // > 0
  int64_t top_k;      // 0: off
  float top_p;        // 1: off
  float min_p;        // 0: off
};

// What the cuts leave of a row, each on what the one before it left; ties with the last that is kept stay in. A token's weight is
// e^((logit - largest) / temperature), so that the largest's is 1, and its probability weight / mass.
struct Law {
  bool all;                     // tokens 0 … count - 1
  std::vector<int32_t> tokens;  // otherwise: ascending
  std::vector<float> weights;
  int64_t count;
  float mass;

  // `top`: of this row, the last one for which this thread has called `largest`.
  void of(const float* row, int64_t vocab, const Largest& top, const Cuts& cuts);
  int64_t token(int64_t i) const { return all ? i : tokens[i]; }
  float probability(int64_t token) const;  // 0 for any number that is no token of the law
};

// Where in the law the winner is of the race between `weights`, each divided by its token's exponential noise; -1 where all are 0.
int64_t race(const float* weights, const Law& law, uint64_t key);

// What seats ask for, one number for each.
struct Sampling {
  const float* temperature;  // 0 is greedy
  const int64_t* top_k;
  const float *top_p, *min_p;
  const int64_t* seed;
  const bool* coupled;

  Cuts cuts(int64_t seat) const { return {temperature[seat], top_k[seat], top_p[seat], min_p[seat]}; }
};

// A draft for each row: the largest where temperature is 0, else drawn with the stream DRAFT, or DRAW where the seat is coupled; all are
// where sampling.coupled is null.
struct Proposed {
  int64_t rows, vocab;
  const float* logits;  // [rows, vocab] with `stride` from row to row; what is not finite is replaced, see `valid`
  int64_t stride;
  const int64_t *seats, *index;  // [rows]; `index`: of the token
  float* q;                      // [rows, vocab]: what the drafts were drawn from; null: not asked for
  int64_t q_stride;              // from row to row
  int64_t* tokens;               // [rows]
};

extern "C" {
void mtp_draw(const Proposed* proposed, const Sampling* sampling, int32_t threads);
// Each row's largest, as torch.argmax: logits [rows, vocab] with `stride` from row to row → out [rows].
void mtp_argmax(const float* logits, int64_t stride, int64_t rows, int64_t vocab, int64_t* out, int32_t threads);
}

// body(row) for each row of `vocab` logits: members take rows as they come to them.
template <class Body> void each_row(int threads, int64_t rows, int64_t vocab, const Body& body) {
  std::atomic<int64_t> next{0};
  parallel(rows == 1 || rows * vocab < SMALL_LOGITS ? 1 : threads, [&](const Member&) {
    for (int64_t row; (row = next.fetch_add(1, std::memory_order_relaxed)) < rows;) body(row);
  });
}
}  // namespace mtp
