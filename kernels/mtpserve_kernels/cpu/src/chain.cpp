// A chain of drafts: what the draft model has computed for the last token gives the first one, its layer's pass over that one the second,
// and so on. Each of these ops is small: for a small model the calls from Python between them take longer than they do.
// Reference: mtpserve/spec/chain.py, `one_by_one`.
#include "layers.h"
#include "sample.h"

namespace mtp {
// The draft model has one layer, whose row at index i of a request knows token i + 1: its keys are in that token's slot.
struct Chain {
  const Layer* layer;
  Context context;  // without spans and slots
  Pass pass;        // without what differs from pass to pass
  const Matrix* head;
  bool normed;            // a pass gets the output of the one before it after the norm that follows the layer, and otherwise before that
  Spans spans;            // without what differs from pass to pass
  const int64_t* length;  // of each seat, what is committed
  int64_t steps;          // drafts of each request
  const void* rows;       // [requests, hidden]: what the head makes the first draft of
  const void* features;   // [requests, hidden]: what the first pass gets
  bool greedy;            // all requests are: `sampling` is not there
  Sampling sampling;
  float* q;         // [requests, steps, vocab]: what the drafts were drawn from; null: not asked for
  int64_t* tokens;  // [requests, steps]
};

namespace {
thread_local std::vector<int64_t> integers;
thread_local std::vector<float> logits;
thread_local std::vector<char> outputs;
}  // namespace

extern "C" void mtp_chain(const Chain* chain, int32_t threads) {
  const Matrix& head = *chain->head;
  const int64_t requests = chain->spans.requests, hidden = chain->pass.hidden, vocab = head.outputs, steps = chain->steps;
  int64_t *index = room(integers, 5 * requests + 1), *kv_len = index + requests, *slots = kv_len + requests;
  int64_t *drafted = slots + requests, *cu_q = drafted + requests;
  for (int64_t r = 0; r <= requests; r++) cu_q[r] = r;
  // A pass reads the features that the one before it has written.
  const int64_t size = requests * hidden * size_of(chain->pass.type);
  char *out = room(outputs, 5 * size), *totals[] = {out + size, out + 2 * size}, *normeds[] = {out + 3 * size, out + 4 * size};

  Spans spans = chain->spans;
  spans.cu_q = cu_q, spans.kv_len = kv_len, spans.index = index;
  Context context = chain->context;
  context.spans = &spans, context.slots = slots;
  Pass pass = chain->pass;
  pass.rows = requests, pass.ids = drafted, pass.features_stride = hidden, pass.rotation.positions = index, pass.out = out;
  const void *rows = chain->rows, *features = chain->features;

  for (int64_t step = 0;; step++) {
    const Output products{room(logits, requests * vocab), vocab, FP32, false};
    mtp_linear(&head, rows, pass.type, hidden, requests, &products, threads);
    for (int64_t r = 0; r < requests; r++) index[r] = chain->length[spans.seats[r]] + step;
    if (chain->greedy) {
      mtp_argmax(logits.data(), vocab, requests, vocab, drafted, threads);
    } else {
      float* q = chain->q ? chain->q + step * vocab : nullptr;
      const Proposed proposed{requests, vocab, logits.data(), vocab, spans.seats, index, q, steps * vocab, drafted};
      mtp_draw(&proposed, &chain->sampling, threads);
    }
    for (int64_t r = 0; r < requests; r++) chain->tokens[r * steps + step] = drafted[r];
    if (step + 1 == steps) return;
    for (int64_t r = 0; r < requests; r++) {
      const int64_t place = index[r], *pages = spans.page_table + spans.seats[r] * spans.table_stride;
      slots[r] = pages[place / spans.page_size] * spans.page_size + place % spans.page_size;
      kv_len[r] = place, index[r] = place - 1;
    }
    pass.features = features, pass.total = totals[step % 2], pass.normed = normeds[step % 2];
    mtp_layers(chain->layer, &context, 1, &pass, threads);
    rows = pass.normed, features = chain->normed ? pass.normed : pass.total;
  }
}
}  // namespace mtp
