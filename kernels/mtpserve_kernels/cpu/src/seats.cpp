// What a step reads from the seats of its requests, and writes to them. A step's rows take less time than a second thread to start.
// Reference: mtpserve_kernels/requests/reference.py.
#include "threads.h"

namespace mtp {
// Of token `index` of the seat with this row of the page table; like torch, -1 is in the last column's page.
static int64_t slot_of(const int64_t* pages, int64_t columns, int64_t page_size, int64_t index) {
  const int64_t column = index / page_size - (index % page_size < 0), place = index - column * page_size;
  return pages[column < 0 ? column + columns : column] * page_size + place;
}

// One row of each per seat.
struct Seats {
  int64_t *tokens, *length, *computed;
  const int64_t* limit;
  int64_t* waiting;
  const int64_t *stops, *page_table;
  bool* done;
  int64_t width, most_stops, page_table_stride, columns, page_size;  // of a row of tokens, of stops, of the page table

  int64_t slot(int64_t seat, int64_t index) const { return slot_of(page_table + seat * page_table_stride, columns, page_size, index); }
};

extern "C" {

void mtp_slots(const int64_t* page_table, int64_t stride, int64_t columns, int64_t page_size, const int64_t* seats, const int64_t* index,
               int64_t count, int64_t* out, int32_t) {
  for (int64_t i = 0; i < count; i++) out[i] = slot_of(page_table + seats[i] * stride, columns, page_size, index[i]);
}

// Request r has the rows query_start_loc[r] … query_start_loc[r + 1] - 1, from start[r] on (null: from what is computed of it), and at most
// drafts[r] drafts. → out: ids, index, slots, row_seats [rows]; seq_lens, draft_count, samples [requests].
void mtp_place(const Seats* s, const int64_t* seats, const int64_t* query_start_loc, const int64_t* start, const int64_t* drafts,
               const int64_t* samples, int64_t requests, int64_t rows, int64_t* out, int32_t) {
  int64_t *ids = out, *index = ids + rows, *slots = index + rows, *row_seats = slots + rows;
  int64_t *seq_lens = row_seats + rows, *draft_count = seq_lens + requests, *sampling = draft_count + requests;
  for (int64_t r = 0; r < requests; r++) {
    const int64_t seat = seats[r], first = start ? start[r] : s->computed[seat];
    // With room for n tokens, n - 1 drafts and the target's own token fill it.
    const int64_t useful = std::max<int64_t>(0, std::min(s->waiting[seat], s->limit[seat] - s->length[seat] - 1));
    seq_lens[r] = first + query_start_loc[r + 1] - query_start_loc[r];
    draft_count[r] = s->done[seat] ? 0 : std::min(drafts[r], useful);
    sampling[r] = s->done[seat] ? 0 : samples[r];
    for (int64_t t = query_start_loc[r]; t < query_start_loc[r + 1]; t++) {
      index[t] = first + t - query_start_loc[r], row_seats[t] = seat;
      ids[t] = s->tokens[seat * s->width + index[t]], slots[t] = s->slot(seat, index[t]);
    }
  }
}

// Of the tokens after `index` [rows] of these seats [rows] → out: ids, index, slots [rows].
void mtp_following(const Seats* s, const int64_t* seats, const int64_t* index, int64_t rows, int64_t* out, int32_t) {
  for (int64_t t = 0; t < rows; t++) {
    const int64_t after = index[t] + 1;
    out[t] = s->tokens[seats[t] * s->width + after], out[rows + t] = after, out[2 * rows + t] = s->slot(seats[t], after);
  }
}

// tokens [requests, drafts]: after what is committed count[r] of them wait. What they were drawn from, probs [requests, numbers] or null,
// is kept for each seat, `stride` numbers apart.
void mtp_hold(const Seats* s, const int64_t* seats, const int64_t* tokens, const int64_t* count, int64_t requests, int64_t drafts,
              const float* probs, int64_t numbers, float* kept, int64_t stride, int32_t threads) {
  for (int64_t r = 0; r < requests; r++) {
    s->waiting[seats[r]] = count[r];
    std::copy_n(tokens + r * drafts, drafts, s->tokens + seats[r] * s->width + s->length[seats[r]]);
  }
  if (!probs) return;
  parallel(worth(threads, requests * numbers), [&](const Member& member) {
    const Range mine = member.part(requests);
    for (int64_t r = mine.first; r < mine.end; r++) std::copy_n(probs + r * numbers, numbers, kept + seats[r] * stride);
  });
}

// tokens [requests, width]: where samples[r] is 1, the first accepted[r] + 1 are committed.
void mtp_advance(const Seats* s, const int64_t* seats, const int64_t* query_start_loc, const int64_t* last_row, const int64_t* samples,
                 const int64_t* accepted, const int64_t* tokens, int64_t requests, int64_t width, int32_t) {
  for (int64_t r = 0; r < requests; r++, tokens += width) {
    const int64_t seat = seats[r], kept = samples[r] ? accepted[r] : 0, *end = tokens + kept + samples[r];
    const int64_t* stops = s->stops + seat * s->most_stops;
    std::copy_n(tokens, width, s->tokens + seat * s->width + s->length[seat]);
    if (!s->done[seat]) s->computed[seat] += last_row[r] - query_start_loc[r] + 1 + kept;
    s->length[seat] += end - tokens;
    const bool stopped = std::find_first_of(tokens, end, stops, stops + s->most_stops) != end;
    s->done[seat] = s->done[seat] || stopped || s->length[seat] >= s->limit[seat];
  }
}
}
}  // namespace mtp
