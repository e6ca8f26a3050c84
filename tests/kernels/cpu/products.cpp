// Linear layers on a machine that only an emulator runs, against a scalar loop: see test_objects.py.
#include <cmath>
#include <cstdio>
#include <vector>

#include "linear.h"

extern "C" {
void mtp_linear(const mtp::Matrix*, const void* x, int32_t type, int64_t stride, int64_t rows, const mtp::Output*, int32_t threads);
void mtp_pack(void* data, int64_t outputs, int64_t inputs, int32_t size, int32_t threads);
}

namespace {

using mtp::bf16, mtp::widen;
void assign(float& to, float x) { to = x; }
void assign(bf16& to, float x) { to = mtp::narrow(x); }
int wrong = 0;

// From -1 to 1.
float next() {
  static uint32_t state = 1;
  state = state * 1664525 + 1013904223;
  return (int32_t)state / 2147483648.f;
}

template <class T> void check(int64_t outputs, int64_t inputs, int64_t rows, bool gated, int threads) {
  const mtp::Type type = sizeof(T) == 4 ? mtp::FP32 : mtp::BF16;
  std::vector<T> x(rows * inputs), w(outputs * inputs);
  std::vector<float> bias(outputs);
  for (T& value : x) assign(value, next());
  for (T& value : w) assign(value, next());
  for (float& value : bias) value = next();
  std::vector<T> packed = w;
  mtp_pack(packed.data(), outputs, inputs, sizeof(T), threads);
  const mtp::Matrix matrix{packed.data(), bias.data(), nullptr, outputs, inputs, type};
  const int64_t width = gated ? outputs / 2 : outputs;
  std::vector<float> out(rows * width, NAN), alone(width);
  const mtp::Output all{out.data(), width, mtp::FP32, gated}, one{alone.data(), width, mtp::FP32, gated};
  mtp_linear(&matrix, x.data(), type, inputs, rows, &all, threads);
  const auto product = [&](int64_t m, int64_t n) {
    double sum = bias[n];
    for (int64_t k = 0; k < inputs; k++) sum += (double)widen(x[m * inputs + k]) * widen(w[n * inputs + k]);
    return sum;
  };
  for (int64_t m = 0; m < rows; m++) {
    mtp_linear(&matrix, x.data() + m * inputs, type, inputs, 1, &one, 1);
    for (int64_t n = 0; n < width; n++) {
      double expected = product(m, n);
      if (gated) expected = expected / (1 + std::exp(-expected)) * product(m, width + n);
      const float got = out[m * width + n];
      if (std::abs(got - expected) <= 1e-5 * inputs && !std::memcmp(&got, &alone[n], 4)) continue;
      if (wrong++ < 10) {
        std::printf("%d bytes, %d x %d, row %d of %d, output %d, gated %d, %d threads: %g, alone %g, expected %g\n", (int)sizeof(T),
                    (int)outputs, (int)inputs, (int)m, (int)rows, (int)n, gated, threads, got, alone[n], expected);
      }
    }
  }
}

}  // namespace

int main() {
  for (int64_t rows : {1, 2, 5, 7, 19})
    for (int64_t inputs : {2, 34, 130})
      for (bool gated : {false, true}) {
        check<float>(96, inputs, rows, gated, 2);
        check<bf16>(96, inputs, rows, gated, 2);
      }
  if (!wrong) std::puts("all products are right");
  return wrong != 0;
}
