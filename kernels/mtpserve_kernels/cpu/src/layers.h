// A stack of layers in one call: see layers.cpp.
#pragma once
#include "attention.h"
#include "fused.h"
#include "linear.h"

namespace mtp {
struct Layer;
struct Rank;

// What a layer is given of a planned batch.
struct Context {
  void *keys, *values;
  const Spans* spans;
  const int64_t* slots;  // [rows]
};

// layers/fusion.py: what a draft model's layer gets. project: from both norms side by side.
struct Fusion {
  Norm embedding_norm, hidden_norm;
  Matrix project;
  bool embedding_first;
};

// x and residual (or null) [rows, hidden], of `type` → out and total [rows, hidden], whose sum is the last layer's output; with a norm
// after the last layer total is that sum, and normed [rows, hidden] its norm.
struct Pass {
  const void *x, *residual;
  void *out, *total, *normed;
  Norm last;
  int64_t rows, hidden;
  Type type;
  Rotation rotation;
  Rank* ranks;  // of which each has a part of every layer, or null
  // Not null: instead of x there are embedding and features [rows, hidden], which it makes x of. With ids [rows] the embedding is the
  // table that they are looked up in.
  const Fusion* fusion;
  const void* embedding;
  const int64_t* ids;
  const void* features;
  int64_t features_stride;
  bool stores;  // of the first layer keys and values alone; nothing is written but these
};

// `layers` and `contexts` [count].
extern "C" void mtp_layers(const Layer* layers, const Context* contexts, int64_t count, const Pass* pass, int32_t threads);
}  // namespace mtp
