// Recurrences after a short convolution, by the gated delta rule or Mamba-2's. Reference, and what a step's rows do to a state:
// recurrent/reference.py.
//
// A head's state is changed by one row after the other, whether the row is replayed, committed or a draft's: its numbers depend on the
// rows of its path alone, in their order, and not on how these are cut into steps.
#include <cmath>

#include "threads.h"

namespace mtp {
namespace {
constexpr float EPS = 1e-6f;  // of the lengths of q and k
constexpr int WIDE = 4;       // vectors of a state's row at a time

struct Rule {
  int64_t key_heads, value_heads, key_dim, value_dim, taps, mamba2;

  int64_t channels() const { return 2 * key_heads * key_dim + value_heads * value_dim; }
  int64_t state() const { return key_dim * value_dim; }  // numbers of a head
  // Where a head's q, k and v begin among the channels.
  int64_t key(int64_t head) const { return (mamba2 ? value_heads * value_dim : key_heads * key_dim) + own(head); }
  int64_t query(int64_t head) const { return mamba2 ? key(head) + key_heads * key_dim : own(head); }
  int64_t value(int64_t head) const { return (mamba2 ? 0 : 2 * key_heads * key_dim) + head * value_dim; }

 private:
  int64_t own(int64_t head) const { return head / (value_heads / key_heads) * key_dim; }
};

// Of one layer: see LayerState in the reference.
struct LayerState {
  float* state;
  void *before, *ring;
  float* ring_gates;
  int64_t ring_rows;
  Type type;  // of `before`, of the ring and of x
};

struct StateSpans {
  const int64_t *seats, *query_start_loc, *length, *replay, *fresh;
  const int64_t* parents;  // [requests, parents_stride] or null: chains
  const int64_t *keep_after, *keep_in;
  int64_t requests, parents_stride;
};

struct Work {
  const Rule& rule;
  const LayerState& layer;
  const StateSpans& spans;
  const void* x;
  int64_t x_stride;
  const float *gates, *conv, *skip;  // [rows, 2, value_heads], [taps, channels]; of Mamba-2 with one more row, the bias, and [value_heads]
  void* out;
};

// A row of a request: the inputs of its last `taps` - 1 rows and its own, null before the request's first.
template <class T> using Window = std::vector<const T*>;

// The rows that a request's span starts from and goes on with, in their order.
template <class T> struct Rows {
  const Work& work;
  int64_t seat, first, length, drafts, replay, history;
  bool fresh;

  Rows(const Work& work, int64_t r) : work(work) {
    const StateSpans& spans = work.spans;
    seat = spans.seats[r], first = spans.query_start_loc[r], length = spans.length[r],
    drafts = spans.query_start_loc[r + 1] - first - length;
    fresh = spans.fresh[r], replay = fresh ? 0 : spans.replay[r], history = work.rule.taps - 1;
  }
  const T* ring(int64_t j) const { return (T*)work.layer.ring + (seat * work.layer.ring_rows + j) * work.rule.channels(); }
  // Number 0 is the oldest one of `before`.
  const T* operator[](int64_t number) const {
    if (number < history) return fresh ? nullptr : (T*)work.layer.before + (seat * history + number) * work.rule.channels();
    number -= history;
    return number < replay ? ring(number) : (T*)work.x + (first + number - replay) * work.x_stride;
  }
  const float* gates(int64_t number) const {  // of a row that is replayed or in the step
    const int64_t size = 2 * work.rule.value_heads;
    const float* kept = work.layer.ring_gates + seat * work.layer.ring_rows * size;
    return number < replay ? kept + number * size : work.gates + (first + number - replay) * size;
  }
};

// silu(conv) of some channels of a window.
template <class T> void mix(const Window<T>& window, const Rule& rule, const float* conv, int64_t from, int64_t count, float* to) {
  for (int64_t k = 0; k < count; k += LANES) {
    const auto some = [&](const auto* numbers) { return load_some(numbers + from + k, count - k); };
    Floats sum = rule.mamba2 ? some(conv + rule.taps * rule.channels()) : Floats{};
    for (int64_t t = 0; t < rule.taps; t++)
      if (window[t]) sum = fma(some(window[t]), some(conv + t * rule.channels()), sum);
    store_some(to + k, silu(sum), count - k);
  }
}

// Made as long as `length`.
void normalise(float* x, int64_t size, float length) {
  Floats squares = {};
  for (int64_t k = 0; k < size; k += LANES) squares = fma(load_some(x + k, size - k), load_some(x + k, size - k), squares);
  const Floats scale = set(length / std::sqrt(sum(squares) + EPS));
  for (int64_t k = 0; k < size; k += LANES) store_some(x + k, load_some(x + k, size - k) * scale, size - k);
}

// `count` vectors of each row of a state, the last one with `left` numbers: S ← decay S + k written, and what q reads from it.
template <int COUNT> void update(float* state, const Rule& rule, const float* q, const float* k, const float* v, float decay, float beta,
                                 float skip, float* read, int64_t left) {
  const auto numbers = [&](int i) { return std::min<int64_t>(left - i * LANES, LANES); };
  Floats written[COUNT] = {}, seen[COUNT] = {};
  if (!rule.mamba2)
    for (int64_t d = 0; d < rule.key_dim; d++)
      for (int i = 0; i < COUNT; i++)
        written[i] = fma(load_some(state + d * rule.value_dim + i * LANES, numbers(i)), set(k[d]), written[i]);
  for (int i = 0; i < COUNT; i++) {
    const Floats value = load_some(v + i * LANES, numbers(i));
    written[i] = (value - written[i] * set(decay)) * set(beta);
    seen[i] = value * set(skip);
  }
  for (int64_t d = 0; d < rule.key_dim; d++)
    for (int i = 0; i < COUNT; i++) {
      float* place = state + d * rule.value_dim + i * LANES;
      const Floats now = fma(set(k[d]), written[i], load_some(place, numbers(i)) * set(decay));
      store_some(place, now, numbers(i));
      seen[i] = fma(now, set(q[d]), seen[i]);
    }
  for (int i = 0; i < COUNT; i++) store_some(read + i * LANES, seen[i], numbers(i));
}

// One row of a head: its state [key_dim, value_dim] is changed, and read.
template <class T> struct Head {
  const Work& work;
  int64_t head;
  std::vector<float> numbers;

  Head(const Work& work, int64_t head) : work(work), head(head), numbers(2 * work.rule.key_dim + 2 * work.rule.value_dim) {}

  const float* step(float* state, const Window<T>& window, const float* gates) {
    const Rule& rule = work.rule;
    float *q = numbers.data(), *k = q + rule.key_dim, *v = k + rule.key_dim, *read = v + rule.value_dim;
    mix(window, rule, work.conv, rule.query(head), rule.key_dim, q);
    mix(window, rule, work.conv, rule.key(head), rule.key_dim, k);
    mix(window, rule, work.conv, rule.value(head), rule.value_dim, v);
    if (!rule.mamba2) normalise(q, rule.key_dim, 1.f / std::sqrt((float)rule.key_dim)), normalise(k, rule.key_dim, 1.f);
    const float decay = std::exp(gates[head]), beta = gates[rule.value_heads + head], skip = work.skip ? work.skip[head] : 0.f;
    int64_t d = 0;
    for (; d + WIDE * LANES <= rule.value_dim; d += WIDE * LANES)
      update<WIDE>(state + d, rule, q, k, v + d, decay, beta, skip, read + d, WIDE * LANES);
    for (; d < rule.value_dim; d += LANES) update<1>(state + d, rule, q, k, v + d, decay, beta, skip, read + d, rule.value_dim - d);
    return read;
  }
};

// All rows of one head of one request.
template <class T> void one_head(const Work& work, int64_t r, int64_t h) {
  const Rule& rule = work.rule;
  const Rows<T> rows(work, r);
  Head<T> head(work, h);
  const auto state_of = [&](int64_t row) { return work.layer.state + (row * rule.value_heads + h) * rule.state(); };
  const auto write = [&](int64_t row, const float* read) {
    convert(read, (T*)work.out + ((rows.first + row) * rule.value_heads + h) * rule.value_dim, rule.value_dim);
  };
  float* state = state_of(rows.seat);
  if (rows.fresh) std::fill_n(state, rule.state(), 0.f);
  Window<T> window(rule.taps);
  for (int64_t t = 0; t < rows.history; t++) window[t + 1] = rows[t];
  const auto next = [&](Window<T>& seen, int64_t number) {
    seen.erase(seen.begin());
    seen.push_back(rows[rows.history + number]);
  };
  for (int64_t i = 0; i < rows.replay + rows.length; i++) {
    next(window, i);
    const float* read = head.step(state, window, rows.gates(i));
    if (work.spans.keep_after && work.spans.keep_after[r] == i + 1)
      std::memcpy(state_of(work.spans.keep_in[r]), state, rule.state() * sizeof(float));
    if (i >= rows.replay) write(i - rows.replay, read);
  }
  if (!rows.drafts) return;
  // The state after each node of a tree; of a chain, after its last one.
  const int64_t* parents = work.spans.parents ? work.spans.parents + r * work.spans.parents_stride : nullptr;
  thread_local std::vector<float> nodes;
  float* first = room(nodes, (parents ? rows.drafts : 1) * rule.state());
  std::vector<Window<T>> windows(parents ? rows.drafts + 1 : 1, window);
  if (!parents) std::memcpy(first, state, rule.state() * sizeof(float));
  for (int64_t j = 0; j < rows.drafts; j++) {
    float* own = first + (parents ? j : 0) * rule.state();
    Window<T>& seen = windows[parents ? j + 1 : 0];
    if (parents) {
      std::memcpy(own, parents[j] ? first + (parents[j] - 1) * rule.state() : state, rule.state() * sizeof(float));
      seen = windows[parents[j]];
    }
    const int64_t number = rows.replay + rows.length + j;
    next(seen, number);
    write(rows.length + j, head.step(own, seen, rows.gates(number)));
  }
}

// What the next step finds of one request: the inputs before its first row, and those that wait.
template <class T> void keep(const Work& work, int64_t r) {
  const Rows<T> rows(work, r);
  const int64_t size = work.rule.channels(), gates = 2 * work.rule.value_heads;
  thread_local std::vector<T> last;
  const auto store = [&](int64_t row, int64_t after) {
    T *to = (T*)work.layer.before + row * rows.history * size, *copy = room(last, rows.history * size);
    for (int64_t t = 0; t < rows.history; t++) {
      const T* from = rows[after + t];
      from ? (void)std::memcpy(copy + t * size, from, size * sizeof(T)) : (void)std::memset(copy + t * size, 0, size * sizeof(T));
    }
    std::memcpy(to, copy, rows.history * size * sizeof(T));
  };
  if (work.spans.keep_after && work.spans.keep_after[r]) store(work.spans.keep_in[r], work.spans.keep_after[r]);
  store(rows.seat, rows.replay + rows.length);
  for (int64_t j = 0; j < rows.drafts; j++) {
    const int64_t place = rows.seat * work.layer.ring_rows + j, row = rows.first + rows.length + j;
    std::memcpy((T*)work.layer.ring + place * size, (T*)work.x + row * work.x_stride, size * sizeof(T));
    std::memcpy(work.layer.ring_gates + place * gates, work.gates + row * gates, gates * sizeof(float));
  }
}
}  // namespace

extern "C" {

// x [rows, channels] and out [rows, value_heads, value_dim], of the layer's type.
void mtp_recur(const Rule* rule, const LayerState* layer, const StateSpans* spans, const void* x, int64_t x_stride, const float* gates,
               const float* conv, const float* skip, void* out, int32_t threads) {
  const Work work{*rule, *layer, *spans, x, x_stride, gates, conv, skip, out};
  const int64_t total = spans->requests * rule->value_heads;
  std::atomic<int64_t> next{0};
  parallel(worth(threads, spans->query_start_loc[spans->requests] * rule->value_heads * rule->state()), [&](const Member& member) {
    by_type(layer->type, [&](auto number) {
      using T = decltype(number);
      for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < total;)
        one_head<T>(work, i / rule->value_heads, i % rule->value_heads);
      member.wait();  // what is overwritten now was read by all heads
      const Range mine = member.part(spans->requests);
      for (int64_t r = mine.first; r < mine.end; r++) keep<T>(work, r);
    });
  });
}
}
}  // namespace mtp
