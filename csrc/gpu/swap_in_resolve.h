// What one CTA does for one request of kvio::swap_in, as steps that every thread takes between two barriers. A step
// reads nothing that another thread writes in it, except through Env, so the outcome depends on no order of threads:
// tests/native runs the same source with its threads in any order.
//
// Steps: begin, clear, fetch -> | insert -> | settle if *w.repeated | -> mark -> | judge, sum -> | place -> | assign ->
// | tell -> | repeat if *w.repeated, with a barrier at every bar, and in the sum over all waves. `Env` has the atomic
// operations and the votes, and takes faults; compiled for a GPU or a CPU.
//
// What shaped it (H200): this code runs once in a launch, so fetching instructions takes as long as running them, and
// loops are not unrolled: with two or four times as many rounds unrolled for half or a quarter of the threads it took
// 1.2 and 2 times as long. CTAs of a cluster, which share the copying, all do the same, and one records it: a table cut
// over their shared memories took longer.
#pragma once

#include <cstdint>

#include "request/swap_in_request.h"

#if defined(__CUDACC__) || defined(__HIP__)
#define KVIO_STEP __device__ __forceinline__
#define KVIO_ROLLED _Pragma("unroll 1")
#else
#define KVIO_STEP inline
#define KVIO_ROLLED
#endif
#define KVIO_RARELY(condition) __builtin_expect(!!(condition), 0)

namespace kvio::gpu {

// Which argument a fault is about, counted from FaultOp::kSwapIn as in request/fault_subject.cpp.
enum class SwapInArgument : int32_t { kTopK, kHostLocs, kDeviceLocs, kLru, kRequest, kDirectLocs };

// What waves vote on.
enum class Vote : int32_t { kPlace, kEntry };

// Entries of the table that finds a token among the selected ones: `times` as many as can be in it, or more.
constexpr int32_t hash_bits_for(int64_t top_k, int64_t times) {
  int32_t bits = 5;
  while ((int64_t{1} << bits) < times * top_k) ++bits;
  return bits;
}

// Where the arrays of a CTA's memory are: bytes from where it begins, and how many in all.
struct WorkspaceLayout {
  int32_t hash_bits;
  int32_t keys;
  int32_t values;
  int32_t result;
  int32_t home;
  int32_t miss_rank;
  int32_t lru;
  int32_t place_rank;
  int32_t slot_hits;
  int32_t order;
  int32_t missing;
  int32_t miss_src;
  int32_t miss_dst;
  int32_t repeated;
  int32_t bytes;
};

// A CTA's memory, shared or not.
struct Workspace {
  int32_t* keys;    // [hash] token, kNoToken for none
  int32_t* values;  // [hash] its device location, -1 for none that may be given out; pending_of an entry until known
  // Of a thread's own entries and places, in whole rounds of all threads.
  int32_t* result;      // of an entry; kPending for one whose token is looked for
  uint32_t* home;       // where in the table that is
  int16_t* miss_rank;   // misses before an entry in its wave, kNoMiss, or kNoHostLoc
  uint16_t* lru;        // slots as given
  int16_t* place_rank;  // of a place whose slot stays: those that stay before it in its wave; else ~ of it
  // Of all.
  uint32_t* slot_hits;  // a bit for each slot, up to whole rounds: it holds a selected token
  uint16_t* order;      // [at most top_k] slots that misses take, by miss
  uint16_t* missing;    // [top_k] entry of each miss
  int64_t* miss_src;    // [top_k] host location of each miss
  int32_t* miss_dst;    // [top_k] device location of each miss, -1 for one that is not copied
  int32_t* repeated;    // not 0: a token is selected twice
};

constexpr int16_t kNoMiss = -1;     // of an entry that need not be loaded, or is by another one
constexpr int16_t kNoHostLoc = -2;  // of one that should be, but from no location of the pool

// The workspace of a CTA of `threads`. The table is eight times as large as the selection where that is no more than
// `most_bytes` in all, else four or two times: shorter searches or, at least, a table that fits.
inline WorkspaceLayout lay_out_workspace(int64_t top_k, int64_t hot_slots, int64_t threads, int64_t most_bytes) {
  WorkspaceLayout layout{};
  const int64_t entries = (top_k + threads - 1) / threads * threads;
  const int64_t slots = (hot_slots + threads - 1) / threads * threads;
  for (const int64_t times : {8, 4, 2}) {
    layout.hash_bits = hash_bits_for(top_k, times);
    int32_t end = 0;
    const auto take = [&end](int64_t bytes) {
      const int32_t at = end;
      end += static_cast<int32_t>((bytes + 15) / 16 * 16);
      return at;
    };
    const int64_t hash = int64_t{1} << layout.hash_bits;
    layout.keys = take(4 * hash);
    layout.values = take(4 * hash);
    layout.result = take(4 * entries);
    layout.home = take(4 * entries);
    layout.miss_rank = take(2 * entries);
    layout.lru = take(2 * slots);
    layout.place_rank = take(2 * slots);
    layout.slot_hits = take((slots + 63) / 64 * 8);
    layout.order = take(2 * (top_k < hot_slots ? top_k : hot_slots));
    layout.missing = take(2 * top_k);
    layout.miss_src = take(8 * top_k);
    layout.miss_dst = take(4 * top_k);
    layout.repeated = take(4);
    layout.bytes = end;
    if (layout.bytes <= most_bytes) break;
  }
  return layout;
}

KVIO_STEP Workspace workspace_at(char* base, const WorkspaceLayout& at) {
  Workspace w;
  w.keys = reinterpret_cast<int32_t*>(base + at.keys);
  w.values = reinterpret_cast<int32_t*>(base + at.values);
  w.result = reinterpret_cast<int32_t*>(base + at.result);
  w.home = reinterpret_cast<uint32_t*>(base + at.home);
  w.miss_rank = reinterpret_cast<int16_t*>(base + at.miss_rank);
  w.lru = reinterpret_cast<uint16_t*>(base + at.lru);
  w.place_rank = reinterpret_cast<int16_t*>(base + at.place_rank);
  w.slot_hits = reinterpret_cast<uint32_t*>(base + at.slot_hits);
  w.order = reinterpret_cast<uint16_t*>(base + at.order);
  w.missing = reinterpret_cast<uint16_t*>(base + at.missing);
  w.miss_src = reinterpret_cast<int64_t*>(base + at.miss_src);
  w.miss_dst = reinterpret_cast<int32_t*>(base + at.miss_dst);
  w.repeated = reinterpret_cast<int32_t*>(base + at.repeated);
  return w;
}

constexpr int32_t kNoToken = -1;
constexpr int32_t kPending = -2;

// A token whose location is not known yet: the entry that asks for it, the lowest of several after `settle`.
KVIO_STEP constexpr int32_t pending_of(int32_t entry) { return kPending - entry; }

// Rows of a tensor as kernels have them: `stride` is below 2^32, so that an address is one multiplication.
template <class T>
struct ShortRows {
  T* data;
  uint32_t stride;  // elements
};

template <class T>
ShortRows<T> short_rows(const Rows<T>& rows) {
  return {rows.data, static_cast<uint32_t>(rows.stride)};
}

template <class T>
KVIO_STEP T* row_of(const ShortRows<T>& rows, uint32_t row) {
  return rows.data + static_cast<uint64_t>(row) * rows.stride;
}

struct ResolveParams {
  ShortRows<const int32_t> top_k_tokens;
  ShortRows<int32_t> device_buffer_tokens;
  ShortRows<const int32_t> device_buffer_locs;
  ShortRows<const uint32_t> host_cache_locs;  // in words, two for a location where host_is_int64
  bool host_is_int64;
  ShortRows<int16_t> lru_slots;
  ShortRows<int32_t> top_k_device_locs;
  IndexList req_pool_indices;
  IndexList seq_lens;
  const int32_t* num_real_reqs;
  ShortRows<const int32_t> device_locs;
  ShortRows<int64_t> miss_src;  // the recorded plan; null without
  ShortRows<int32_t> miss_dst;
  Strided<int32_t> miss_count;
  int64_t pool_slots;
  int64_t max_len;
  int64_t host_slots;
  uint32_t device_slots;  // at most 2^31
  int32_t top_k;
  int32_t hot_slots;
  WorkspaceLayout layout;
};

KVIO_STEP int64_t entry_of(const IndexList& list, int64_t at) {
  const int64_t i = at * list.stride;
  return list.is_int64 ? static_cast<const int64_t*>(list.data)[i] : static_cast<const int32_t*>(list.data)[i];
}

// A row of the batch.
struct Job {
  int32_t batch_row;
  int32_t token_limit;  // tokens are below it
  int32_t newest;       // the token with a slot of its own, kNoToken if it is beyond an int32
  uint32_t request;     // row of the state tensors
  bool records;         // this CTA writes the state, the answers, the plan and faults; others only find out what misses
  const int32_t* selected;
  int32_t* out;
  int32_t* tokens;
  const int32_t* locs;
  int16_t* lru;
  const int32_t* direct;  // row of device_locs, null without
};

KVIO_STEP Job make_job(const ResolveParams& p, int32_t batch_row, uint32_t request, int64_t seq_len, bool records) {
  constexpr int64_t kMost = 0x7fffffff;
  // Where the token names its slot, host locations are not looked at.
  const bool is_direct = seq_len <= p.hot_slots && p.device_locs.data == nullptr;
  const int64_t limit = seq_len < p.max_len || is_direct ? seq_len : p.max_len;
  Job job;
  job.batch_row = batch_row;
  job.token_limit = static_cast<int32_t>(limit < 0 ? 0 : limit < kMost ? limit : kMost);
  job.newest = seq_len <= kMost ? static_cast<int32_t>(seq_len) - 1 : kNoToken;
  job.request = request;
  job.records = records;
  job.selected = row_of(p.top_k_tokens, batch_row);
  job.out = row_of(p.top_k_device_locs, batch_row);
  job.tokens = row_of(p.device_buffer_tokens, request);
  job.locs = row_of(p.device_buffer_locs, request);
  job.lru = row_of(p.lru_slots, request);
  job.direct = p.device_locs.data != nullptr ? row_of(p.device_locs, request) : nullptr;
  return job;
}

// A thread among those of its CTA, whose waves of `wave` threads vote together.
struct Thread {
  int32_t number;
  int32_t count;
  int32_t wave;

  // Where arrays have what is this thread's own in round r.
  KVIO_STEP int32_t own(int32_t r) const { return r * count + number; }
};

// Where order counts, a wave takes a stretch of whole waves, round by round: this thread's thing in round r is
// first + r * wave.
struct Stretch {
  int32_t rounds;
  int32_t first;
};
KVIO_STEP Stretch stretch_of(const Thread& t, int32_t total) {
  const int32_t rounds = (total + t.count - 1) / t.count;
  const int32_t lane = t.number & (t.wave - 1);
  return {rounds, (t.number - lane) * rounds + lane};
}

// What a thread has under way from its first round while others wait.
struct First {
  int32_t selected;
  int32_t token;
  int32_t loc;
  int32_t slot;
};

KVIO_STEP int64_t host_loc_of(const ResolveParams& p, const Job& job, int32_t token) {
  const uint32_t* row = row_of(p.host_cache_locs, job.request);
  if (p.host_is_int64) return reinterpret_cast<const int64_t*>(row)[token];
  return static_cast<int32_t>(row[token]);
}

// A fault's position in a 2-D argument, as request/fault_subject.h has it.
KVIO_STEP int64_t at_row(int64_t row, int64_t column) { return row << 32 | column; }

// Where a fault that a step noted is, and what would have been allowed there.
KVIO_STEP int64_t fault_position(const Job& job, SwapInArgument argument, int32_t column) {
  if (argument == SwapInArgument::kRequest) return column;
  return at_row(argument == SwapInArgument::kTopK ? job.batch_row : int64_t{job.request}, column);
}
KVIO_STEP int64_t fault_limit(const ResolveParams& p, const Job& job, SwapInArgument argument) {
  switch (argument) {
    case SwapInArgument::kTopK:
      return job.token_limit;
    case SwapInArgument::kHostLocs:
      return p.host_slots;
    case SwapInArgument::kLru:
      return p.hot_slots;
    case SwapInArgument::kRequest:
      return p.pool_slots;
    default:
      return p.device_slots;
  }
}

// A location of the device buffer as it may be handed out: itself, or -1 and a fault.
template <class Env>
KVIO_STEP int32_t checked_loc(Env& env, const ResolveParams& p, int32_t loc, int32_t column, SwapInArgument argument) {
  if (KVIO_RARELY(static_cast<uint32_t>(loc) >= p.device_slots)) {
    env.note(argument, column, loc);
    return -1;
  }
  return loc;
}

// How many misses a row of the batch has, where a plan is recorded.
KVIO_STEP void record_misses(const ResolveParams& p, int32_t batch_row, int32_t misses) {
  if (p.miss_count.data == nullptr) return;
  p.miss_count.data[batch_row * p.miss_count.stride] = misses;
}

// Entry i where the token names its slot: sequences that fit the hot buffer.
template <class Env>
KVIO_STEP int32_t direct_result(Env& env, const ResolveParams& p, const Job& job, int64_t seq_len, int32_t i) {
  if (i >= seq_len) return -1;
  const int32_t token = job.selected[i];
  if (token < 0) return -1;
  if (token >= seq_len) {
    env.note(SwapInArgument::kTopK, i, token);
    return -1;
  }
  return checked_loc(env, p, job.locs[token], token, SwapInArgument::kDeviceLocs);
}

// What needs no request.
KVIO_STEP void begin(const ResolveParams& p, int32_t batch_row, const Thread& t, First* first) {
  const int32_t i = stretch_of(t, p.top_k).first;
  first->selected = i < p.top_k ? row_of(p.top_k_tokens, batch_row)[i] : kNoToken;
}

KVIO_STEP void fetch(const ResolveParams& p, const Job& job, const Thread& t, First* first) {
  const int32_t j = stretch_of(t, p.hot_slots).first;
  first->token = t.number < p.hot_slots ? job.tokens[t.number] : kNoToken;
  first->loc = t.number < p.hot_slots ? job.locs[t.number] : 0;
  first->slot = j < p.hot_slots ? job.lru[j] : 0;
}

struct alignas(16) Quad {
  int32_t words[4];
};

// The table of this thread's CTA.
KVIO_STEP void clear(const ResolveParams& p, const Workspace& w, const Thread& t) {
  Quad* keys = reinterpret_cast<Quad*>(w.keys);
  const int32_t quads = 1 << (p.layout.hash_bits - 2);
  KVIO_ROLLED for (int32_t h = t.number; h < quads; h += t.count) {
    keys[h] = {{kNoToken, kNoToken, kNoToken, kNoToken}};
  }
  if (t.number == 0) *w.repeated = 0;
}

// Where the search for a token begins: it is in the first free place from there on.
KVIO_STEP uint32_t home_of(const ResolveParams& p, int32_t token) {
  return static_cast<uint32_t>(token) * 2654435761u >> (32 - p.layout.hash_bits);
}

// The result of entry i, whose token is none that is looked for.
template <class Env>
KVIO_STEP int32_t other_result(Env& env, const ResolveParams& p, const Job& job, int32_t i, int32_t token) {
  if (token < 0) return -1;
  if (token >= job.token_limit) {
    env.note(SwapInArgument::kTopK, i, token);
    return -1;
  }
  if (job.direct != nullptr) {
    const int32_t loc = job.direct[token];
    if (loc >= 0) return checked_loc(env, p, loc, token, SwapInArgument::kDirectLocs);
  }
  if (token == job.newest) {
    return checked_loc(env, p, job.locs[p.hot_slots], p.hot_slots, SwapInArgument::kDeviceLocs);
  }
  return kPending;
}

// Puts the token of entry i into the table; returns where.
template <class Env>
KVIO_STEP uint32_t insert_token(Env& env, const ResolveParams& p, const Workspace& w, int32_t i, int32_t token) {
  const uint32_t mask = (1u << p.layout.hash_bits) - 1;
  uint32_t home = home_of(p, token);
  KVIO_ROLLED while (true) {
    const int32_t before = env.claim(&w.keys[home], kNoToken, token);
    if (before == kNoToken) {
      w.values[home] = pending_of(i);
      return home;
    }
    if (KVIO_RARELY(before == token)) {
      *w.repeated = 1;
      return home;
    }
    home = (home + 1) & mask;
  }
}

// Puts tokens into the table.
template <class Env>
KVIO_STEP void insert(Env& env, const ResolveParams& p, const Workspace& w, const Job& job, const Thread& t,
                      const First& first) {
  const Stretch entries = stretch_of(t, p.top_k);
  int32_t next = first.selected;
  KVIO_ROLLED for (int32_t r = 0; r < entries.rounds; ++r) {
    const int32_t i = entries.first + r * t.wave;
    const int32_t token = next;
    next = r + 1 < entries.rounds && i + t.wave < p.top_k ? job.selected[i + t.wave] : kNoToken;
    int32_t result = kPending;
    const bool is_plain = static_cast<uint32_t>(token) < static_cast<uint32_t>(job.token_limit) && token != job.newest;
    if (KVIO_RARELY(!is_plain || job.direct != nullptr)) result = other_result(env, p, job, i, token);
    w.result[t.own(r)] = result;
    if (result == kPending) w.home[t.own(r)] = insert_token(env, p, w, i, token);
  }
}

// The lowest of several entries with one token asks for it.
template <class Env>
KVIO_STEP void settle(Env& env, const ResolveParams& p, const Workspace& w, const Thread& t) {
  const Stretch entries = stretch_of(t, p.top_k);
  KVIO_ROLLED for (int32_t r = 0; r < entries.rounds; ++r) {
    const int32_t i = entries.first + r * t.wave;
    if (w.result[t.own(r)] == kPending) env.raise(&w.values[w.home[t.own(r)]], pending_of(i));
  }
}

// Slots that hold a selected token answer it, and stay.
template <class Env>
KVIO_STEP void mark(Env& env, const ResolveParams& p, const Workspace& w, const Job& job, const Thread& t,
                    const First& first) {
  const uint32_t mask = (1u << p.layout.hash_bits) - 1;
  const int32_t rounds = (p.hot_slots + t.count - 1) / t.count;
  const int32_t* tokens = job.tokens + t.number;
  const int32_t* locs = job.locs + t.number;
  int32_t next_token = first.token;
  int32_t next_loc = first.loc;
  int32_t bad = -1;
  KVIO_ROLLED for (int32_t r = 0; r < rounds; ++r) {
    const int32_t token = next_token;
    const int32_t loc = next_loc;
    tokens += t.count;
    locs += t.count;
    const bool has_next = t.own(r + 1) < p.hot_slots;
    next_token = has_next ? *tokens : kNoToken;
    next_loc = has_next ? *locs : 0;
    uint32_t home = home_of(p, token);
    int32_t key = w.keys[home];
    KVIO_ROLLED while (key != token && key != kNoToken) {
      home = (home + 1) & mask;
      key = w.keys[home];
    }
    const bool hit = key == token && token >= 0;
    const bool in_pool = static_cast<uint32_t>(loc) < p.device_slots;
    if (hit) w.values[home] = in_pool ? loc : -1;
    if (hit && !in_pool) bad = r;
    env.post_slots(w.slot_hits, t.own(r), hit);
  }
  if (KVIO_RARELY(bad >= 0)) env.note(SwapInArgument::kDeviceLocs, t.own(bad), job.locs[t.own(bad)]);
}

// Of a wave, or of all waves before it, or of all.
struct Tally {
  int32_t hits;  // slots that stay
  int32_t misses;
};

// Of a vote: how many lanes of the wave voted yes, and how many of those before this one.
struct Count {
  int32_t before;
  int32_t all;
};

// Which slots stay, which entries have to be loaded, and how many of each there are before them in their wave. Returns
// the wave's tally.
template <class Env>
KVIO_STEP Tally judge(Env& env, const ResolveParams& p, const Workspace& w, const Job& job, const Thread& t,
                      const First& first) {
  Tally tally{};
  const Stretch places = stretch_of(t, p.hot_slots);
  const int16_t* lru = job.lru + places.first;
  int32_t next = first.slot;
  int32_t bad = -1;
  KVIO_ROLLED for (int32_t r = 0; r < places.rounds; ++r) {
    const int32_t j = places.first + r * t.wave;
    const int32_t slot = next;
    lru += t.wave;
    next = r + 1 < places.rounds && j + t.wave < p.hot_slots ? *lru : 0;
    // A slot that is named wrongly stays as well: it is never given away.
    const bool is_slot = static_cast<uint32_t>(slot) < static_cast<uint32_t>(p.hot_slots);
    const int32_t known = is_slot ? slot : 0;
    const bool is_hit = (w.slot_hits[known >> 5] >> (known & 31) & 1) != 0;
    const bool vote = j < p.hot_slots && (is_hit || !is_slot);
    if (!is_slot) bad = r;
    const Count count = env.vote(Vote::kPlace, j, vote);
    const int32_t before = tally.hits + count.before;
    tally.hits += count.all;
    w.lru[t.own(r)] = static_cast<uint16_t>(slot);
    w.place_rank[t.own(r)] = static_cast<int16_t>(vote ? before : ~before);
  }
  if (KVIO_RARELY(bad >= 0)) {
    const int32_t j = places.first + bad * t.wave;
    env.note(SwapInArgument::kLru, j, job.lru[j]);
  }
  const Stretch entries = stretch_of(t, p.top_k);
  KVIO_ROLLED for (int32_t r = 0; r < entries.rounds; ++r) {
    const int32_t i = entries.first + r * t.wave;
    int16_t miss_rank = kNoMiss;
    if (w.result[t.own(r)] == kPending) {
      const int32_t value = w.values[w.home[t.own(r)]];
      if (value > kPending) {
        w.result[t.own(r)] = value;
      } else if (value == pending_of(i)) {
        // Only now, and for few: host locations lie far apart, and a load of them takes as long as 32 others.
        const int32_t token = job.selected[i];
        const int64_t host = host_loc_of(p, job, token);
        miss_rank = 0;
        if (KVIO_RARELY(static_cast<uint64_t>(host) >= static_cast<uint64_t>(p.host_slots))) {
          env.note(SwapInArgument::kHostLocs, token, host);
          miss_rank = kNoHostLoc;
        }
      }
    }
    const Count count = env.vote(Vote::kEntry, i, miss_rank == 0);
    w.miss_rank[t.own(r)] = miss_rank == 0 ? static_cast<int16_t>(tally.misses + count.before) : miss_rank;
    tally.misses += count.all;
  }
  return tally;
}

// The slots in their new order: those that left and were not taken, those that were taken, those that stayed; the
// answers that are known; and which entry misses as which. `before` is of the waves before this thread's.
KVIO_STEP void place(const ResolveParams& p, const Workspace& w, const Job& job, const Thread& t, const Tally& before,
                     const Tally& all) {
  const int32_t leaving = p.hot_slots - all.hits;
  const int32_t taken = all.misses < leaving ? all.misses : leaving;
  const Stretch places = stretch_of(t, p.hot_slots);
  KVIO_ROLLED for (int32_t r = 0; r < places.rounds; ++r) {
    const int32_t j = places.first + r * t.wave;
    if (j >= p.hot_slots) break;
    const int32_t rank = w.place_rank[t.own(r)];
    const uint16_t slot = w.lru[t.own(r)];
    int32_t to;
    if (rank >= 0) {
      to = leaving + before.hits + rank;
    } else {
      const int32_t turn = j - before.hits - ~rank;
      if (turn < taken) w.order[turn] = slot;
      to = turn < taken ? leaving - taken + turn : turn - taken;
    }
    if (job.records) job.lru[to] = static_cast<int16_t>(slot);
  }
  const Stretch entries = stretch_of(t, p.top_k);
  KVIO_ROLLED for (int32_t r = 0; r < entries.rounds; ++r) {
    const int32_t i = entries.first + r * t.wave;
    if (i >= p.top_k) break;
    const int32_t miss_rank = w.miss_rank[t.own(r)];
    if (miss_rank >= 0) {
      w.missing[before.misses + miss_rank] = static_cast<uint16_t>(i);
    } else if (job.records) {
      // Of a repeated token it comes later.
      job.out[i] = miss_rank == kNoHostLoc ? -1 : w.result[t.own(r)];
    }
  }
}

// Misses take the slots that leave, least recently used first. A slot whose own location is bad stays empty.
template <class Env>
KVIO_STEP void assign(Env& env, const ResolveParams& p, const Workspace& w, const Job& job, const Thread& t,
                      const Tally& all) {
  const int32_t leaving = p.hot_slots - all.hits;
  KVIO_ROLLED for (int32_t m = t.number; m < all.misses; m += t.count) {
    const int32_t i = w.missing[m];
    const int32_t token = job.selected[i];
    const int64_t host = host_loc_of(p, job, token);
    int32_t given = -1;
    int32_t loc = -1;
    // Fewer slots than misses only where lru_slots names some wrongly.
    if (m < leaving) {
      const uint16_t slot = w.order[m];
      given = job.locs[slot];
      loc = checked_loc(env, p, given, slot, SwapInArgument::kDeviceLocs);
      if (job.records) job.tokens[slot] = loc >= 0 ? token : kNoToken;
    }
    w.miss_src[m] = host;
    w.miss_dst[m] = loc;
    if (!job.records) continue;
    job.out[i] = loc;
    if (p.miss_count.data == nullptr) continue;
    row_of(p.miss_src, job.batch_row)[m] = host;
    row_of(p.miss_dst, job.batch_row)[m] = given;
  }
  if (t.number == 0 && job.records) record_misses(p, job.batch_row, all.misses);
}

// The two steps after it where tokens are repeated: who asked tells, and the others are told.
KVIO_STEP void tell(const ResolveParams& p, const Workspace& w, const Thread& t, const Tally& before) {
  const Stretch entries = stretch_of(t, p.top_k);
  KVIO_ROLLED for (int32_t r = 0; r < entries.rounds; ++r) {
    const int32_t miss_rank = w.miss_rank[t.own(r)];
    if (miss_rank == kNoMiss) continue;
    const int32_t result = miss_rank >= 0 ? w.miss_dst[before.misses + miss_rank] : -1;
    w.values[w.home[t.own(r)]] = result;
    w.result[t.own(r)] = result;
  }
}
KVIO_STEP void repeat(const ResolveParams& p, const Workspace& w, const Job& job, const Thread& t) {
  const Stretch entries = stretch_of(t, p.top_k);
  KVIO_ROLLED for (int32_t r = 0; r < entries.rounds; ++r) {
    const int32_t i = entries.first + r * t.wave;
    if (w.result[t.own(r)] == kPending) job.out[i] = w.values[w.home[t.own(r)]];
  }
}

}  // namespace kvio::gpu
