// Reference: torch.argmax; `law` and `race` of mtpserve_kernels/spec/reference.py; mtpserve_kernels/noise.py.
//
// A cut is found by radix selection (Alabi et al. 2012, https://doi.org/10.1145/2133803.2345676), which here weighs what it counts, among
// the few tokens that bounds leave: most of a vocabulary is read twice and sorted never.
#include "sample.h"

#include <bit>

namespace mtp {
namespace {
constexpr float INFINITE = std::numeric_limits<float>::infinity();
constexpr int64_t BLOCK = 256;  // tokens
constexpr uint32_t ONE = 0x3F800000;

thread_local std::vector<float> maxima;  // of the blocks of the row that `largest` has read last

// The first `count` lanes of a mask; count may be more than there are.
uint32_t first_of(Ints mask, int64_t count) { return bits(mask) & (count >= LANES ? ~0u : (1u << count) - 1); }

struct Item {
  uint32_t key;
  float weight;
};

thread_local std::vector<Item> items;

// Keys are kept in ascending order while what lies before them weighs less than `limit`: the last key that is kept, of the first `count`
// items. One digit a pass, and a pass over those items alone that have the digits before it.
uint32_t last_kept(int64_t count, double limit) {
  constexpr int DIGITS = 1 << 11;
  uint32_t last = 0;
  double before = 0;
  for (int shift : {21, 10, 0}) {
    double weights[DIGITS] = {};
    for (int64_t i = 0; i < count; i++) weights[items[i].key >> shift & (DIGITS - 1)] += items[i].weight;
    uint32_t digit = 0;
    double sum = before;
    for (uint32_t d = 0; d < DIGITS && sum < limit; d++) {
      if (weights[d] == 0) continue;
      digit = d, before = sum;
      sum += weights[d];
    }
    int64_t left = 0;
    for (int64_t i = 0; i < count; i++) {
      const Item item = items[i];
      items[left] = item;
      left += (item.key >> shift & (DIGITS - 1)) == digit;
    }
    count = left;
    last |= digit << shift;
  }
  return last;
}

// Leaves the tokens whose weight is at least `least`.
void keep(Law& law, float least) {
  int64_t kept = 0;
  law.tokens.resize(law.weights.size());
  for (int64_t i = 0; i < law.count; i += LANES) {
    if (!first_of(at_least(load(&law.weights[i]), set(least)), law.count - i)) continue;
    // No branch for each: half of them would be guessed wrong.
    for (int64_t j = i, end = std::min(law.count, i + LANES); j < end; j++) {
      const float weight = law.weights[j];
      law.tokens[kept] = (int32_t)law.token(j), law.weights[kept] = weight;
      kept += weight >= least;
    }
  }
  law.count = kept, law.all = false;
}

double mass_of(const Law& law) {
  double mass = 0;
  for (int64_t first = 0; first < law.count; first += BLOCK) {
    const int64_t end = std::min(law.count, first + BLOCK);
    Floats sums = {};
    for (int64_t i = first; i < end; i += LANES) sums = sums + load_some(&law.weights[i], end - i);
    mass += sum(sums);
  }
  return mass;
}

// The top_k scaled logits. Their k-th is at least the k-th of the blocks' maxima, so that few blocks can have one of them.
void keep_top_k(Law& law, const float* row, int64_t vocab, float top, const Cuts& cuts) {
  const int64_t blocks = ceil_div(vocab, BLOCK);
  auto scaled = [&](Floats x) { return (x - set(top)) / set(cuts.temperature); };
  float least = -INFINITE;
  if (blocks >= cuts.top_k) {
    std::vector<float>& order = law.weights;
    std::copy_n(maxima.begin(), blocks, order.begin());
    std::nth_element(order.begin(), order.begin() + cuts.top_k - 1, order.begin() + blocks, std::greater<float>());
    least = (order[cuts.top_k - 1] - top) / cuts.temperature;
  }
  law.tokens.resize(law.weights.size());
  law.all = false, law.count = 0;
  items.resize(law.weights.size());
  for (int64_t block = 0; block < blocks; block++) {
    if ((maxima[block] - top) / cuts.temperature < least) continue;
    const int64_t end = std::min(vocab, (block + 1) * BLOCK);
    for (int64_t i = block * BLOCK; i < end; i += LANES) {
      float s[LANES];
      const Floats x = scaled(load_some(row + i, end - i));
      store(s, x);
      for (uint32_t hits = first_of(at_least(x, set(least)), end - i); hits; hits &= hits - 1) {
        const int lane = std::countr_zero(hits);
        law.tokens[law.count] = int32_t(i + lane), law.weights[law.count] = s[lane];
        items[law.count++] = {std::bit_cast<uint32_t>(std::abs(s[lane])), 1.f};  // none is above 0: in descending order
      }
    }
  }
  keep(law, -std::bit_cast<float>(last_kept(law.count, double(cuts.top_k))));
}

// The fewest of the largest weights that hold top_p of the mass. All that weigh less than the tail's average have less than the tail
// together, so none of them is kept.
void keep_top_p(Law& law, float top_p) {
  const double mass = mass_of(law);
  keep(law, float(0.999 * (1 - double(top_p)) * mass / double(law.count)));
  items.resize(law.weights.size());
  for (int64_t i = 0; i < law.count; i++) {
    const float weight = std::min(law.weights[i], 1.f);
    items[i] = {ONE - std::bit_cast<uint32_t>(weight), weight};
  }
  keep(law, std::bit_cast<float>(ONE - last_kept(law.count, top_p * mass)));
}
}  // namespace

Largest largest(const float* row, int64_t vocab) {
  Largest top{-INFINITE, 0, false};
  int64_t where = 0;
  maxima.resize(std::max<int64_t>(maxima.size(), ceil_div(vocab, BLOCK)));
  for (int64_t first = 0; first < vocab; first += BLOCK) {
    const int64_t count = std::min(BLOCK, vocab - first);
    const float* x = row + first;
    float last[BLOCK];
    if (count < BLOCK) std::fill(std::copy_n(x, count, last), last + BLOCK, -INFINITE), x = last;
    // max(a, b) is b where one is NaN: a NaN in x does not stay in the maximum.
    Floats most[2] = {set(-INFINITE), set(-INFINITE)};
    Ints nans = {};
    for (int64_t i = 0; i < BLOCK; i += 2 * LANES) {
      const Floats a = load(x + i), b = load(x + i + LANES);
      nans |= either_nan(a, b);
      most[0] = max(a, most[0]), most[1] = max(b, most[1]);
    }
    const float block = max(max(most[0], most[1]));
    maxima[first / BLOCK] = block;
    if (!top.nan && bits(nans)) {
      top.nan = true, top.token = first + (std::find_if(x, x + count, [](float y) { return y != y; }) - x);
    }
    if (block > top.value) top.value = block, where = first;
  }
  if (!top.nan && top.value > -INFINITE) top.token = std::find(row + where, row + vocab, top.value) - row;
  return top;
}

void Law::of(const float* row, int64_t vocab, const Largest& top, const Cuts& cuts) {
  weights.resize(std::max<int64_t>(weights.size(), vocab + BLOCK));
  if (cuts.top_k > 0 && cuts.top_k < vocab) {
    keep_top_k(*this, row, vocab, top.value, cuts);
    for (int64_t i = 0; i < count; i += LANES) store(&weights[i], exp(load(&weights[i])));
  } else {
    all = true, count = vocab;
    for (int64_t i = 0; i < vocab; i += LANES) {
      store(&weights[i], exp((load_some(row + i, vocab - i) - set(top.value)) / set(cuts.temperature)));
    }
  }
  if (cuts.top_p < 1) keep_top_p(*this, cuts.top_p);
  if (cuts.min_p > 0) keep(*this, cuts.min_p);
  mass = float(mass_of(*this));
}

float Law::probability(int64_t token) const {
  if (all) return token >= 0 && token < count ? weights[token] / mass : 0;
  const auto end = tokens.begin() + count, found = std::lower_bound(tokens.begin(), end, token);
  return found != end && *found == token ? weights[found - tokens.begin()] / mass : 0;
}

// exponential(bits) ≥ unit(bits): what is too late by the upper half of its bits is not looked at again, and few logarithms are taken.
int64_t race(const float* weights, const Law& law, uint64_t key) {
  const uint64_t base = finalise(key);
  double best = 0;
  int64_t winner = -1;
  float bound = INFINITE;  // 2^31 / best, and a little more for what rounding may do
  float early[BLOCK];      // 2^31 unit(bits), rounded
  for (int64_t first = 0; first < law.count; first += BLOCK) {
    const int64_t count = std::min(BLOCK, law.count - first);
    auto rounded = [](uint64_t number) { return float(int32_t(finalise(number) >> 33)); };
    uint64_t number = base + uint64_t(first + 1) * GOLDEN;
    if (law.all)
      for (int64_t i = 0; i < count; i++, number += GOLDEN) early[i] = rounded(number);
    else
      for (int64_t i = 0; i < count; i++) early[i] = rounded(base + uint64_t(law.tokens[first + i] + 1) * GOLDEN);
    for (int64_t i = 0; i < count; i += LANES) {
      const Floats latest = load(weights + first + i) * set(bound);
      for (uint32_t hits = first_of(at_least(latest, load(early + i)), count - i); hits; hits &= hits - 1) {
        const int64_t at = first + i + std::countr_zero(hits);
        const double speed = double(weights[at]) / exponential(token_bits(base, law.token(at)));
        if (speed <= best) continue;
        best = speed, winner = at;
        bound = float(0x1p31 * 1.0001 / speed);
      }
    }
  }
  return winner;
}

extern "C" void mtp_argmax(const float* logits, int64_t stride, int64_t rows, int64_t vocab, int64_t* out, int32_t threads) {
  each_row(threads, rows, vocab, [&](int64_t row) { out[row] = largest(logits + row * stride, vocab).token; });
}
}  // namespace mtp
