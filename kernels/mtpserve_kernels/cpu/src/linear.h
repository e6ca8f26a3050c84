// y = x W^T + b. Weights are packed in place into panels of PANEL rows of W, that is, outputs:
//
//   W [N, K] row-major   →   [N / 16][K / STEP][16][STEP]          STEP: 1 for float32, 2 for bfloat16, 4 for int8
//
// One panel takes the memory of its 16 rows, and one step over K reads one cache line of it. Each output is one sum over K in
// order, in one accumulator: a row's numbers do not depend on the other rows, on the tiles or on the threads.
#pragma once
#include "threads.h"

namespace mtp {
struct Matrix {
  const void* data;    // packed; rounded up to whole panels, the rest is zeros
  const float* bias;   // [N rounded up] or null
  const float* scale;  // int8: [N rounded up], what each output is multiplied with
  int64_t outputs, inputs;
  Type type;

  int64_t row_bytes() const { return ceil_div(inputs * size_of(type), 4) * 4; }  // of an output
  // Some of its outputs; `first` is a multiple of PANEL.
  Matrix part(int64_t first, int64_t count) const {
    return {(const char*)data + first * row_bytes(), bias ? bias + first : nullptr, scale ? scale + first : nullptr, count, inputs, type};
  }
};

// gate * sigmoid(alpha * gate) * (up + plus), with gate at most `most`, up between -limit and limit. No limit: silu(gate) * up.
struct Clamp {
  float alpha, most, limit, plus;
};

// Where the products go. `gated`: the matrix is [gate; up], and the result one of its halves with the other, half as wide. `squared`: the
// result is relu(y)^2 of each product, and there is no gate.
struct Output {
  void* data;
  int64_t stride;
  Type type;
  bool gated;
  Clamp clamp = {};
  bool squared = false;
};

// x [rows, inputs] of type `x_type` with `stride` numbers from row to row. Called by all members; each computes some of the outputs.
void linear(const Member& member, const Matrix& matrix, const void* x, Type x_type, int64_t stride, int64_t rows, const Output& out);

// Of one shape, one after the other, and so their biases, if they have any; not int8: of attention's heads, of experts.
struct Matrices {
  Matrix first;
  int64_t number, stride;  // numbers from one matrix to the next

  Matrix operator[](int64_t index) const {
    Matrix matrix = first;
    matrix.data = (const char*)first.data + index * stride * size_of(first.type);
    if (first.bias) matrix.bias = first.bias + index * ceil_div(first.outputs, PANEL) * PANEL;
    return matrix;
  }
};

// x [rows, heads, inputs] → out [rows, heads, outputs], each head by its own matrix.
void heads_linear(const Member& member, const Matrices& matrices, const Heads& x, int64_t rows, const Heads& out);

// `linear` with `type` of x.
extern "C" void mtp_linear(const Matrix* matrix, const void* x, int32_t type, int64_t stride, int64_t rows, const Output* out,
                           int32_t threads);
}  // namespace mtp
