// A stack of pre-norm decoder layers in one parallel region: the ops of the other files, with a wait between them. For a small model the
// calls of single ops, and the threads' forking and joining, cost as much as the arithmetic.
#pragma once
#include "attention.h"
#include "fused.h"
#include "moe.h"

namespace mtp {

struct Norm {
  const void* weight;
  Type type;
  float eps;
};

// layers/attention.py; where kv_rank is not 0, latent attention: layers/mla.py.
struct AttentionLayer {
  Matrix in, out;  // in: q, k, v of all heads; latent: the query, or what q_up makes it of, and the cache's row
  int64_t heads, kv_heads, dim;
  Matrix q_up;  // no outputs: none
  Norm q_norm, kv_norm;
  Matrices k_up, v_up;
  int64_t q_rank, kv_rank, nope, rope, value;
};

// layers/decoder.py, class DecoderLayer. The feed-forward block is a mixture of experts where there is a router.
struct Layer {
  Norm attention_norm, mlp_norm;
  AttentionLayer attention;
  Matrix gate_up, down;
  Router router;
  Experts experts;
};

// What a layer is given of a planned batch.
struct Context {
  void *keys, *values;
  const Spans* spans;
  const int64_t* slots;  // [rows]
};

// x and residual (or null) [rows, hidden], of `type` → out and total [rows, hidden], whose sum is the last layer's output.
struct Pass {
  const void *x, *residual;
  void *out, *total;
  int64_t rows, hidden;
  Type type;
  Rotation rotation;
};

}  // namespace mtp
