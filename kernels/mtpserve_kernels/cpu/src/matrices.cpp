// Reference: the two torch.bmm of mtpserve/layers/mla.py.
#include "matrices.h"

namespace mtp {

void heads_linear(const Member& member, const Matrices& matrices, const Heads& x, int64_t rows, const Heads& out) {
  // Whole heads for each member where they come out nearly even, otherwise a part of each head.
  const bool whole = matrices.number % member.size == 0 || matrices.number >= 4 * member.size;
  const Range mine = whole ? member.part(matrices.number) : Range{0, matrices.number};
  const Member team = whole ? member.alone() : member;
  for (int64_t head = mine.first; head < mine.end; head++) {
    const char* from = (const char*)x.data + head * x.head_stride * size_of(x.type);
    const Output to{(char*)out.data + head * out.head_stride * size_of(out.type), out.stride, out.type, false};
    linear(team, matrices[head], from, x.type, x.stride, rows, to);
  }
}

}  // namespace mtp

extern "C" void mtp_heads_linear(const mtp::Matrices* matrices, void* x, int64_t stride, int64_t head_stride, int32_t type, int64_t rows,
                                 void* out, int64_t out_stride, int64_t out_head_stride, int32_t out_type, int32_t threads) {
  const mtp::Heads from{x, stride, head_stride, mtp::Type(type)}, to{out, out_stride, out_head_stride, mtp::Type(out_type)};
  const int64_t work = rows * matrices->number * matrices->first.outputs * matrices->first.inputs;
  mtp::parallel(mtp::worth(threads, work), [&](const mtp::Member& member) { mtp::heads_linear(member, *matrices, from, rows, to); });
}
