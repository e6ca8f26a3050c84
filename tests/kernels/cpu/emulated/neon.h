// NEON for an x86 CPU: SIMDe's functions under the names of the intrinsics, and those that it lacks. What neither has does not compile.
// Included before everything else. EMULATE_BF16 adds the bf16 products.
#pragma once
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/arm/neon.h>

#include <cstring>

#define __ARM_NEON 1
asm(".macro yield\npause\n.endm");

#ifdef EMULATE_BF16
#define __ARM_FEATURE_BF16_VECTOR_ARITHMETIC 1
typedef uint16x8_t bfloat16x8_t;
#define vreinterpretq_bf16_s32(x) vreinterpretq_u16_s32(x)

namespace emulated {

// Two products and the sum, each rounded. The instruction rounds the products and sums to odd, unless FEAT_EBF16 is on.
inline float32x4_t dot_bf16(float32x4_t sum, bfloat16x8_t a, bfloat16x8_t b) {
  const uint32x4_t x = vreinterpretq_u32_u16(a), y = vreinterpretq_u32_u16(b), high = vdupq_n_u32(0xffff0000);
  auto wide = [](uint32x4_t u) { return vreinterpretq_f32_u32(u); };
  float32x4_t even = vmulq_f32(wide(vshlq_n_u32(x, 16)), wide(vshlq_n_u32(y, 16)));
  return vaddq_f32(sum, vaddq_f32(even, vmulq_f32(wide(vandq_u32(x, high)), wide(vandq_u32(y, high)))));
}

}  // namespace emulated

#define vbfdotq_f32(sum, a, b) emulated::dot_bf16(sum, a, b)
#endif
