// A chain of drafts: the draft model's layer computes the rows of a step's tokens, what it gives for the last token of a request makes the
// first draft, a pass over that one the second, and so on. Each of these ops is small: for a small model the calls from Python between them
// take longer than they do.
// Reference: mtpserve/spec/draft/chain.py, `one_by_one`.
#include "layers.h"
#include "sample.h"

namespace mtp {
// Rows of a step's tokens, and in which of them each of those requests ends that are drafted for.
struct Absorbed {
  int64_t rows, requests;
  const int64_t *ids, *index, *slots;                 // [rows], each at its index's position
  const int64_t *seats, *query_start_loc, *seq_lens;  // [requests], query_start_loc one more
  const void* features;                               // [rows, hidden] with `stride` from row to row
  int64_t stride;
  const int64_t* last;  // [drafted]
  bool split;           // of all rows keys and values alone, then the last ones again
};

// The draft model has one layer, whose row at index i of a request knows token i + 1: its keys are in that token's slot.
struct Chain {
  const Layer* layer;
  Context context;  // without spans and slots
  Pass pass;        // without what differs from pass to pass
  const Matrix* head;
  bool normed;            // a pass gets the output of the one before it after the norm that follows the layer, and otherwise before that
  Spans spans;            // without what differs from pass to pass; `requests` and `seats` are those that are drafted for
  const int64_t* length;  // of each seat, what is committed
  int64_t steps;          // drafts of each request
  Absorbed absorbed;
  bool greedy;  // all requests are: `sampling` is not there
  Sampling sampling;
  float* q;         // [requests, steps, vocab]: what the drafts were drawn from; null: not asked for
  int64_t* tokens;  // [requests, steps]
};

namespace {
thread_local std::vector<int64_t> integers;
thread_local std::vector<float> logits;
thread_local std::vector<char> outputs, all;

void gather(const void* from, int64_t stride, const int64_t* rows, int64_t count, int64_t bytes, char* to) {
  for (int64_t i = 0; i < count; i++) std::memcpy(to + i * bytes, static_cast<const char*>(from) + rows[i] * stride, bytes);
}
}  // namespace

extern "C" void mtp_chain(const Chain* chain, int32_t threads) {
  const Matrix& head = *chain->head;
  const int64_t requests = chain->spans.requests, hidden = chain->pass.hidden, vocab = head.outputs, steps = chain->steps;
  int64_t *index = room(integers, 5 * requests + 1), *seq_lens = index + requests, *slots = seq_lens + requests;
  int64_t *drafted = slots + requests, *query_start_loc = drafted + requests;
  for (int64_t r = 0; r <= requests; r++) query_start_loc[r] = r;
  // A pass reads the features that the one before it has written.
  const int64_t size = requests * hidden * size_of(chain->pass.type);
  char *out = room(outputs, 5 * size), *totals[] = {out + size, out + 2 * size}, *normeds[] = {out + 3 * size, out + 4 * size};

  Spans spans = chain->spans;
  spans.query_start_loc = query_start_loc, spans.seq_lens = seq_lens, spans.index = index;
  Context context = chain->context;
  context.spans = &spans, context.slots = slots;
  Pass pass = chain->pass;
  pass.rows = requests, pass.ids = drafted, pass.features_stride = hidden, pass.rotation.positions = index, pass.out = out;

  const Absorbed& given = chain->absorbed;
  const int64_t number = size_of(pass.type), width = hidden * number, *last = given.last;
  Spans whole = chain->spans;
  whole.requests = given.requests, whole.seats = given.seats, whole.query_start_loc = given.query_start_loc,
  whole.seq_lens = given.seq_lens;
  whole.index = given.index;
  Context stored = chain->context;
  stored.spans = &whole, stored.slots = given.slots;
  Pass first = chain->pass;
  first.rows = given.rows, first.ids = given.ids, first.features = given.features, first.features_stride = given.stride;
  first.rotation.positions = given.index, first.stores = given.split;
  const void *rows = normeds[1], *features = chain->normed ? normeds[1] : totals[1];
  if (given.split) {
    mtp_layers(chain->layer, &stored, 1, &first, threads);
    char* const own = normeds[0];
    gather(given.features, given.stride * number, last, requests, width, own);
    for (int64_t r = 0; r < requests; r++) {
      index[r] = given.index[last[r]], seq_lens[r] = index[r] + 1, slots[r] = given.slots[last[r]], drafted[r] = given.ids[last[r]];
    }
    pass.features = own, pass.total = totals[1], pass.normed = normeds[1];
    mtp_layers(chain->layer, &context, 1, &pass, threads);
  } else {
    const int64_t bytes = given.rows * width;
    char* const three = room(all, 3 * bytes);
    first.out = three, first.total = three + bytes, first.normed = three + 2 * bytes;
    mtp_layers(chain->layer, &stored, 1, &first, threads);
    gather(first.normed, width, last, requests, width, normeds[1]);
    if (!chain->normed) gather(first.total, width, last, requests, width, totals[1]);
  }

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
      seq_lens[r] = place, index[r] = place - 1;
    }
    pass.features = features, pass.total = totals[step % 2], pass.normed = normeds[step % 2];
    mtp_layers(chain->layer, &context, 1, &pass, threads);
    rows = pass.normed, features = chain->normed ? pass.normed : pass.total;
  }
}
}  // namespace mtp
