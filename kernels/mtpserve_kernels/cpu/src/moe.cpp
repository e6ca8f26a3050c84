// Reference: moe/reference.py.
#include "moe.h"

#include <limits>
#include <numeric>

namespace mtp {
namespace {
// The `count` greatest of values[0 … size), the best first and of equal ones the lower index. NaN is less than everything.
void greatest(const float* values, int64_t size, int64_t count, int64_t* indices) {
  auto value = [&](int64_t i) { return values[i] == values[i] ? values[i] : -std::numeric_limits<float>::infinity(); };
  int64_t held = 0;
  for (int64_t i = 0; i < size; i++) {
    const float v = value(i);
    if (held == count && !(v > value(indices[count - 1]))) continue;
    int64_t place = held < count ? held++ : count - 1;
    for (; place > 0 && v > value(indices[place - 1]); place--) indices[place] = indices[place - 1];
    indices[place] = i;
  }
}

// Leaves out, by -infinity, all but the best groups; a group is as good as its two best experts together.
void leave_groups_out(const Router& router, float* choice, int64_t experts) {
  const int64_t size = experts / router.groups;
  thread_local std::vector<float> sums;
  thread_local std::vector<int64_t> best;
  sums.resize(router.groups), best.resize(router.groups);
  for (int64_t g = 0; g < router.groups; g++) {
    int64_t two[2];
    greatest(choice + g * size, size, 2, two);
    sums[g] = choice[g * size + two[0]] + choice[g * size + two[1]];
  }
  greatest(sums.data(), router.groups, router.top_groups, best.data());
  const auto end = best.begin() + router.top_groups;
  for (int64_t g = 0; g < router.groups; g++)
    if (std::find(best.begin(), end, g) == end) std::fill_n(choice + g * size, size, -std::numeric_limits<float>::infinity());
}

void softmax(float* x, int64_t size) {
  const Floats most = set(*std::max_element(x, x + size));
  for (int64_t k = 0; k < size; k += LANES) store_some(x + k, exp(load_some(x + k, size - k) - most), size - k);
  const Floats total = set(std::accumulate(x, x + size, 0.f));
  for (int64_t k = 0; k < size; k += LANES) store_some(x + k, load_some(x + k, size - k) / total, size - k);
}

// With the bias scores choose, which become sigmoids, or a softmax.
void choose_by_bias(const Router& router, float* scores, int64_t* experts) {
  const int64_t number = router.weight.outputs;
  thread_local std::vector<float> choice;
  choice.resize(number);
  if (router.softmax) softmax(scores, number);
  else
    for (int64_t k = 0; k < number; k += LANES) store_some(scores + k, sigmoid(load_some(scores + k, number - k)), number - k);
  for (int64_t k = 0; k < number; k += LANES)
    store_some(choice.data() + k, load_some(scores + k, number - k) + load_some(router.bias + k, number - k), number - k);
  if (router.top_groups < router.groups) leave_groups_out(router, choice.data(), number);
  greatest(choice.data(), number, router.top_k, experts);
}

void choose(const Router& router, float* scores, float* weights, int64_t* experts) {
  const int64_t number = router.weight.outputs;
  if (router.bias) choose_by_bias(router, scores, experts);
  else greatest(scores, number, router.top_k, experts), softmax(scores, number);
  float total = 1e-20f;
  for (int64_t k = 0; k < router.top_k; k++) total += scores[experts[k]];
  for (int64_t k = 0; k < router.top_k; k++) weights[k] = scores[experts[k]] / (router.renormalise ? total : 1.f) * router.scale;
}

// One expert with the rows that chose it.
struct Job {
  Matrix gate_up, down;
  const int32_t* rows;   // [count], or null for all of them
  const float* weights;  // [count]
  int64_t count;
  void* inner;  // [count, down.inputs]: of gate and up, or of up alone
  Clamp clamp;
  int64_t cost[2];  // from and to: of all jobs' costs one after the other
};

// The experts that were chosen, in the order of their numbers, and the shared one. Every member makes the list for itself: that is
// as quick as waiting for one that does.
struct Jobs {
  std::vector<int32_t> ends, rows;
  std::vector<float> weights, shared;
  std::vector<Job> list;

  void make(const Member& member, const Experts& experts, const Chosen& chosen, const void* x, Type type, int64_t stride, int64_t count,
            void* inner) {
    const int64_t pairs = count * chosen.top_k;
    sort(experts.first, experts.gate_up.number, chosen, pairs);
    list.clear();
    for (int64_t expert = 0, first = 0; expert < experts.gate_up.number; first = ends[expert++])
      if (const int64_t hit = ends[expert] - first)
        append(experts.gate_up[expert], experts.down[expert], rows.data() + first, weights.data() + first, hit, inner, type, experts.clamp);
    if (!experts.shared_gate_up.data) return;
    shared.assign(count, 1.f);
    if (experts.shared_gate.data) {
      linear(member.alone(), experts.shared_gate, x, type, stride, count, {shared.data(), 1, FP32, false});
      for (float& weight : shared) weight = sigmoid(set(weight))[0];
    }
    append(experts.shared_gate_up, experts.shared_down, nullptr, shared.data(), count, inner, type, {});
  }

 private:
  // By expert, and by row for each: a counting sort. Those that are elsewhere come last.
  void sort(int64_t first, int64_t number, const Chosen& chosen, int64_t pairs) {
    auto expert_of = [&](int64_t i) { return (int64_t)std::min<uint64_t>(chosen.experts[i] - first, number); };
    ends.assign(number + 2, 0);
    rows.resize(pairs), weights.resize(pairs);
    for (int64_t i = 0; i < pairs; i++) ends[expert_of(i) + 1]++;
    for (int64_t expert = 0; expert < number; expert++) ends[expert + 1] += ends[expert];
    for (int64_t i = 0; i < pairs; i++) {  // ends[expert] goes from its beginning to its end
      const int32_t place = ends[expert_of(i)]++;
      rows[place] = (int32_t)(i / chosen.top_k), weights[place] = chosen.weights[i];
    }
  }

  void append(const Matrix& gate_up, const Matrix& down, const int32_t* of, const float* by, int64_t count, void*& inner, Type type,
              Clamp clamp) {
    // Reading a panel takes about as long as multiplying it with ten rows.
    const int64_t before = list.empty() ? 0 : list.back().cost[1], cost = (count + 10) * down.inputs;
    list.push_back({gate_up, down, of, by, count, inner, clamp, {before, before + cost}});
    inner = (char*)inner + count * down.inputs * size_of(type);
  }
};

// The rows of a job side by side.
const void* gathered(const Job& job, const void* x, Type type, int64_t& stride) {
  if (!job.rows) return x;
  thread_local std::vector<char> numbers;
  const int64_t bytes = job.gate_up.inputs * size_of(type);
  char* to = room(numbers, job.count * bytes);
  for (int64_t i = 0; i < job.count; i++) std::memcpy(to + i * bytes, (const char*)x + job.rows[i] * stride * size_of(type), bytes);
  stride = job.gate_up.inputs;
  return to;
}

// Gates and ups of all jobs, one with the other. A member computes jobs, or parts of them, that cost as much as any other member's.
void all_inner(const Member& member, const std::vector<Job>& jobs, const void* x, Type type, int64_t stride, bool squared) {
  if (jobs.empty()) return;
  const int64_t parts = member.size;
  const Range mine = member.part(jobs.back().cost[1]);
  for (const Job& job : jobs) {
    const int64_t cost = job.cost[1] - job.cost[0];
    auto part = [&](int64_t at) { return std::clamp<int64_t>(ceil_div((at - job.cost[0]) * parts, cost), 0, parts); };
    const Range chosen{part(std::max(mine.first, job.cost[0])), part(std::max(mine.end, job.cost[0]))};
    if (chosen.first == chosen.end) continue;
    int64_t step = stride;
    const void* rows = gathered(job, x, type, step);
    const Output to{job.inner, job.down.inputs, type, !squared, job.clamp, squared};
    if (chosen.end - chosen.first == parts) linear(member.alone(), job.gate_up, rows, type, step, job.count, to);
    else
      for (int64_t i = chosen.first; i < chosen.end; i++)
        linear(Member{(int)i, (int)parts, member.barrier}, job.gate_up, rows, type, step, job.count, to);
  }
}

// Some panels of the result's `outputs`, over all jobs in order.
void mix(const Member& member, const std::vector<Job>& jobs, Range panels, int64_t outputs, Type type, int64_t rows, const Output& out) {
  const int64_t first = panels.first * PANEL, columns = std::min(panels.end * PANEL, outputs) - first;
  thread_local std::vector<float> sums, product_room;
  sums.assign(rows * columns, 0.f);
  float* products = room(product_room, rows * columns);
  for (const Job& job : jobs) {
    linear(member.alone(), job.down.part(first, columns), job.inner, type, job.down.inputs, job.count, {products, columns, FP32, false});
    for (int64_t i = 0; i < job.count; i++) {
      float* to = sums.data() + (job.rows ? job.rows[i] : i) * columns;
      const float* from = products + i * columns;
      const Floats weight = set(job.weights[i]);
      for (int64_t k = 0, left; (left = columns - k) > 0; k += LANES)
        store_some(to + k, fma(weight, load_some(from + k, left), load_some(to + k, left)), left);
    }
  }
  by_type(out.type, [&](auto number) {
    auto* to = (decltype(number)*)out.data + first;
    for (int64_t row = 0; row < rows; row++) convert(sums.data() + row * columns, to + row * out.stride, columns);
  });
}
}  // namespace

void route(const Member& member, const Router& router, const void* x, Type type, int64_t stride, int64_t rows, float* scores,
           float* weights, int64_t* experts) {
  const int64_t number = router.weight.outputs;
  linear(member, router.weight, x, type, stride, rows, {scores, number, FP32, false});
  member.wait();
  const Range mine = member.part(rows);
  for (int64_t row = mine.first; row < mine.end; row++)
    choose(router, scores + row * number, weights + row * router.top_k, experts + row * router.top_k);
}

int64_t inner_size(const Experts& experts, int64_t rows, int64_t top_k) {
  return rows * (top_k * experts.down.first.inputs + (experts.shared_gate_up.data ? experts.shared_down.inputs : 0));
}

void mix_experts(const Member& member, const Experts& experts, const Chosen& chosen, const void* x, Type type, int64_t stride, int64_t rows,
                 void* inner, const Output& out) {
  if (!rows) return;
  thread_local Jobs jobs;
  jobs.make(member, experts, chosen, x, type, stride, rows, inner);
  all_inner(member, jobs.list, x, type, stride, experts.squared);
  member.wait();
  const int64_t outputs = experts.down.first.outputs;
  const Range mine = member.part(ceil_div(outputs, PANEL));
  // So many panels at a time that their sums stay in the cache.
  const int64_t together = std::max<int64_t>(8, (1 << 17) / PANEL / rows);
  for (int64_t panel = mine.first; panel < mine.end; panel += together)
    mix(member, jobs.list, {panel, std::min(mine.end, panel + together)}, outputs, type, rows, out);
}

extern "C" {

void mtp_route(const Router* router, const void* x, int32_t type, int64_t stride, int64_t rows, float* scores, float* weights,
               int64_t* experts, int32_t threads) {
  const int64_t work = rows * router->weight.outputs * (router->weight.inputs + 16);
  parallel(worth(threads, work),
           [&](const Member& member) { route(member, *router, x, Type(type), stride, rows, scores, weights, experts); });
}

void mtp_mix_experts(const Experts* experts, const float* weights, const int64_t* chosen, int64_t top_k, const void* x, int32_t type,
                     int64_t stride, int64_t rows, void* inner, const Output* out, int32_t threads) {
  const int64_t work = inner_size(*experts, rows, top_k) * 3 * experts->gate_up.first.inputs;
  parallel(worth(threads, work), [&](const Member& member) {
    mix_experts(member, *experts, {weights, chosen, top_k}, x, Type(type), stride, rows, inner, *out);
  });
}
}
}  // namespace mtp
