// Reference: attention/reference.py. Online softmax over blocks of BLOCK columns, counted from the request's first.
//
// The sums of a row do not depend on the rows beside it: a score is one sum over the key in order, a weighted sum one over the columns
// in order, and a block that a row sees nothing of does nothing to it. What a row sees is always one range of columns:
//
//   columns   0 … low - 1 | low … tree_start - 1 | tree_start …                    | end …
//   row       not seen    | the token there      | the row's ancestors, in order   | not seen
//
// The ancestors of a tree's node are wherever the tree has them, but they are summed at the columns that they have in plain decoding.
#include "attention.h"

#include <bit>
#include <cmath>
#include <type_traits>

#include "attention_tiles.h"

namespace mtp {
namespace {
constexpr int64_t MAX_PIECE = 96;  // rows × heads that share a key head, in one piece of work
constexpr int64_t MAX_SUMS = 1 << 15;
constexpr int64_t MANY_ROWS = 32;   // × heads, for which the keys may well be loaded once more
constexpr int64_t SMALL = 1 << 20;  // multiplications that one thread does before others have started

// A piece of the work: rows × heads that share a key head, for some key heads of one request. m = row * group + head.
struct Piece {
  int64_t request;
  Range heads;  // key heads
  Range rows;   // of m
};

struct Row {
  int64_t low, end;         // columns that it sees
  int64_t ancestors;        // of a tree's node: the last columns that it sees; 0: the row is none
  uint8_t ancestor[BLOCK];  // their places after tree_start
};

// Of the columns at hand, or of the next block's: where a head's key and value begin, in numbers after the first slot's.
struct Offsets {
  int64_t key[MOST], value[MOST];
};

struct Scratch {
  std::vector<float> q, sums, largest, total, keys, values, alone, scores;
  std::vector<bf16> pairs;  // instead of q
  std::vector<Row> rows;
  Offsets here, ahead;
};

template <class K> struct Work {
  const Spans& spans;
  const Piece& piece;
  const K *keys, *values;
  const float* sinks;
  Scratch& scratch;
  const int64_t group = spans.heads / spans.kv_heads, count = piece.rows.end - piece.rows.first;
  const int64_t padded = round_up(spans.key_dim, 2 * LANES), width = round_up(spans.value_dim, LANES);
  int64_t low = INT64_MAX, end = 0;  // columns that some row sees
  int64_t places = 0;                // the last place that some row sees, plus 1
  int64_t tree_start = INT64_MAX;
  bool nodes = false;  // some row is a tree's node
  bool pairs = false;  // of bfloat16 numbers are multiplied: of keys and queries, and of weights and values

  void run(const Heads& q, const Heads& out) {
    look_at_rows();
    load_q(q);
    const int64_t first = nodes ? std::min(low, tree_start) : low;
    for (int64_t start = first / BLOCK * BLOCK; start < end;) start += blocks(start);
    finish(out);
  }

  const Row& row_of(int64_t m) const { return scratch.rows[(piece.rows.first + m) / group - piece.rows.first / group]; }

  void look_at_rows() {
    const int64_t r = piece.request, first = piece.rows.first / group, last = (piece.rows.end - 1) / group;
    if (spans.tree_bits) tree_start = spans.tree_start[r];
    scratch.rows.resize(last - first + 1);
    for (int64_t i = first; i <= last; i++) {
      Row& row = scratch.rows[i - first];
      const int64_t t = spans.query_start_loc[r] + i;
      int64_t position = spans.index[t];
      int64_t until = std::min(position + 1, spans.seq_lens[r]);
      row.end = until, row.ancestors = 0;
      uint64_t bits = spans.tree_bits ? uint64_t(spans.tree_bits[t]) : ~0ull;
      if (bits != ~0ull) {
        position = tree_start + std::popcount(bits) - 1;
        for (; bits; bits &= bits - 1)
          if (int place = std::countr_zero(bits); tree_start + place < until) row.ancestor[row.ancestors++] = uint8_t(place);
        if (row.ancestors) nodes = true, until = tree_start + row.ancestor[row.ancestors - 1] + 1;
        row.end = std::min(row.end, tree_start + row.ancestors);
      }
      row.low = spans.window ? std::max<int64_t>(0, position - spans.window + 1) : 0;
      if (row.low >= row.end) continue;
      low = std::min(low, row.low), end = std::max(end, row.end), places = std::max(places, until);
    }
  }

  // As float32 with the scale, or as they are, which are pairs.
  void load_q(const Heads& q) {
    const int64_t dim = spans.key_dim, total = (piece.heads.end - piece.heads.first) * count;
    pairs = PAIRS && std::is_same_v<K, bf16> && q.type == BF16;
    if (pairs) scratch.pairs.resize(total * dim);
    else scratch.q.resize(total * dim);
    scratch.sums.assign(total * width, 0.f);
    scratch.largest.assign(total, -INFINITY);
    scratch.total.assign(total, sinks ? 1.f : 0.f);
    scratch.keys.resize(BLOCK * padded);
    scratch.scores.resize(count * MOST);
    scratch.values.resize(BLOCK * value_stride());
    if (pairs) scratch.alone.resize(BLOCK / 2 * value_stride());
    each_row([&](int64_t i, int64_t row, int64_t head) {
      if (sinks) scratch.largest[i] = sinks[head];
      if (pairs) {
        std::memcpy(scratch.pairs.data() + i * dim, (const bf16*)q.data + row * q.stride + head * dim, dim * sizeof(bf16));
        return;
      }
      by_type(q.type, [&](auto number) {
        const auto* from = (const decltype(number)*)q.data + row * q.stride + head * dim;
        for (int64_t d = 0; d < dim; d++) scratch.q[i * dim + d] = widen(from[d]) * spans.scale;
      });
    });
  }

  void finish(const Heads& out) {
    each_row([&](int64_t i, int64_t row, int64_t head) {
      const Floats total = set(scratch.total[i]);
      by_type(out.type, [&](auto number) {
        auto* to = (decltype(number)*)out.data + row * out.stride + head * spans.value_dim;
        for (int64_t e = 0; e < spans.value_dim; e += LANES)
          store_some(to + e, load(scratch.sums.data() + i * width + e) / total, spans.value_dim - e);
      });
    });
  }

  // f(number among the piece's, row of q, head of q)
  template <class F> void each_row(const F& f) const {
    int64_t i = 0;
    for (int64_t h = piece.heads.first; h < piece.heads.end; h++)
      for (int64_t m = piece.rows.first; m < piece.rows.end; m++)
        f(i++, spans.query_start_loc[piece.request] + m / group, h * group + m % group);
  }

  // The columns start + seen; before and after them, up to whole vectors, is the first of these again, which was written.
  void find(int64_t start, Range seen, Offsets& offsets) const {
    const int64_t* pages = spans.page_table + spans.seats[piece.request] * spans.table_stride;
    const int64_t place = start + seen.first + spans.shift;
    int64_t page = place / spans.page_size, within = place % spans.page_size;
    for (int64_t c = seen.first; c < seen.end; page++, within = 0) {
      int64_t slot = pages[page] * spans.page_size + within;
      for (; within < spans.page_size && c < seen.end; within++, c++, slot++) {
        offsets.key[c] = slot * spans.key_stride, offsets.value[c] = slot * spans.value_stride;
      }
    }
    for (int64_t c = seen.first / LANES * LANES; c < seen.first; c++) offsets.key[c] = offsets.key[seen.first];
    for (int64_t c = seen.end; c < round_up(seen.end, LANES); c++) offsets.key[c] = offsets.key[seen.first];
  }

  Range seen_from(int64_t start, int64_t columns) const { return {std::max<int64_t>(0, low - start), std::min(columns, places - start)}; }

  // One block, or the two that a tree begins in → how many columns.
  int64_t blocks(int64_t start) {
    const bool tree = nodes && start == tree_start / BLOCK * BLOCK;
    const int64_t columns = tree ? MOST : BLOCK;
    const Range seen = seen_from(start, columns), next = seen_from(start + columns, BLOCK);
    if (seen.first >= seen.end) return columns;
    find(start, seen, scratch.here);
    if (next.first < next.end) find(start + columns, next, scratch.ahead);
    for (int64_t h = 0; h < piece.heads.end - piece.heads.first; h++) {
      for (int64_t b = 0; b < seen.end; b += BLOCK)
        score(h, b, {std::max<int64_t>(0, seen.first - b), std::min<int64_t>(BLOCK, seen.end - b)}, next);
      if (tree) place_ancestors(tree_start - start);
      for (int64_t b = 0; b < seen.end; b += BLOCK) add_block(h, start, b, next);
    }
    return columns;
  }

  // Part i of n of the next block's keys or values, for all heads of the piece: memory is read in its order, a slot's heads together.
  void fetch(const K* from, const int64_t* offsets, int64_t head_stride, int64_t dim, Range next, int64_t i, int64_t n) const {
    const int64_t rows = next.end - next.first, length = (piece.heads.end - piece.heads.first - 1) * head_stride + dim;
    for (int64_t c = next.first + rows * i / n; c < next.first + rows * (i + 1) / n; c++)
      for (int64_t j = 0; j < length; j += 64 / int64_t(sizeof(K))) prefetch(from + piece.heads.first * head_stride + offsets[c] + j);
  }

  void score(int64_t h, int64_t b, Range seen, Range next) {
    const K* head = keys + (piece.heads.first + h) * spans.key_head_stride;
    const int64_t heads = piece.heads.end - piece.heads.first, stored = pairs ? padded / 2 : padded;
    for (int64_t c = seen.first / LANES * LANES; c < seen.end; c += LANES) {
      if (b == 0 && next.first < next.end)
        fetch(keys, scratch.ahead.key, spans.key_head_stride, spans.key_dim, next, (h * BLOCK + c) / LANES, heads * (BLOCK / LANES));
      const int64_t* offsets = scratch.here.key + b + c;
      float* to = scratch.keys.data() + c / PANEL * PANEL * stored + c % PANEL;
      if constexpr (std::is_same_v<K, bf16>) {
        if (pairs) transpose_pairs(head, offsets, spans.key_dim, to);
        else transpose_keys(head, offsets, spans.key_dim, to);
      } else transpose_keys(head, offsets, spans.key_dim, to);
    }
    each_tile([&](int64_t m, auto rows) {
      const int64_t first = (h * count + m) * spans.key_dim;
      float* scores = scratch.scores.data() + m * MOST + b;
      if (pairs)
        multiply_keys<rows>(scratch.pairs.data() + first, spans.key_dim / 2, scratch.keys.data(), stored, spans.scale, seen, scores);
      else multiply_keys<rows>(scratch.q.data() + first, spans.key_dim, scratch.keys.data(), stored, 1, seen, scores);
    });
  }

  // f(first, number) for tiles of nearly equal height.
  template <class F> void each_tile(const F& f) const {
    const int64_t tiles = ceil_div(count, MAX_ROWS);
    for (int64_t i = 0; i < tiles; i++) {
      const int64_t m = count * i / tiles;
      with_rows<MAX_ROWS>(count * (i + 1) / tiles - m, [&](auto rows) { f(m, rows); });
    }
  }

  // From the places of a tree's nodes to the columns of each row. An ancestor's place is not before its column.
  void place_ancestors(int64_t first) {
    for (int64_t m = 0; m < count; m++) {
      const Row& row = row_of(m);
      float* scores = scratch.scores.data() + m * MOST + first;
      for (int64_t i = 0; i < row.ancestors; i++) scores[i] = scores[row.ancestor[i]];
    }
  }

  void add_block(int64_t h, int64_t start, int64_t b, Range next) {
    Range seen[MAX_PIECE];
    for (int64_t m = 0; m < count; m++) {
      const Row& row = row_of(m);
      seen[m] = {std::clamp<int64_t>(row.low - start - b, 0, BLOCK), std::clamp<int64_t>(row.end - start - b, 0, BLOCK)};
      if (seen[m].first >= seen[m].end) continue;
      const int64_t i = h * count + m;
      const float before = scratch.largest[i];
      float* scores = scratch.scores.data() + m * MOST + b;
      const float sum = pairs ? weigh<true>(scores, seen[m], scratch.largest[i]) : weigh<false>(scores, seen[m], scratch.largest[i]);
      if (scratch.largest[i] != before) {
        const Floats shrink = exp(set(before - scratch.largest[i]));
        scratch.total[i] *= max(shrink);
        float* sums = scratch.sums.data() + i * width;
        for (int64_t e = 0; e < width; e += LANES) store(sums + e, load(sums + e) * shrink);
      }
      scratch.total[i] += sum;
    }
    const K* head = values + (piece.heads.first + h) * spans.value_head_stride;
    if (b == 0 && next.first < next.end && (const void*)values != (const void*)keys)
      fetch(values, scratch.ahead.value, spans.value_head_stride, spans.value_dim, next, h, piece.heads.end - piece.heads.first);
    const int64_t shared =
        nodes ? std::clamp<int64_t>(tree_start - start - b, 0, BLOCK) : BLOCK;  // the columns before it are the same for all
    const Range some{std::clamp<int64_t>(low - start - b, 0, shared), std::clamp<int64_t>(end - start - b, 0, shared)};
    // Several tiles: the values are widened once for all, or paired, and lie side by side.
    const bool several = count > MAX_ROWS || (pairs && spans.value_dim % LANES);
    int64_t offsets[BLOCK];
    if (several && !pairs) widen_values(head, scratch.here.value + b, some, offsets);
    float* sums = scratch.sums.data() + h * count * width;
    Range joint[MAX_PIECE];  // of the tile that begins there: the columns that all of its rows see; with pairs, whole ones
    each_tile([&](int64_t m, auto rows) {
      Range all{0, shared};
      for (int64_t i = m; i < m + rows; i++) all = {std::max(all.first, seen[i].first), std::min(all.end, seen[i].end)};
      if (pairs) all = {round_up(all.first, 2), all.end / 2 * 2};
      joint[m] = all.first < all.end ? all : Range{0, 0};
      each_alone(h, m, rows, start, b, seen, {0, joint[m].first});
      if (pairs) return;
      const float* p = scratch.scores.data() + m * MOST + b;
      if (several)
        add_values<rows, vectors_of(rows)>(p, scratch.values.data(), offsets, 0, spans.value_dim, joint[m], sums + m * width, width);
      else add_values<rows, vectors_of(rows)>(p, head, scratch.here.value + b, 0, spans.value_dim, joint[m], sums + m * width, width);
    });
    if constexpr (std::is_same_v<K, bf16>) {
      if (pairs && several) {
        float* to = scratch.values.data();
        pack_pairs(head, scratch.here.value + b, some, spans.value_dim, to + some.first / 2 * value_stride(), value_stride());
        add_joint(h, b, joint, PackedPairs{to, value_stride()});
      } else if (pairs) {
        add_joint(h, b, joint, PairsInPlace{head, scratch.here.value + b});
      }
    }
    each_tile([&](int64_t m, auto rows) { each_alone(h, m, rows, start, b, seen, {joint[m].end, BLOCK}); });
  }

  int64_t value_stride() const { return width + PANEL; }  // not a power of two, of which few lines would fit into the cache

  // Of each tile the pairs of columns that all of its rows see. A part of the values stays in the innermost cache for all tiles.
  template <class Value> void add_joint(int64_t h, int64_t b, const Range* joint, const Value& value) {
    each_width<BLOCK_VECTORS>(0, width, [&](int64_t e, auto vectors) {
      each_tile([&](int64_t m, auto rows) {
        add_pairs<rows, vectors>(scratch.scores.data() + m * MOST + b, value, e, {joint[m].first / 2, joint[m].end / 2},
                                 scratch.sums.data() + (h * count + m) * width, width);
      });
    });
  }

  void widen_values(const K* head, const int64_t* from, Range columns, int64_t* offsets) {
    for (int64_t j = columns.first; j < columns.end; j++) {
      offsets[j] = j * value_stride();
      convert(head + from[j], scratch.values.data() + offsets[j], spans.value_dim);
    }
  }

  // The columns `part` of a tile whose rows do not see the same of them: the heads of each row by themselves.
  void each_alone(int64_t h, int64_t m, int64_t rows, int64_t start, int64_t b, const Range* seen, Range part) {
    for (int64_t i = m, many; i < m + rows; i += many) {
      const Row& row = row_of(i);
      many = 1;
      while (i + many < m + rows && &row_of(i + many) == &row) many++;
      const Range columns{std::max(part.first, seen[i].first), std::min(part.end, seen[i].end)};
      if (columns.first >= columns.end) continue;
      int64_t offsets[BLOCK];
      for (int64_t j = columns.first; j < columns.end; j++) {
        const int64_t node = start + b + j - tree_start;
        offsets[j] = scratch.here.value[row.ancestors && node >= 0 ? tree_start - start + row.ancestor[node] : b + j];
      }
      const K* head = values + (piece.heads.first + h) * spans.value_head_stride;
      const float* p = scratch.scores.data() + i * MOST + b;
      float* sums = scratch.sums.data() + (h * count + i) * width;
      if constexpr (std::is_same_v<K, bf16>)
        if (pairs) pack_pairs(head, offsets, columns, spans.value_dim, scratch.alone.data(), value_stride());
      with_rows<MAX_ROWS>(many, [&](auto same) {
        if (!pairs) return add_values<same, vectors_of(same)>(p, head, offsets, 0, spans.value_dim, columns, sums, width);
        const PackedPairs value{scratch.alone.data(), value_stride()};
        each_width<BLOCK_VECTORS>(0, width, [&](int64_t e, auto vectors) {
          add_pairs<same, vectors>(p + columns.first / 2, value, e, {0, ceil_div(columns.end, 2) - columns.first / 2}, sums, width);
        });
      });
    }
  }
};

int64_t rows_of(const Spans& spans, int64_t r) { return spans.query_start_loc[r + 1] - spans.query_start_loc[r]; }

// About how long the requests [first, end) take, in multiplications; loading a key costs as much as some rows.
int64_t cost_of(const Spans& spans, int64_t first, int64_t end) {
  int64_t total = 0;
  for (int64_t r = first; r < end; r++) total += spans.seq_lens[r] * (8 * spans.kv_heads + rows_of(spans, r) * spans.heads);
  return total * (spans.key_dim + spans.value_dim);
}

// f(piece) in an order that all members share. A request that is a large part of the work is cut over its key heads, and where these
// are too few, over its rows × heads; never over the keys. Each part of the rows loads all keys, which takes as long as some rows do: a few
// rows are cut only where a request is more than one member's share, so that the others would wait for it.
template <class F> void each_piece(const Spans& spans, int members, const F& f) {
  const int64_t group = spans.heads / spans.kv_heads, total = cost_of(spans, 0, spans.requests);
  const int64_t most = std::clamp<int64_t>(MAX_SUMS / spans.value_dim / MAX_ROWS * MAX_ROWS, MAX_ROWS, MAX_PIECE);
  // Several pieces for each member, so that all end at about the same time; of a single request equal ones.
  const int64_t pieces = members == 1 ? 1 : spans.requests == 1 ? members : 4 * members;
  for (int64_t r = 0; r < spans.requests; r++) {
    const int64_t rows = rows_of(spans, r) * group;
    if (rows == 0) continue;
    const double share = double(cost_of(spans, r, r + 1)) / double(total);
    const auto parts_of = [&](int64_t all) { return std::max<int64_t>(1, (int64_t)std::ceil(share * double(all) - 0.01)); };
    const int64_t wanted = parts_of(pieces), needed = parts_of(members);
    int64_t row_parts = ceil_div(rows, most);
    int64_t head_parts = ceil_div(spans.kv_heads * ceil_div(rows, row_parts), most);
    head_parts = std::min(spans.kv_heads, std::max(head_parts, ceil_div(wanted, row_parts)));
    row_parts = std::max({row_parts, std::min(ceil_div(rows, MAX_ROWS), ceil_div(needed, head_parts)),
                          std::min(rows / MANY_ROWS, ceil_div(wanted, head_parts))});
    for (int64_t i = 0; i < row_parts; i++)
      for (int64_t j = 0; j < head_parts; j++)
        f(Piece{r,
                {spans.kv_heads * j / head_parts, spans.kv_heads * (j + 1) / head_parts},
                {rows * i / row_parts, rows * (i + 1) / row_parts}});
  }
}

template <class K> void run(const Member& member, const Spans& spans, const Heads& q, const Heads& out, const void* keys,
                            const void* values, const float* sinks, std::atomic<int64_t>& next) {
  thread_local Scratch scratch;
  int64_t mine = next.fetch_add(1), number = 0;
  each_piece(spans, member.size, [&](const Piece& piece) {
    if (number++ != mine) return;
    Work<K>{spans, piece, (const K*)keys, (const K*)values, sinks, scratch}.run(q, out);
    mine = next.fetch_add(1);
  });
}
}  // namespace

void attention(const Member& member, const Spans& spans, const Heads& q, const Heads& out, const void* keys, const void* values,
               const float* sinks, std::atomic<int64_t>& next) {
  by_type(spans.type, [&](auto number) { run<decltype(number)>(member, spans, q, out, keys, values, sinks, next); });
}

extern "C" {

void mtp_attention(const Spans* spans, const Heads* q, const Heads* out, const void* keys, const void* values, const float* sinks,
                   int32_t threads) {
  std::atomic<int64_t> next{0};
  parallel(cost_of(*spans, 0, spans->requests) < SMALL ? 1 : threads,
           [&](const Member& member) { attention(member, *spans, *q, *out, keys, values, sinks, next); });
}
}
}  // namespace mtp
