// A stack of pre-norm decoder layers in one parallel region: the ops of the other files, with a wait between them. For a small model the
// calls of single ops, and the threads' forking and joining, cost as much as the arithmetic.
// Reference: layers/decoder.py with the kernels of layers/devices/torch_kernels.py.
#include "layers.h"

#include "moe.h"
#include "ranks.h"

namespace mtp {
// layers/mixers/attention.py; where kv_rank is not 0, latent attention: layers/mixers/mla.py.
struct AttentionLayer {
  Matrix in, out;  // in: q, k, v of all heads; latent: the query, or what q_up makes it of, and the cache's row
  int64_t heads, kv_heads, dim;
  Matrix q_up;           // no outputs: none
  Norm q_norm, kv_norm;  // latent: of the query and the cache's row; otherwise of each head, if there are any
  Matrices k_up, v_up;
  int64_t q_rank, kv_rank, nope, rope, value;
  const float* sinks;  // [heads] or null
};

// layers/decoder.py, class DecoderLayer. The feed-forward block is a mixture of experts where there is a router.
struct Layer {
  Norm attention_norm, mlp_norm;
  AttentionLayer attention;
  Matrix gate_up, down;
  Router router;
  Experts experts;
};

namespace {
// The arrays between the ops, for the widest of the layers. All members share them, so they are made before there are any.
struct Arrays {
  enum Name { HALVES, FUSED, NORMED, IN, Q_NORMED, LIFTED, QUERY, ATTENDED, JOINED, BRANCH, INNER, SCORES, WEIGHTS, CHOSEN, COUNT };
  int64_t bytes[COUNT] = {};
  char* at[COUNT];

  Arrays(const Layer* layers, int64_t count, const Pass& pass, std::vector<char>& numbers) {
    const int64_t row = pass.rows * size_of(pass.type);
    const auto widen = [&](Name name, int64_t size) { bytes[name] = std::max(bytes[name], ceil_div(size, 64) * 64); };
    if (pass.fusion) widen(HALVES, row * 2 * pass.hidden), widen(FUSED, row * pass.hidden);
    for (const Layer* layer = layers; layer < layers + count; layer++) {
      const AttentionLayer& a = layer->attention;
      widen(NORMED, row * pass.hidden), widen(BRANCH, row * pass.hidden), widen(IN, row * a.in.outputs);
      widen(Q_NORMED, row * a.q_rank), widen(LIFTED, row * a.q_up.outputs), widen(JOINED, row * a.out.inputs);
      widen(QUERY, row * a.heads * (a.kv_rank ? a.kv_rank + a.rope : a.dim)), widen(ATTENDED, row * a.heads * a.kv_rank);
      if (!layer->router.weight.data) {
        widen(INNER, row * layer->down.inputs);
        continue;
      }
      const Router& router = layer->router;
      widen(INNER, inner_size(layer->experts, pass.rows, router.top_k) * size_of(pass.type));
      widen(SCORES, pass.rows * router.weight.outputs * 4);
      widen(WEIGHTS, pass.rows * router.top_k * 4), widen(CHOSEN, pass.rows * router.top_k * 8);
    }
    int64_t total = 64;
    for (int64_t size : bytes) total += size;
    char* next = room(numbers, total);
    next += -(intptr_t)next & 63;
    for (int name = 0; name < COUNT; name++) at[name] = next, next += bytes[name];
  }
};

// One member's way through a layer. Every op reads what others wrote before the last wait.
struct Walk {
  const Member& member;
  const Pass& pass;
  const Arrays& arrays;

  void product(const Matrix& matrix, const void* x, int64_t stride, void* out, bool gated = false) const {
    const int64_t width = gated ? matrix.outputs / 2 : matrix.outputs;
    linear(member, matrix, x, pass.type, stride, pass.rows, Output{out, width, pass.type, gated});
    member.wait();
  }

  void norm(const Norm& norm, const void* x, int64_t stride, const void* residual, int64_t size, void* normed) const {
    add_rms_norm(member, {x, residual, stride, size, norm, normed, size, pass.total, pass.rows, size, pass.type});
    member.wait();
  }

  // → x
  const void* fused(const Fusion& fusion) const {
    const int64_t size = pass.hidden, first = size * size_of(pass.type);
    char *halves = arrays.at[Arrays::HALVES], *embedding = halves + (fusion.embedding_first ? 0 : first);
    char* features = halves + (fusion.embedding_first ? first : 0);
    const auto half = [&](const Norm& norm, const void* from, int64_t stride, const int64_t* at, char* to) {
      add_rms_norm(member, {from, nullptr, stride, 0, norm, to, 2 * size, nullptr, pass.rows, size, pass.type, at});
    };
    half(fusion.embedding_norm, pass.embedding, size, pass.ids, embedding);
    half(fusion.hidden_norm, pass.features, pass.features_stride, nullptr, features);
    member.wait();
    product(fusion.project, halves, 2 * size, arrays.at[Arrays::FUSED]);
    return arrays.at[Arrays::FUSED];
  }

  // x [rows, hidden], of which each rank has a part of the sum.
  void together(void* x) const {
    if (pass.ranks) by_type(pass.type, [&](auto number) { sum(member, *pass.ranks, (decltype(number)*)x, pass.rows * pass.hidden); });
  }

  void grouped(const AttentionLayer& layer, const Context& context, std::atomic<int64_t>& next) const {
    const Spans& spans = *context.spans;
    const int64_t width = layer.in.outputs, dim = layer.dim;
    const Pool keys{context.keys, spans.key_stride, spans.type}, values{context.values, spans.value_stride, spans.type};
    char *in = arrays.at[Arrays::IN], *query = arrays.at[Arrays::QUERY];
    const RopeStore op{in,  width,         query, pass.type, pass.rows,    layer.heads,  layer.kv_heads,
                       dim, context.slots, keys,  values,    layer.q_norm, layer.kv_norm};
    rope_store(member, op, pass.rotation);
    member.wait();
    const int64_t stride = layer.heads * dim;
    const Heads q{query, stride, dim, pass.type}, out{arrays.at[Arrays::JOINED], stride, dim, pass.type};
    attention(member, spans, q, out, context.keys, context.values, layer.sinks, next);
    member.wait();
  }

  void latent(const AttentionLayer& layer, const Context& context, std::atomic<int64_t>& next) const {
    const Spans& spans = *context.spans;
    const int64_t size = size_of(pass.type), width = layer.in.outputs, own = layer.nope + layer.rope, row = layer.kv_rank + layer.rope;
    const int64_t q_width = width - row;
    char *in = arrays.at[Arrays::IN], *q = in, *query = arrays.at[Arrays::QUERY];
    int64_t q_stride = width;
    if (layer.q_up.outputs) {
      this->norm(layer.q_norm, in, width, nullptr, q_width, arrays.at[Arrays::Q_NORMED]);
      product(layer.q_up, arrays.at[Arrays::Q_NORMED], q_width, arrays.at[Arrays::LIFTED]);
      q = arrays.at[Arrays::LIFTED], q_stride = layer.q_up.outputs;
    }
    const int64_t stride = layer.heads * row;
    const Heads from{q, q_stride, own, pass.type}, all{query, stride, row, pass.type};
    const Heads turned{query + layer.kv_rank * size, stride, row, pass.type};
    const Pool keys{context.keys, spans.key_stride, spans.type};
    heads_linear(member, layer.k_up, from, pass.rows, all);
    const LatentStore op{from,       turned,        in + q_width * size, width, pass.rows,    layer.heads,
                         layer.nope, layer.kv_rank, context.slots,       keys,  layer.kv_norm};
    latent_store(member, op, pass.rotation);
    member.wait();
    const Heads attended{arrays.at[Arrays::ATTENDED], layer.heads * layer.kv_rank, layer.kv_rank, pass.type};
    attention(member, spans, all, attended, context.keys, context.values, nullptr, next);
    member.wait();
    heads_linear(member, layer.v_up, attended, pass.rows, {arrays.at[Arrays::JOINED], layer.heads * layer.value, layer.value, pass.type});
    member.wait();
  }

  void mixture(const Layer& layer, const void* x, void* out) const {
    const auto weights = (float*)arrays.at[Arrays::WEIGHTS];
    const auto chosen = (int64_t*)arrays.at[Arrays::CHOSEN];
    route(member, layer.router, x, pass.type, pass.hidden, pass.rows, (float*)arrays.at[Arrays::SCORES], weights, chosen);
    member.wait();
    mix_experts(member, layer.experts, {weights, chosen, layer.router.top_k}, x, pass.type, pass.hidden, pass.rows,
                arrays.at[Arrays::INNER], {out, pass.hidden, pass.type, false});
    member.wait();
  }

  // Of `layer`, what other rows need. Of the product with `in` no panel of the query alone is computed.
  void store(const Layer& layer, const Context& context, const void* x) const {
    const AttentionLayer& a = layer.attention;
    const Spans& spans = *context.spans;
    norm(layer.attention_norm, x, pass.hidden, nullptr, pass.hidden, arrays.at[Arrays::NORMED]);
    const int64_t query = a.kv_rank ? a.in.outputs - a.kv_rank - a.rope : a.heads * a.dim, first = query / PANEL * PANEL;
    const Matrix needed = a.in.part(first, a.in.outputs - first);
    product(needed, arrays.at[Arrays::NORMED], pass.hidden, arrays.at[Arrays::IN]);
    char* row = arrays.at[Arrays::IN] + (query - first) * size_of(pass.type);
    const Pool keys{context.keys, spans.key_stride, spans.type}, values{context.values, spans.value_stride, spans.type};
    if (a.kv_rank) {
      const Heads none{nullptr, 0, 0, pass.type};
      latent_store(member, {none, none, row, needed.outputs, pass.rows, 0, a.nope, a.kv_rank, context.slots, keys, a.kv_norm},
                   pass.rotation);
    } else {
      rope_store(
          member,
          {row, needed.outputs, nullptr, pass.type, pass.rows, 0, a.kv_heads, a.dim, context.slots, keys, values, a.q_norm, a.kv_norm},
          pass.rotation);
    }
  }

  // x + residual is the layer's input; its output is `out` + pass.total.
  void layer(const Layer& layer, const Context& context, const void* x, const void* residual, void* out, std::atomic<int64_t>& next) const {
    char *normed = arrays.at[Arrays::NORMED], *branch = arrays.at[Arrays::BRANCH];
    norm(layer.attention_norm, x, pass.hidden, residual, pass.hidden, normed);
    product(layer.attention.in, normed, pass.hidden, arrays.at[Arrays::IN]);
    if (layer.attention.kv_rank) latent(layer.attention, context, next);
    else grouped(layer.attention, context, next);
    product(layer.attention.out, arrays.at[Arrays::JOINED], layer.attention.out.inputs, branch);
    together(branch);
    norm(layer.mlp_norm, branch, pass.hidden, residual ? pass.total : x, pass.hidden, normed);
    if (layer.router.weight.data) {
      mixture(layer, normed, out);
    } else {
      product(layer.gate_up, normed, pass.hidden, arrays.at[Arrays::INNER], true);
      product(layer.down, arrays.at[Arrays::INNER], layer.down.inputs, out);
    }
    together(out);
  }
};
}  // namespace

extern "C" void mtp_layers(const Layer* layers, const Context* contexts, int64_t count, const Pass* pass, int32_t threads) {
  thread_local std::vector<char> numbers;
  const Arrays arrays(layers, count, *pass, numbers);
  std::vector<std::atomic<int64_t>> next(count);
  parallel(threads, [&](const Member& member) {
    const Walk walk{member, *pass, arrays};
    const void* first = pass->fusion ? walk.fused(*pass->fusion) : pass->x;
    if (pass->stores) return walk.store(layers[0], contexts[0], first);
    for (int64_t i = 0; i < count; i++) {
      const void* x = i ? pass->out : first;
      walk.layer(layers[i], contexts[i], x, i ? pass->total : pass->residual, pass->out, next[i]);
    }
    if (pass->normed) walk.norm(pass->last, pass->out, pass->hidden, pass->total, pass->hidden, pass->normed);
  });
}
}  // namespace mtp
