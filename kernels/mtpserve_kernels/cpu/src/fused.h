// The small operations between the products. Each splits its rows, or its heads, over the members; none waits.
#pragma once
#include "threads.h"

namespace mtp {
struct Norm {
  const void* weight;  // null: none
  Type type;
  float eps;
};

// x, residual (or null), normed and total [rows, size], all of one type: total = x + residual, normed = rms_norm(total) * weight. A stride
// is the numbers from one row to the next.
struct AddRmsNorm {
  const void *x, *residual;
  int64_t stride, residual_stride;
  Norm norm;
  void* normed;
  int64_t normed_stride;
  void* total;  // without gaps; not written where there is no residual
  int64_t rows, size;
  Type type;
  const int64_t* at = nullptr;  // [rows], the rows of x; null: one after the other
};

void add_rms_norm(const Member& member, const AddRmsNorm& op);

// Of one pass: row i is turned by the angles of positions[i].
struct Rotation {
  const int64_t* positions;
  const float *cos, *sin;  // [length, dim / 2]
  int64_t dim;             // how many numbers are turned
  bool interleaved;        // pairs (2i, 2i + 1), otherwise (i, i + dim / 2)
};

// One layer's keys, or values: slots of all its heads side by side.
struct Pool {
  void* data;
  int64_t stride;
  Type type;
};

// qkv [rows, heads + 2 kv_heads, dim] → q [rows, heads, dim], without gaps, of the same type; keys and values into their slots.
// Each head of q and k is normed where there is a norm; its first rotation.dim numbers are turned.
struct RopeStore {
  const void* qkv;
  int64_t stride;
  void* q;
  Type type;
  int64_t rows, heads, kv_heads, dim;
  const int64_t* slots;
  Pool keys, values;
  Norm q_norm, k_norm;
};

void rope_store(const Member& member, const RopeStore& op, const Rotation& rotation);

// q [rows, heads, nope + rotation.dim] → turned [rows, heads, rotation.dim]; row [rows, rank + rotation.dim] → the normed latent and
// the turned key, side by side, into their slots.
struct LatentStore {
  Heads q, turned;
  const void* row;
  int64_t row_stride;
  int64_t rows, heads, nope, rank;
  const int64_t* slots;
  Pool keys;
  Norm norm;
};

void latent_store(const Member& member, const LatentStore& op, const Rotation& rotation);
}  // namespace mtp
