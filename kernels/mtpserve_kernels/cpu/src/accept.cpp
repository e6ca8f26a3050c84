// The verdict over a step's drafts: a walk from the root of each request's tree along the choices that were drafted; and drafts.
// Reference: mtpserve_kernels/spec/reference.py; mtpserve/spec/draft/propose.py. Rejection: Leviathan et al. 2023,
// https://arxiv.org/abs/2211.17192.

#include "sample.h"

namespace mtp {
// R requests with K drafts each. Only the rows of nodes that are walked are read.
struct Drafted {
  int64_t requests, nodes, vocab;  // R, K + 1, V
  const float* logits;             // [R, K + 1, V]
  const int64_t *drafts, *count;   // [R, K], [R]
  const int64_t* parents;          // of a tree: [R, K] with `parents_stride` from request to request; null: chains
  int64_t parents_stride;
  const int64_t *seats, *length;  // [R]; of each seat
  const float* q;  // [seats, q_nodes, V] with `q_stride` from seat to seat: what drafts were drawn from; null: all are coupled
  int64_t q_stride, q_nodes;
};

struct Decision {
  int64_t depth;           // of the deepest draft that may be accepted
  int64_t *tokens, *path;  // [R, depth + 1]; after the end tokens are 0, and the path repeats its last node
  int64_t* accepted;       // [R]
  bool* failed;            // [R]: a node on the path had no finite largest logit
};

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
  for (int64_t i = 0; i < law.count; i++) rest[i] = std::max(law.weights[i] / law.mass - q[law.token(i)], 0.f);
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

// What a draft model computed as logits of a distribution: NaN is 0, inf the largest number; -inf means forbidden and stays, unless all
// are.
const float* valid(const float* row, int64_t vocab, Largest& top) {
  thread_local std::vector<float> room;
  room.assign(row, row + vocab);
  const bool none = !top.nan && top.value < 0;  // not finite, so -inf
  for (float& x : room) x = none || x != x ? 0.f : std::min(x, std::numeric_limits<float>::max());
  top = largest(room.data(), vocab);
  return room.data();
}

void propose(const Proposed& p, const Sampling& sampling, int64_t i) {
  const float* row = p.logits + i * p.stride;
  const int64_t seat = p.seats[i];
  const Cuts cuts = sampling.cuts(seat);
  Largest top = largest(row, p.vocab);
  if (!top.finite()) row = valid(row, p.vocab, top);
  float* q = p.q ? p.q + i * p.q_stride : nullptr;
  if (!(cuts.temperature > 0)) {
    p.tokens[i] = top.token;
    if (q) std::fill_n(q, p.vocab, 0.f), q[top.token] = 1;
    return;
  }
  law.of(row, p.vocab, top, cuts);
  const bool coupled = !sampling.coupled || sampling.coupled[seat];
  p.tokens[i] = law.token(race(law.weights.data(), law, keyed(sampling.seed[seat], p.index[i], coupled ? DRAW : DRAFT)));
  if (!q) return;
  if (!law.all) std::fill_n(q, p.vocab, 0.f);
  for (int64_t j = 0; j < law.count; j++) q[law.token(j)] = law.weights[j] / law.mass;
}
}  // namespace

extern "C" {

void mtp_accept(const Drafted* drafted, const Sampling* sampling, const Decision* out, int32_t threads) {
  each_row(threads, drafted->requests, drafted->vocab, [&](int64_t r) { walk(*drafted, *sampling, *out, r); });
}

void mtp_draw(const Proposed* proposed, const Sampling* sampling, int32_t threads) {
  each_row(threads, proposed->rows, proposed->vocab, [&](int64_t i) { propose(*proposed, *sampling, i); });
}
}
}  // namespace mtp
