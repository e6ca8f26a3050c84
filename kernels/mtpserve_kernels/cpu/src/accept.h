// The verdict over a step's drafts: a walk from the root of each request's tree along the choices that were drafted.
#pragma once
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

// Members take requests from `next`, which starts at 0.
void accept(std::atomic<int64_t>& next, const Drafted& drafted, const Sampling& sampling, const Decision& out);

// A draft for each row: the largest where temperature is 0, else drawn with the stream DRAFT, or DRAW where the seat is coupled.
struct Proposed {
  int64_t rows, vocab;
  const float* logits;  // [rows, vocab] with `stride` from row to row; what is not finite is replaced, see accept.cpp
  int64_t stride;
  const int64_t *seats, *index;  // [rows]; `index`: of the token
  float* q;                      // [rows, vocab]: what the drafts were drawn from; null: not asked for
  int64_t* tokens;               // [rows]
};

// sampling.coupled may be null: all are. Members take rows from `next`, which starts at 0.
void propose(std::atomic<int64_t>& next, const Proposed& proposed, const Sampling& sampling);

}  // namespace mtp
