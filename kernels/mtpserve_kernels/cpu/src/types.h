// Number formats, and how a tensor's type is passed from Python.
#pragma once
#include <cstdint>
#include <cstring>

namespace mtp {
struct bf16 {
  uint16_t bits;
};

enum Type : int32_t { FP32 = 0, BF16 = 1, INT8 = 2 };

inline float widen(bf16 x) {
  uint32_t u = uint32_t(x.bits) << 16;
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}
inline float widen(float x) { return x; }

// Round to nearest, ties to even; NaN stays NaN.
inline bf16 narrow(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  if ((u & 0x7fffffff) > 0x7f800000) return {uint16_t((u >> 16) | 0x40)};
  return {uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16)};
}

inline int64_t size_of(Type type) { return type == FP32 ? 4 : type == BF16 ? 2 : 1; }

// A tensor [rows, heads, …]: its address, and how many numbers lie from row to row and from head to head.
struct Heads {
  void* data;
  int64_t stride, head_stride;
  Type type;
};

// body(float()) or body(bf16()).
template <class Body> void by_type(Type type, const Body& body) {
  if (type == FP32) body(float());
  else body(bf16());
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
}  // namespace mtp
