// A mixture of experts: the router, and the chosen experts' outputs by their weights.
#pragma once
#include "linear.h"

namespace mtp {
struct Router {
  Matrix weight;      // float32, one output per expert; its bias is a part of what is scored
  const float* bias;  // [experts] or null: added to the scores for the choice alone
  int64_t top_k, groups, top_groups;
  int32_t renormalise, softmax;  // over all experts; otherwise each score is a sigmoid
  float scale;
};

// x [rows, inputs] → weights and experts [rows, top_k], the best first; of equal ones the lower number. Scores that are NaN are chosen
// when there are no others. `scores` [rows, experts]: room, shared by the members, which wait for each other once.
void route(const Member& member, const Router& router, const void* x, Type type, int64_t stride, int64_t rows, float* scores,
           float* weights, int64_t* experts);

// All inputs and outputs are padded to whole panels, except for x's and the result's size.
struct Experts {
  Matrices gate_up, down;              // [gate; up], each of whole panels; `squared`: up alone
  Matrix shared_gate_up, shared_down;  // the expert of all rows, if shared_gate_up.data is not null
  Matrix shared_gate;                  // with one output, the sigmoid of which is its weight, if that is not 1
  Clamp clamp;                         // of the gates of those that are not shared
  bool squared;                        // none has a gate: relu(up)^2
  int64_t first;                       // the number of the first one; experts of other numbers are elsewhere, and add nothing here
};

struct Chosen {
  const float* weights;  // [rows, top_k]
  const int64_t* experts;
  int64_t top_k;
};

// Numbers of x's type that `experts` needs room for.
int64_t inner_size(const Experts& experts, int64_t rows, int64_t top_k);

// x [rows, inputs] → out [rows, outputs]: a row's sum goes over its experts in the order of their numbers, in float32, the shared one
// last. `inner`: room, shared by the members, which wait for each other once. An expert that no row chose is not read.
void mix_experts(const Member& member, const Experts& experts, const Chosen& chosen, const void* x, Type type, int64_t stride, int64_t rows,
                 void* inner, const Output& out);
}  // namespace mtp
