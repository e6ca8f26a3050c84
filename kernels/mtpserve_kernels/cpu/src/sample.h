// One token from a row of logits: the largest, or a draw from softmax(logits / temperature) cut by top_k, top_p and min_p.
#pragma once
#include <atomic>
#include <limits>
#include <vector>

#include "noise.h"
#include "threads.h"

namespace mtp {

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

// Each row's largest, as torch.argmax. Members take rows from `next`, which starts at 0.
void argmax(std::atomic<int64_t>& next, const float* logits, int64_t stride, int64_t rows, int64_t vocab, int64_t* out);

}  // namespace mtp
