// Reference: fused/reference.py.
#include "fused.h"

#include <cmath>

namespace mtp {
namespace {
// 1 / the root of the mean square.
template <class T> float inverse_rms(const T* x, int64_t size, float eps) {
  Floats sums[4] = {};
  const auto square = [](Floats v, Floats sum) { return fma(v, v, sum); };
  int64_t k = 0;
  for (; k + 4 * LANES <= size; k += 4 * LANES)
    for (int i = 0; i < 4; i++) sums[i] = square(load(x + k + i * LANES), sums[i]);
  for (; k < size; k += LANES) sums[0] = square(load_some(x + k, size - k), sums[0]);
  return 1.f / std::sqrt(sum((sums[0] + sums[1]) + (sums[2] + sums[3])) / size + eps);
}

template <class T> void rms_norm(T* to, const T* x, const Norm& norm, int64_t size) {
  const Floats scale = set(inverse_rms(x, size, norm.eps));
  by_type(norm.type, [&](auto number) {
    const auto* weight = (const decltype(number)*)norm.weight;
    for (int64_t k = 0; k < size; k += LANES)
      store_some(to + k, (load_some(x + k, size - k) * scale) * load_some(weight + k, size - k), size - k);
  });
}

// Rounded to x's type, as it is when the norm is a separate operation.
template <class T> const T* normed(const T* x, const Norm& norm, int64_t size) {
  thread_local std::vector<T> numbers;
  rms_norm(room(numbers, size), x, norm, size);
  return numbers.data();
}

// x [dim] in place, by the angles of one position.
void rotate(float* __restrict x, const float* __restrict cos, const float* __restrict sin, const Rotation& rotation) {
  const int64_t half = rotation.dim / 2;
  if (rotation.interleaved) {
    for (int64_t k = 0; k < half; k++) {
      const float first = x[2 * k], second = x[2 * k + 1];
      x[2 * k] = first * cos[k] - second * sin[k];
      x[2 * k + 1] = second * cos[k] + first * sin[k];
    }
    return;
  }
  for (int64_t k = 0; k < half; k += LANES) {
    const int64_t left = half - k;
    const Floats c = load_some(cos + k, left), s = load_some(sin + k, left);
    const Floats first = load_some(x + k, left), second = load_some(x + half + k, left);
    store_some(x + k, (first * c) - (second * s), left);
    store_some(x + half + k, (second * c) + (first * s), left);
  }
}

thread_local std::vector<float> numbers;

// from [size], its first rotation.dim numbers turned as those of `row`.
template <class To, class From> void turn(To* to, const From* from, int64_t size, int64_t row, const Rotation& rotation) {
  float* x = room(numbers, size);
  convert(from, x, size);
  const int64_t angles = rotation.positions[row] * (rotation.dim / 2);
  rotate(x, rotation.cos + angles, rotation.sin + angles, rotation);
  convert(x, to, size);
}
}  // namespace

void add_rms_norm(const Member& member, const AddRmsNorm& op) {
  const Range mine = member.part(op.rows);
  by_type(op.type, [&](auto number) {
    using T = decltype(number);
    for (int64_t row = mine.first; row < mine.end; row++) {
      const T* x = (const T*)op.x + (op.at ? op.at[row] : row) * op.stride;
      if (op.residual) {
        const T* residual = (const T*)op.residual + row * op.residual_stride;
        T* total = (T*)op.total + row * op.size;
        for (int64_t k = 0; k < op.size; k += LANES)
          store_some(total + k, load_some(x + k, op.size - k) + load_some(residual + k, op.size - k), op.size - k);
        x = total;  // rounded, as it is when sum and norm are separate operations
      }
      rms_norm((T*)op.normed + row * op.normed_stride, x, op.norm, op.size);
    }
  });
}

void rope_store(const Member& member, const RopeStore& op, const Rotation& rotation) {
  const int64_t all = op.heads + 2 * op.kv_heads;
  const Range mine = member.part(op.rows * all);
  by_type(op.type, [&](auto number) {
    using T = decltype(number);
    for (int64_t i = mine.first; i < mine.end; i++) {
      const int64_t row = i / all, head = i % all;
      const bool query = head < op.heads, key = !query && head < op.heads + op.kv_heads;
      const T* from = (const T*)op.qkv + row * op.stride + head * op.dim;
      if (query && op.q_norm.weight) from = normed(from, op.q_norm, op.dim);
      if (key && op.k_norm.weight) from = normed(from, op.k_norm, op.dim);
      if (query) {
        turn((T*)op.q + (row * op.heads + head) * op.dim, from, op.dim, row, rotation);
        continue;
      }
      const Pool& pool = key ? op.keys : op.values;
      const int64_t place = op.slots[row] * pool.stride + (head - op.heads - (key ? 0 : op.kv_heads)) * op.dim;
      by_type(pool.type, [&](auto stored) {
        auto* to = (decltype(stored)*)pool.data + place;
        if (key) turn(to, from, op.dim, row, rotation);
        else convert(from, to, op.dim);
      });
    }
  });
}

void latent_store(const Member& member, const LatentStore& op, const Rotation& rotation) {
  const Range mine = member.part(op.rows * (op.heads + 1));
  by_type(op.q.type, [&](auto number) {
    using T = decltype(number);
    for (int64_t i = mine.first; i < mine.end; i++) {
      const int64_t row = i / (op.heads + 1), head = i % (op.heads + 1);
      if (head < op.heads) {
        const T* from = (const T*)op.q.data + row * op.q.stride + head * op.q.head_stride + op.nope;
        turn((T*)op.turned.data + row * op.turned.stride + head * op.turned.head_stride, from, rotation.dim, row, rotation);
        continue;
      }
      const T* from = (const T*)op.row + row * op.row_stride;
      by_type(op.keys.type, [&](auto stored) {
        auto* to = (decltype(stored)*)op.keys.data + op.slots[row] * op.keys.stride;
        convert(normed(from, op.norm, op.rank), to, op.rank);
        turn(to + op.rank, from + op.rank, rotation.dim, row, rotation);
      });
    }
  });
}

extern "C" {

void mtp_add_rms_norm(const AddRmsNorm* op, int32_t threads) {
  parallel(worth(threads, 4 * op->rows * op->size), [&](const Member& member) { add_rms_norm(member, *op); });
}

// gate_up [rows, 2 size] → out [rows, size], without gaps.
void mtp_silu_mul(const void* gate_up, int64_t stride, void* out, int64_t rows, int64_t size, int32_t type, int32_t threads) {
  parallel(worth(threads, 16 * rows * size), [&](const Member& member) {
    by_type(Type(type), [&](auto number) {
      using T = decltype(number);
      for (int64_t row = member.part(rows).first; row < member.part(rows).end; row++) {
        const T *gate = (const T*)gate_up + row * stride, *up = gate + size;
        for (int64_t k = 0; k < size; k += LANES)
          store_some((T*)out + row * size + k, silu(load_some(gate + k, size - k)) * load_some(up + k, size - k), size - k);
      }
    });
  });
}

void mtp_rope_store(const RopeStore* op, const Rotation* rotation, int32_t threads) {
  const int64_t work = 8 * op->rows * (op->heads + 2 * op->kv_heads) * op->dim;
  parallel(worth(threads, work), [&](const Member& member) { rope_store(member, *op, *rotation); });
}

void mtp_latent_store(const LatentStore* op, const Rotation* rotation, int32_t threads) {
  const int64_t work = 8 * op->rows * (op->heads * rotation->dim + op->rank);
  parallel(worth(threads, work), [&](const Member& member) { latent_store(member, *op, *rotation); });
}
}
}  // namespace mtp
