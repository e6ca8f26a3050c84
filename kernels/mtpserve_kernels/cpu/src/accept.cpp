// Reference: mtpserve_kernels/spec/reference.py. Rejection: Leviathan et al. 2023, https://arxiv.org/abs/2211.17192.
#include "accept.h"

#include <algorithm>

namespace mtp {
namespace {

thread_local Law law;
thread_local std::vector<float> rest;

struct Choice {
  int64_t token;
  int64_t next;  // the node after it; 0: none
};

// The first draft after `node` that is `token`.
int64_t child(const Drafted& d, int64_t r, int64_t node, int64_t token) {
  const int64_t *drafts = d.drafts + r * (d.nodes - 1), count = std::min(d.count[r], d.nodes - 1);
  if (!d.parents) return node < count && drafts[node] == token ? node + 1 : 0;
  for (int64_t i = 0; i < count; i++)
    if (d.parents[r * d.parents_stride + i] == node && drafts[i] == token) return i + 1;
  return 0;
}

// A draft that was drawn from q: kept with probability min(1, p / q), or a draw from max(p - q, 0).
Choice kept_or_rest(const float* q, int64_t draft, int64_t node, int64_t vocab, uint64_t coin, uint64_t draw) {
  if (draft >= 0 && draft < vocab && unit(finalise(coin)) * double(q[draft]) < double(law.probability(draft))) return {draft, node + 1};
  rest.resize(law.weights.size());
  if (law.all)
    for (int64_t i = 0; i < law.count; i++) rest[i] = std::max(law.weights[i] / law.mass - q[i], 0.f);
  else
    for (int64_t i = 0; i < law.count; i++) rest[i] = std::max(law.weights[i] / law.mass - q[law.tokens[i]], 0.f);
  // p = q up to rounding leaves nothing over; then the rejection was rounding too, and p itself is the law.
  int64_t winner = race(rest.data(), law, draw);
  return {law.token(winner >= 0 ? winner : race(law.weights.data(), law, draw)), 0};
}

Choice choose(const Drafted& d, const Sampling& sampling, int64_t r, int64_t node, int64_t at, int64_t depth, const Largest& top) {
  const int64_t seat = d.seats[r];
  const Cuts cuts = sampling.cuts(seat);
  if (!(cuts.temperature > 0)) return {top.token, child(d, r, node, top.token)};
  law.of(d.logits + (r * d.nodes + node) * d.vocab, d.vocab, top, cuts);
  const uint64_t draw = keyed(sampling.seed[seat], d.length[seat] + at, DRAW);
  const bool drawn = d.q && !sampling.coupled[seat];
  if (drawn && at < depth && node < std::min({d.count[r], d.nodes - 1, d.q_nodes}))
    return kept_or_rest(d.q + seat * d.q_stride + node * d.vocab, d.drafts[r * (d.nodes - 1) + node], node, d.vocab,
                        keyed(sampling.seed[seat], d.length[seat] + at, COIN), draw);
  const int64_t token = law.token(race(law.weights.data(), law, draw));
  return {token, drawn ? 0 : child(d, r, node, token)};
}

void walk(const Drafted& d, const Sampling& sampling, const Decision& out, int64_t r) {
  int64_t *tokens = out.tokens + r * (out.depth + 1), *path = out.path + r * (out.depth + 1), node = 0, at = 0;
  std::fill_n(tokens, out.depth + 1, 0);
  out.failed[r] = false;
  for (;; at++) {
    path[at] = node;
    const Largest top = largest(d.logits + (r * d.nodes + node) * d.vocab, d.vocab);
    if (!top.finite()) {
      out.failed[r] = true;
      break;
    }
    const Choice choice = choose(d, sampling, r, node, at, out.depth, top);
    tokens[at] = choice.token;
    if (!choice.next || at == out.depth) break;
    node = choice.next;
  }
  out.accepted[r] = at;
  std::fill(path + at, path + out.depth + 1, node);
}

}  // namespace

void accept(std::atomic<int64_t>& next, const Drafted& drafted, const Sampling& sampling, const Decision& out) {
  for (int64_t r; (r = next.fetch_add(1, std::memory_order_relaxed)) < drafted.requests;) walk(drafted, sampling, out, r);
}

}  // namespace mtp

extern "C" {

void mtp_accept(const float* logits, const int64_t* drafts, const int64_t* count, const int64_t* parents, int64_t parents_stride,
                const int64_t* seats, const int64_t* length, const float* temperature, const int64_t* top_k, const float* top_p,
                const float* min_p, const int64_t* seed, const bool* coupled, const float* q, int64_t q_stride, int64_t q_nodes,
                int64_t* tokens, int64_t* accepted, int64_t* path, bool* failed, int64_t requests, int64_t nodes, int64_t vocab,
                int64_t depth, int32_t threads) {
  const mtp::Drafted drafted{requests, nodes, vocab, logits, drafts, count, parents, parents_stride, seats, length, q, q_stride, q_nodes};
  const mtp::Sampling sampling{temperature, top_k, top_p, min_p, seed, coupled};
  const mtp::Decision out{depth, tokens, path, accepted, failed};
  std::atomic<int64_t> next{0};
  const bool small = requests == 1 || requests * vocab < mtp::SMALL_LOGITS;
  mtp::parallel(small ? 1 : threads, [&](const mtp::Member&) { mtp::accept(next, drafted, sampling, out); });
}
}
