// Packed matrices of one shape that lie one after the other: of attention's heads, of experts.
#pragma once
#include "linear.h"

namespace mtp {

struct Matrices {
  Matrix first;
  int64_t number, stride;  // numbers from one matrix to the next

  Matrix operator[](int64_t index) const {
    Matrix matrix = first;
    matrix.data = (const char*)first.data + index * stride * size_of(first.type);
    return matrix;
  }
};

// x [rows, heads, inputs] → out [rows, heads, outputs], each head by its own matrix.
void heads_linear(const Member& member, const Matrices& matrices, const Heads& x, int64_t rows, const Heads& out);

}  // namespace mtp
