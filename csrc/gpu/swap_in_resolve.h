// What the threads of one request of kvio::swap_in do: those of a CTA, or of a cluster of CTAs. Steps that every thread
// takes between two barriers. A step reads nothing that another thread writes in it, except through Env, so the outcome
// depends on no order of threads: tests/native runs the same source with its threads in any order.
//
// Steps: begin, clear -> | insert -> | settle if *w.repeated | -> mark -> | judge -> rank, sum -> | place -> | assign
// -> | tell -> | repeat if *w.repeated, with a barrier at every bar, and in the sum over all waves. Between judge and
// rank a wave votes. `Env` has the atomic operations and the votes, and takes faults; compiled for a GPU or a CPU.
//
// `Memory` says where the arrays of a cluster are: the table is cut over its CTAs, what many read is kept in each.
//
// A step is short, since one SM runs 1,024 threads of a request: an instruction costs 8 cycles.
#pragma once

#include <cstdint>

#include "request/swap_in_request.h"

#if defined(__CUDACC__) || defined(__HIP__)
#define KVIO_STEP __device__ __forceinline__
#define KVIO_UNROLL _Pragma("unroll")
#define KVIO_ROLLED _Pragma("unroll 1")
#else
#define KVIO_STEP inline
#define KVIO_UNROLL
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
  int32_t hash_bits;  // of the whole table
  int32_t keys;
  int32_t values;
  int32_t slot_hits;
  int32_t order;
  int32_t miss_src;
  int32_t miss_dst;
  int32_t repeated;
  int32_t lru;
  int32_t place_rank;
  int32_t result;
  int32_t miss_rank;
  int32_t bytes;
};

// A CTA's memory, shared or not.
struct Workspace {
  // Cut over the CTAs.
  int32_t* keys;    // [hash] token, kNoToken for none
  int32_t* values;  // [hash] its device location, -1 for none that may be given out; pending_of an entry until known
  // In each CTA.
  uint32_t* slot_hits;  // a bit for each slot, up to whole rounds: it holds a selected token
  uint16_t* order;      // [at most top_k] slots that misses take, by miss
  int64_t* miss_src;    // [top_k] host location of each miss
  int32_t* miss_dst;    // [top_k] device location of each miss, -1 for one that is not copied
  int32_t* repeated;    // not 0: a token is selected twice
  // A thread's own, of the rounds that Mine has no room for.
  uint16_t* lru;
  int16_t* place_rank;
  int32_t* result;
  int16_t* miss_rank;
};

// A request's threads: `ranks` CTAs of `threads`, each of which keeps so many rounds of slots and of entries in Mine.
struct Team {
  int32_t ranks;
  int32_t threads;
  int32_t slot_rounds;
  int32_t entry_rounds;
};

// A table eight times as large as the selection where that is no more than `most_bytes` in all, else four or two times:
// shorter searches or, at least, a table that fits.
inline WorkspaceLayout lay_out_workspace(int64_t top_k, int64_t hot_slots, const Team& team, int64_t most_bytes) {
  WorkspaceLayout layout{};
  const int64_t all_threads = int64_t{team.ranks} * team.threads;
  const auto later = [&](int64_t total, int64_t kept) {
    const int64_t rounds = (total + all_threads - 1) / all_threads;
    return rounds > kept ? (rounds - kept) * team.threads : 0;
  };
  for (const int64_t times : {8, 4, 2}) {
    layout.hash_bits = hash_bits_for(top_k, times);
    int32_t end = 0;
    const auto take = [&end](int64_t bytes) {
      const int32_t at = end;
      end += static_cast<int32_t>((bytes + 15) / 16 * 16);
      return at;
    };
    const int64_t hash = (int64_t{1} << layout.hash_bits) / team.ranks;
    const int64_t slots_at_once = all_threads * team.slot_rounds;
    layout.keys = take(4 * hash);
    layout.values = take(4 * hash);
    layout.slot_hits = take((hot_slots + slots_at_once - 1) / slots_at_once * ((slots_at_once + 63) / 64 * 8));
    layout.order = take(2 * (top_k < hot_slots ? top_k : hot_slots));
    layout.miss_src = take(8 * top_k);
    layout.miss_dst = take(4 * top_k);
    layout.repeated = take(4);
    layout.lru = take(2 * later(hot_slots, team.slot_rounds));
    layout.place_rank = take(2 * later(hot_slots, team.slot_rounds));
    layout.result = take(4 * later(top_k, team.entry_rounds));
    layout.miss_rank = take(2 * later(top_k, team.entry_rounds));
    layout.bytes = end;
    if (layout.bytes <= most_bytes) break;
  }
  return layout;
}

KVIO_STEP Workspace workspace_at(char* base, const WorkspaceLayout& at) {
  Workspace w;
  w.keys = reinterpret_cast<int32_t*>(base + at.keys);
  w.values = reinterpret_cast<int32_t*>(base + at.values);
  w.slot_hits = reinterpret_cast<uint32_t*>(base + at.slot_hits);
  w.order = reinterpret_cast<uint16_t*>(base + at.order);
  w.miss_src = reinterpret_cast<int64_t*>(base + at.miss_src);
  w.miss_dst = reinterpret_cast<int32_t*>(base + at.miss_dst);
  w.repeated = reinterpret_cast<int32_t*>(base + at.repeated);
  w.lru = reinterpret_cast<uint16_t*>(base + at.lru);
  w.place_rank = reinterpret_cast<int16_t*>(base + at.place_rank);
  w.result = reinterpret_cast<int32_t*>(base + at.result);
  w.miss_rank = reinterpret_cast<int16_t*>(base + at.miss_rank);
  return w;
}

// The memory of one CTA that has the request for itself.
struct LocalMemory {
  KVIO_STEP constexpr int32_t ranks() const { return 1; }
  template <class T>
  KVIO_STEP T* in_table(T* table, uint32_t at) const {
    return table + at;
  }
  template <class T>
  KVIO_STEP T* of_rank(T* array, int32_t) const {
    return array;
  }
};

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
  const int32_t* selected;
  int32_t* out;
  int32_t* tokens;
  const int32_t* locs;
  int16_t* lru;
  const int32_t* direct;  // row of device_locs, null without
};

KVIO_STEP Job make_job(const ResolveParams& p, int32_t batch_row, uint32_t request, int64_t seq_len) {
  constexpr int64_t kMost = 0x7fffffff;
  // Where the token names its slot, host locations are not looked at.
  const bool is_direct = seq_len <= p.hot_slots && p.device_locs.data == nullptr;
  const int64_t limit = seq_len < p.max_len || is_direct ? seq_len : p.max_len;
  Job job;
  job.batch_row = batch_row;
  job.token_limit = static_cast<int32_t>(limit < kMost ? limit : kMost);
  job.newest = seq_len <= kMost ? static_cast<int32_t>(seq_len) - 1 : kNoToken;
  job.request = request;
  job.selected = row_of(p.top_k_tokens, batch_row);
  job.out = row_of(p.top_k_device_locs, batch_row);
  job.tokens = row_of(p.device_buffer_tokens, request);
  job.locs = row_of(p.device_buffer_locs, request);
  job.lru = row_of(p.lru_slots, request);
  job.direct = p.device_locs.data != nullptr ? row_of(p.device_locs, request) : nullptr;
  return job;
}

// A thread among those of its request, whose waves of `wave` threads vote together.
struct Thread {
  int32_t number;
  int32_t count;
  int32_t wave;
  int32_t in_cta;  // its number in its CTA
  int32_t cta;     // threads of that

  // Where this thread has what it keeps of round r, beyond the `kept` first ones.
  KVIO_STEP int32_t later(int32_t r, int32_t kept) const { return (r - kept) * cta + in_cta; }
};

constexpr int32_t kNoMiss = -1;     // of an entry that need not be loaded, or is by another one
constexpr int32_t kNoHostLoc = -2;  // of one that should be, but from no location of the pool

// A host location as it was read; 32 bits are not widened before they are used, since that would wait for them.
struct RawLoc {
  uint32_t low;
  uint32_t high;
};

// What a thread keeps of its first rounds, and has under way together while it waits.
template <int32_t kSlots, int32_t kEntries>
struct Mine {
  static constexpr int32_t kSlotRounds = kSlots;
  static constexpr int32_t kEntryRounds = kEntries;

  int32_t token[kEntryRounds];
  RawLoc host[kEntryRounds];
  int32_t result[kEntryRounds];     // kPending for an entry whose token is looked for
  uint32_t home[kEntryRounds];      // where in the table that is
  int32_t miss_rank[kEntryRounds];  // misses before this one in its wave, kNoMiss, or kNoHostLoc
  int32_t slot_token[kSlotRounds];
  int32_t slot_loc[kSlotRounds];
  uint16_t lru[kSlotRounds];
  int32_t place_rank[kSlotRounds];  // of a place whose slot stays: those that stay before it in its wave; else ~ of it
};

// Where order counts, a wave takes a stretch of whole waves, round by round: thread t's thing in round r is
// first_of(t) + r * wave.
struct Stretch {
  int32_t rounds;
  int32_t first;  // of this thread
};
KVIO_STEP Stretch stretch_of(const Thread& t, int32_t total) {
  const int32_t rounds = (total + t.count - 1) / t.count;
  const int32_t lane = t.number & (t.wave - 1);
  return {rounds, (t.number - lane) * rounds + lane};
}

KVIO_STEP RawLoc raw_host_loc(const ResolveParams& p, const Job& job, int32_t token) {
  const uint32_t* at = row_of(p.host_cache_locs, job.request) + (int64_t{token} << (p.host_is_int64 ? 1 : 0));
  RawLoc loc{at[0], 0};
  if (p.host_is_int64) loc.high = at[1];
  return loc;
}
KVIO_STEP int64_t host_loc_of(const ResolveParams& p, const RawLoc& loc) {
  if (!p.host_is_int64) return static_cast<int32_t>(loc.low);
  return static_cast<int64_t>(uint64_t{loc.high} << 32 | loc.low);
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

// What the first loads need no request for: the tokens of this thread's entries.
template <class M>
KVIO_STEP void begin(const ResolveParams& p, int32_t batch_row, const Thread& t, M* mine) {
  const int32_t* selected = row_of(p.top_k_tokens, batch_row);
  const Stretch entries = stretch_of(t, p.top_k);
  KVIO_UNROLL for (int32_t r = 0; r < M::kEntryRounds; ++r) {
    const int32_t i = entries.first + r * t.wave;
    mine->token[r] = r < entries.rounds && i < p.top_k ? selected[i] : kNoToken;
  }
}

struct alignas(16) Quad {
  int32_t words[4];
};

// The table of this thread's CTA.
KVIO_STEP void clear(const ResolveParams& p, const Workspace& w, const Thread& t) {
  Quad* keys = reinterpret_cast<Quad*>(w.keys);
  const int32_t quads = (1 << (p.layout.hash_bits - 2)) / (t.count / t.cta);
  KVIO_ROLLED for (int32_t h = t.in_cta; h < quads; h += t.cta) {
    keys[h] = {{kNoToken, kNoToken, kNoToken, kNoToken}};
  }
  if (t.in_cta == 0) *w.repeated = 0;
}

// Where the search for a token begins: four keys. A token is in the first free place from there on, so that four whose
// last is free end a search.
KVIO_STEP uint32_t quad_of(const ResolveParams& p, int32_t token) {
  return static_cast<uint32_t>(token) * 2654435761u >> (34 - p.layout.hash_bits) << 2;
}

// Which of the four keys at `home` is `token`, 4 for none; `last` is the last of them.
template <class Memory>
KVIO_STEP uint32_t find_in_quad(const Memory& memory, const Workspace& w, uint32_t home, int32_t token, int32_t* last) {
  const Quad quad = *reinterpret_cast<const Quad*>(memory.in_table(w.keys, home));
  uint32_t which = 4;
  KVIO_UNROLL for (uint32_t k = 0; k < 4; ++k) which = quad.words[k] == token ? k : which;
  *last = quad.words[3];
  return which;
}

// Where in the table `token` is; it is there.
template <class Memory>
KVIO_STEP uint32_t home_of(const Memory& memory, const ResolveParams& p, const Workspace& w, int32_t token) {
  const uint32_t mask = (1u << p.layout.hash_bits) - 1;
  uint32_t h = quad_of(p, token);
  KVIO_ROLLED while (*memory.in_table(w.keys, h) != token) h = (h + 1) & mask;
  return h;
}

// What is known of entry i without looking at the hot buffer: its result, or kPending.
template <class Env>
KVIO_STEP int32_t known_result(Env& env, const ResolveParams& p, const Job& job, int32_t i, int32_t token) {
  if (token < 0) return -1;
  if (KVIO_RARELY(token >= job.token_limit)) {
    env.note(SwapInArgument::kTopK, i, token);
    return -1;
  }
  if (job.direct != nullptr) {
    const int32_t loc = job.direct[token];
    if (loc >= 0) return checked_loc(env, p, loc, token, SwapInArgument::kDirectLocs);
  }
  if (KVIO_RARELY(token == job.newest)) {
    return checked_loc(env, p, job.locs[p.hot_slots], p.hot_slots, SwapInArgument::kDeviceLocs);
  }
  return kPending;
}

// Puts the token of entry i into the table; returns where.
template <class Env, class Memory>
KVIO_STEP uint32_t insert_token(Env& env, const Memory& memory, const ResolveParams& p, const Workspace& w, int32_t i,
                                int32_t token) {
  const uint32_t mask = (1u << p.layout.hash_bits) - 1;
  uint32_t home = quad_of(p, token);
  KVIO_ROLLED while (true) {
    const int32_t before = env.claim(memory.in_table(w.keys, home), kNoToken, token);
    if (before == kNoToken) {
      *memory.in_table(w.values, home) = pending_of(i);
      return home;
    }
    if (KVIO_RARELY(before == token)) {
      for (int32_t q = 0; q < memory.ranks(); ++q) *memory.of_rank(w.repeated, q) = 1;
      return home;
    }
    home = (home + 1) & mask;
  }
}

// Has the state under way, of the first rounds.
template <class M>
KVIO_STEP void fetch(const ResolveParams& p, const Job& job, const Thread& t, M* mine) {
  const Stretch places = stretch_of(t, p.hot_slots);
  KVIO_UNROLL for (int32_t r = 0; r < M::kSlotRounds; ++r) {
    const int32_t s = t.number + r * t.count;
    const int32_t j = places.first + r * t.wave;
    mine->slot_token[r] = s < p.hot_slots ? job.tokens[s] : kNoToken;
    mine->slot_loc[r] = s < p.hot_slots ? job.locs[s] : 0;
    mine->lru[r] = r < places.rounds && j < p.hot_slots ? static_cast<uint16_t>(job.lru[j]) : 0;
  }
}

// Puts tokens into the table.
template <class M, class Env, class Memory>
KVIO_STEP void insert(Env& env, const Memory& memory, const ResolveParams& p, const Workspace& w, const Job& job,
                      const Thread& t, M* mine) {
  const Stretch entries = stretch_of(t, p.top_k);
  KVIO_UNROLL for (int32_t r = 0; r < M::kEntryRounds; ++r) {
    const int32_t i = entries.first + r * t.wave;
    mine->result[r] = known_result(env, p, job, i, mine->token[r]);
    mine->home[r] = 0;
    if (mine->result[r] == kPending) mine->home[r] = insert_token(env, memory, p, w, i, mine->token[r]);
  }
  KVIO_ROLLED for (int32_t r = M::kEntryRounds; r < entries.rounds; ++r) {
    const int32_t i = entries.first + r * t.wave;
    if (i >= p.top_k) break;
    const int32_t token = job.selected[i];
    const int32_t result = known_result(env, p, job, i, token);
    w.result[t.later(r, M::kEntryRounds)] = result;
    if (result == kPending) insert_token(env, memory, p, w, i, token);
  }
}

// Calls `entry(i, home)` for every entry of the thread that is in the table.
template <class M, class Memory, class Entry>
KVIO_STEP void for_each_in_table(const Memory& memory, const ResolveParams& p, const Workspace& w, const Job& job,
                                 const Thread& t, const M& mine, const Entry& entry) {
  const Stretch entries = stretch_of(t, p.top_k);
  KVIO_UNROLL for (int32_t r = 0; r < M::kEntryRounds; ++r) {
    if (mine.result[r] == kPending) entry(entries.first + r * t.wave, mine.home[r]);
  }
  KVIO_ROLLED for (int32_t r = M::kEntryRounds; r < entries.rounds; ++r) {
    const int32_t i = entries.first + r * t.wave;
    if (i < p.top_k && w.result[t.later(r, M::kEntryRounds)] == kPending) {
      entry(i, home_of(memory, p, w, job.selected[i]));
    }
  }
}

// The lowest of several entries with one token asks for it.
template <class M, class Env, class Memory>
KVIO_STEP void settle(Env& env, const Memory& memory, const ResolveParams& p, const Workspace& w, const Job& job,
                      const Thread& t, const M& mine) {
  for_each_in_table(memory, p, w, job, t, mine,
                    [&](int32_t i, uint32_t home) { env.raise(memory.in_table(w.values, home), pending_of(i)); });
}

// Slots that hold a selected token answer it, and stay.
template <class M, class Env, class Memory>
KVIO_STEP void mark(Env& env, const Memory& memory, const ResolveParams& p, const Workspace& w, const Job& job,
                    const Thread& t, const M& mine) {
  const uint32_t mask = (1u << p.layout.hash_bits) - 1;
  int32_t token[M::kSlotRounds];
  int32_t loc[M::kSlotRounds];
  KVIO_UNROLL for (int32_t r = 0; r < M::kSlotRounds; ++r) {
    token[r] = mine.slot_token[r];
    loc[r] = mine.slot_loc[r];
  }
  int32_t base = t.number;
  while (true) {
    uint32_t home[M::kSlotRounds];
    uint32_t which[M::kSlotRounds];
    int32_t last[M::kSlotRounds];
    bool go_on = false;
    KVIO_UNROLL for (int32_t r = 0; r < M::kSlotRounds; ++r) {
      home[r] = quad_of(p, token[r]);
      which[r] = find_in_quad(memory, w, home[r], token[r], &last[r]);
    }
    KVIO_UNROLL for (int32_t r = 0; r < M::kSlotRounds; ++r) go_on = go_on || (which[r] == 4 && last[r] != kNoToken);
    if (KVIO_RARELY(go_on)) {
      KVIO_UNROLL for (int32_t r = 0; r < M::kSlotRounds; ++r) {
        KVIO_ROLLED while (which[r] == 4 && last[r] != kNoToken) {
          home[r] = (home[r] + 4) & mask;
          which[r] = find_in_quad(memory, w, home[r], token[r], &last[r]);
        }
      }
    }
    bool is_bad = false;
    KVIO_UNROLL for (int32_t r = 0; r < M::kSlotRounds; ++r) {
      const bool hit = which[r] != 4 && token[r] >= 0;
      const bool in_pool = static_cast<uint32_t>(loc[r]) < p.device_slots;
      if (hit) *memory.in_table(w.values, home[r] + which[r]) = in_pool ? loc[r] : -1;
      is_bad = is_bad || (hit && !in_pool);
      env.post_slots(memory, w.slot_hits, base + r * t.count, hit);
    }
    if (KVIO_RARELY(is_bad)) {
      KVIO_UNROLL for (int32_t r = 0; r < M::kSlotRounds; ++r) {
        if (which[r] == 4 || token[r] < 0 || static_cast<uint32_t>(loc[r]) < p.device_slots) continue;
        env.note(SwapInArgument::kDeviceLocs, base + r * t.count, loc[r]);
      }
    }
    base += M::kSlotRounds * t.count;
    if (base - t.number >= p.hot_slots) break;
    KVIO_UNROLL for (int32_t r = 0; r < M::kSlotRounds; ++r) {
      const int32_t s = base + r * t.count;
      token[r] = s < p.hot_slots ? job.tokens[s] : kNoToken;
      loc[r] = s < p.hot_slots ? job.locs[s] : 0;
    }
  }
}

// Whether a slot stays, for one that there is.
KVIO_STEP bool stays(const ResolveParams& p, const Workspace& w, uint16_t slot) {
  const int32_t known = slot < p.hot_slots ? slot : p.hot_slots - 1;
  return (w.slot_hits[known >> 5] >> (known & 31) & 1) != 0;
}

// Whether entry i, whose token is in the table, asks for it because no slot holds it; else `result` is set where it is
// known.
template <class Memory>
KVIO_STEP bool asks(const Memory& memory, const Workspace& w, int32_t i, uint32_t home, int32_t* result) {
  const int32_t value = *memory.in_table(w.values, home);
  if (value > kPending) *result = value;
  return value == pending_of(i);
}

// The vote of an entry that asks: 1, or kNoHostLoc and its result is known.
template <class Env>
KVIO_STEP int32_t vote_of(Env& env, const ResolveParams& p, int32_t token, int64_t host, int32_t* result) {
  if (KVIO_RARELY(static_cast<uint64_t>(host) >= static_cast<uint64_t>(p.host_slots))) {
    env.note(SwapInArgument::kHostLocs, token, host);
    *result = -1;
    return kNoHostLoc;
  }
  return 1;
}

// What this thread votes, 0 or 1, in place_rank and miss_rank; and results. A token's host location is read again
// later beyond the first rounds.
template <class M, class Env, class Memory>
KVIO_STEP void judge(Env& env, const Memory& memory, const ResolveParams& p, const Workspace& w, const Job& job,
                     const Thread& t, M* mine) {
  const Stretch places = stretch_of(t, p.hot_slots);
  // A slot that is named wrongly stays as well: it is never given away.
  bool is_bad = false;
  KVIO_UNROLL for (int32_t r = 0; r < M::kSlotRounds; ++r) {
    const int32_t j = places.first + r * t.wave;
    const bool is_place = r < places.rounds && j < p.hot_slots;
    const bool bad = mine->lru[r] >= p.hot_slots;
    is_bad = is_bad || (is_place && bad);
    mine->place_rank[r] = is_place && (bad || stays(p, w, mine->lru[r]));
    if (r < places.rounds) env.post(Vote::kPlace, j, mine->place_rank[r] != 0);
  }
  if (KVIO_RARELY(is_bad)) {
    KVIO_UNROLL for (int32_t r = 0; r < M::kSlotRounds; ++r) {
      const int32_t j = places.first + r * t.wave;
      if (r >= places.rounds || j >= p.hot_slots || mine->lru[r] < p.hot_slots) continue;
      env.note(SwapInArgument::kLru, j, static_cast<int16_t>(mine->lru[r]));
    }
  }
  KVIO_ROLLED for (int32_t r = M::kSlotRounds; r < places.rounds; ++r) {
    const int32_t j = places.first + r * t.wave;
    bool vote = false;
    if (j < p.hot_slots) {
      const uint16_t slot = static_cast<uint16_t>(job.lru[j]);
      if (KVIO_RARELY(slot >= p.hot_slots)) env.note(SwapInArgument::kLru, j, static_cast<int16_t>(slot));
      vote = slot >= p.hot_slots || stays(p, w, slot);
      w.lru[t.later(r, M::kSlotRounds)] = slot;
      w.place_rank[t.later(r, M::kSlotRounds)] = vote;
    }
    env.post(Vote::kPlace, j, vote);
  }
  const Stretch entries = stretch_of(t, p.top_k);
  // Only now, and for few: host locations lie far apart, and a load of them takes as long as 32 others.
  bool is_asking[M::kEntryRounds];
  KVIO_UNROLL for (int32_t r = 0; r < M::kEntryRounds; ++r) {
    const int32_t i = entries.first + r * t.wave;
    is_asking[r] = mine->result[r] == kPending && asks(memory, w, i, mine->home[r], &mine->result[r]);
    if (is_asking[r]) mine->host[r] = raw_host_loc(p, job, mine->token[r]);
  }
  KVIO_UNROLL for (int32_t r = 0; r < M::kEntryRounds; ++r) {
    mine->miss_rank[r] = 0;
    if (is_asking[r]) {
      mine->miss_rank[r] = vote_of(env, p, mine->token[r], host_loc_of(p, mine->host[r]), &mine->result[r]);
    }
    if (r < entries.rounds) env.post(Vote::kEntry, entries.first + r * t.wave, mine->miss_rank[r] == 1);
  }
  KVIO_ROLLED for (int32_t r = M::kEntryRounds; r < entries.rounds; ++r) {
    const int32_t i = entries.first + r * t.wave;
    int32_t vote = 0;
    if (i < p.top_k) {
      int32_t result = w.result[t.later(r, M::kEntryRounds)];
      const int32_t token = job.selected[i];
      if (result == kPending && asks(memory, w, i, home_of(memory, p, w, token), &result)) {
        vote = vote_of(env, p, token, host_loc_of(p, raw_host_loc(p, job, token)), &result);
      }
      w.result[t.later(r, M::kEntryRounds)] = result;
      w.miss_rank[t.later(r, M::kEntryRounds)] = static_cast<int16_t>(vote);
    }
    env.post(Vote::kEntry, i, vote == 1);
  }
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

// Counts the votes; returns the wave's.
template <class M, class Env>
KVIO_STEP Tally rank(Env& env, const ResolveParams& p, const Workspace& w, const Thread& t, M* mine) {
  Tally tally{};
  const auto count_place = [&](int32_t j, bool vote) {
    const Count count = env.count(Vote::kPlace, j, vote);
    const int32_t before = tally.hits + count.before;
    tally.hits += count.all;
    return vote ? before : ~before;
  };
  const Stretch places = stretch_of(t, p.hot_slots);
  KVIO_UNROLL for (int32_t r = 0; r < M::kSlotRounds; ++r) {
    if (r < places.rounds) {
      mine->place_rank[r] = count_place(places.first + r * t.wave, mine->place_rank[r] != 0);
    }
  }
  KVIO_ROLLED for (int32_t r = M::kSlotRounds; r < places.rounds; ++r) {
    const int32_t j = places.first + r * t.wave;
    int16_t& rank_here = w.place_rank[t.later(r, M::kSlotRounds)];
    const int32_t counted = count_place(j, j < p.hot_slots && rank_here != 0);
    if (j < p.hot_slots) rank_here = static_cast<int16_t>(counted);
  }
  const auto count_entry = [&](int32_t i, int32_t vote) {
    const Count count = env.count(Vote::kEntry, i, vote == 1);
    const int32_t before = tally.misses + count.before;
    tally.misses += count.all;
    return vote == 1 ? before : vote == 0 ? kNoMiss : kNoHostLoc;
  };
  const Stretch entries = stretch_of(t, p.top_k);
  KVIO_UNROLL for (int32_t r = 0; r < M::kEntryRounds; ++r) {
    const int32_t vote = mine->miss_rank[r];
    mine->miss_rank[r] = r < entries.rounds ? count_entry(entries.first + r * t.wave, vote) : kNoMiss;
  }
  KVIO_ROLLED for (int32_t r = M::kEntryRounds; r < entries.rounds; ++r) {
    const int32_t i = entries.first + r * t.wave;
    int16_t& rank_here = w.miss_rank[t.later(r, M::kEntryRounds)];
    const int32_t counted = count_entry(i, i < p.top_k ? rank_here : 0);
    if (i < p.top_k) rank_here = static_cast<int16_t>(counted);
  }
  return tally;
}

// The slots in their new order: those that left and were not taken, those that were taken, those that stayed. `before`
// is of the waves before this thread's.
template <class M, class Memory>
KVIO_STEP void place(const Memory& memory, const ResolveParams& p, const Workspace& w, const Job& job, const Thread& t,
                     const M& mine, const Tally& before, const Tally& all) {
  const int32_t leaving = p.hot_slots - all.hits;
  const int32_t taken = all.misses < leaving ? all.misses : leaving;
  const auto put = [&](int32_t j, int32_t rank, uint16_t slot) {
    int32_t to;
    if (rank >= 0) {
      to = leaving + before.hits + rank;
    } else {
      const int32_t turn = j - before.hits - ~rank;
      if (turn < taken) {
        for (int32_t q = 0; q < memory.ranks(); ++q) memory.of_rank(w.order, q)[turn] = slot;
      }
      to = turn < taken ? leaving - taken + turn : turn - taken;
    }
    job.lru[to] = static_cast<int16_t>(slot);
  };
  const Stretch places = stretch_of(t, p.hot_slots);
  KVIO_UNROLL for (int32_t r = 0; r < M::kSlotRounds; ++r) {
    const int32_t j = places.first + r * t.wave;
    if (r < places.rounds && j < p.hot_slots) put(j, mine.place_rank[r], mine.lru[r]);
  }
  KVIO_ROLLED for (int32_t r = M::kSlotRounds; r < places.rounds; ++r) {
    const int32_t j = places.first + r * t.wave;
    const int32_t at = t.later(r, M::kSlotRounds);
    if (j < p.hot_slots) put(j, w.place_rank[at], w.lru[at]);
  }
}

// A miss that takes the slot, or none, that is its turn's.
struct Taken {
  int32_t slot;   // -1 for none
  int32_t given;  // its location
};

KVIO_STEP int32_t slot_taken(const Workspace& w, int32_t miss, int32_t leaving) {
  // Fewer slots than misses only where lru_slots names some wrongly.
  return miss < leaving ? w.order[miss] : -1;
}

// Records a miss; returns its location. A slot whose own location is bad stays empty.
template <class Env, class Memory>
KVIO_STEP int32_t take(Env& env, const Memory& memory, const ResolveParams& p, const Workspace& w, const Job& job,
                       int32_t miss, const Taken& taken, int32_t token, int64_t host) {
  int32_t loc = -1;
  if (taken.slot >= 0) {
    loc = checked_loc(env, p, taken.given, taken.slot, SwapInArgument::kDeviceLocs);
    job.tokens[taken.slot] = loc >= 0 ? token : kNoToken;
  }
  for (int32_t q = 0; q < memory.ranks(); ++q) {
    memory.of_rank(w.miss_src, q)[miss] = host;
    memory.of_rank(w.miss_dst, q)[miss] = loc;
  }
  if (p.miss_count.data != nullptr) {
    row_of(p.miss_src, job.batch_row)[miss] = host;
    row_of(p.miss_dst, job.batch_row)[miss] = taken.given;
  }
  return loc;
}

// The answers. Misses take the slots that leave, least recently used first.
template <class M, class Env, class Memory>
KVIO_STEP void assign(Env& env, const Memory& memory, const ResolveParams& p, const Workspace& w, const Job& job,
                      const Thread& t, M* mine, const Tally& before, const Tally& all) {
  const int32_t leaving = p.hot_slots - all.hits;
  const Stretch entries = stretch_of(t, p.top_k);
  Taken taken[M::kEntryRounds];
  KVIO_UNROLL for (int32_t r = 0; r < M::kEntryRounds; ++r) {
    taken[r] = {-1, -1};
    if (mine->miss_rank[r] >= 0) taken[r].slot = slot_taken(w, before.misses + mine->miss_rank[r], leaving);
    if (taken[r].slot >= 0) taken[r].given = job.locs[taken[r].slot];
  }
  KVIO_UNROLL for (int32_t r = 0; r < M::kEntryRounds; ++r) {
    const int32_t i = entries.first + r * t.wave;
    if (mine->miss_rank[r] >= 0) {
      mine->result[r] = take(env, memory, p, w, job, before.misses + mine->miss_rank[r], taken[r], mine->token[r],
                             host_loc_of(p, mine->host[r]));
    }
    if (r < entries.rounds && i < p.top_k) job.out[i] = mine->result[r];
  }
  KVIO_ROLLED for (int32_t r = M::kEntryRounds; r < entries.rounds; ++r) {
    const int32_t i = entries.first + r * t.wave;
    if (i >= p.top_k) break;
    const int32_t miss_rank = w.miss_rank[t.later(r, M::kEntryRounds)];
    int32_t& result = w.result[t.later(r, M::kEntryRounds)];
    if (miss_rank >= 0) {
      const int32_t miss = before.misses + miss_rank;
      const int32_t token = job.selected[i];
      Taken one{slot_taken(w, miss, leaving), -1};
      if (one.slot >= 0) one.given = job.locs[one.slot];
      result = take(env, memory, p, w, job, miss, one, token, host_loc_of(p, raw_host_loc(p, job, token)));
    }
    job.out[i] = result;
  }
  if (t.number == 0) record_misses(p, job.batch_row, all.misses);
}

// The two steps after it where tokens are repeated: who asked tells, and the others are told.
template <class M, class Memory>
KVIO_STEP void tell(const Memory& memory, const ResolveParams& p, const Workspace& w, const Job& job, const Thread& t,
                    const M& mine) {
  const Stretch entries = stretch_of(t, p.top_k);
  KVIO_UNROLL for (int32_t r = 0; r < M::kEntryRounds; ++r) {
    if (mine.miss_rank[r] != kNoMiss) *memory.in_table(w.values, mine.home[r]) = mine.result[r];
  }
  KVIO_ROLLED for (int32_t r = M::kEntryRounds; r < entries.rounds; ++r) {
    const int32_t i = entries.first + r * t.wave;
    const int32_t at = t.later(r, M::kEntryRounds);
    if (i >= p.top_k || w.miss_rank[at] == kNoMiss) continue;
    *memory.in_table(w.values, home_of(memory, p, w, job.selected[i])) = w.result[at];
  }
}
template <class M, class Memory>
KVIO_STEP void repeat(const Memory& memory, const ResolveParams& p, const Workspace& w, const Job& job, const Thread& t,
                      const M& mine) {
  for_each_in_table(memory, p, w, job, t, mine,
                    [&](int32_t i, uint32_t home) { job.out[i] = *memory.in_table(w.values, home); });
}

}  // namespace kvio::gpu
