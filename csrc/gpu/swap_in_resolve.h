// What one CTA does for one request of kvio::swap_in, as steps that every thread takes between two barriers. A step
// reads nothing that another thread writes in it, except through Env's atomic operations, so the outcome depends on no
// order of threads: tests/native runs the same source with its threads in any order.
//
// Steps: select, clear -> | fetch, insert -> | mark -> | vote, sum -> | place -> | assign -> | repeat, with a barrier
// at every bar, and in the sum over all waves; `repeat` only where a token was selected twice. `Env` has the atomic
// operations and takes faults; compiled for a GPU or a CPU.
#pragma once

#include <cstdint>

#include "request/swap_in_request.h"

#if defined(__CUDACC__) || defined(__HIP__)
#define KVIO_STEP __device__ __forceinline__
#define KVIO_UNROLL _Pragma("unroll")
#else
#define KVIO_STEP inline
#define KVIO_UNROLL
#endif

namespace kvio::gpu {

// Which argument a fault is about, counted from FaultOp::kSwapIn as in request/fault_subject.cpp.
enum class SwapInArgument : int32_t { kTopK, kHostLocs, kDeviceLocs, kLru, kRequest, kDirectLocs };

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
  int32_t first;
  int32_t host;
  int32_t tokens;
  int32_t result;
  int32_t home;
  int32_t lru;
  int32_t order;
  int32_t missing;
  int32_t miss_dst;
  int32_t slot_hits;
  int32_t lru_hits;
  int32_t misses;
  int32_t repeated;
  int32_t bytes;
};

// A CTA's memory, shared or not.
struct Workspace {
  int32_t* keys;        // [hash] token, kNoToken for none
  int32_t* first;       // [hash] lowest entry that selects it
  int64_t* host;        // [top_k] host location of an entry that may have to be loaded
  int32_t* tokens;      // [top_k] token of an entry that is looked for, kNoToken for others
  int32_t* result;      // [top_k] device location, kPending while it is not known
  int32_t* home;        // [top_k] where in the table the token is
  uint16_t* lru;        // [hot_slots] slots as given
  uint16_t* order;      // [at most top_k] slots that misses take, by miss
  uint16_t* missing;    // [top_k] entry of each miss
  int32_t* miss_dst;    // [top_k] device location of each miss, -1 for one that is not copied
  uint32_t* slot_hits;  // a bit for each slot: it holds a selected token
  uint32_t* lru_hits;   // a bit for each place in lru: its slot stays
  uint32_t* misses;     // a bit for each entry: it has to be loaded
  int32_t* repeated;    // not 0: a token is selected twice
};

KVIO_STEP int32_t count_bits(uint32_t word) {
#if defined(__CUDACC__)
  return __popc(word);
#else
  return __builtin_popcount(word);
#endif
}

constexpr int32_t kNoToken = -1;
constexpr int32_t kPending = -2;
constexpr int32_t kNoEntry = 0x7fffffff;

// A table four times as large as the selection where that is no more than `most_bytes` in all, else twice: shorter
// searches or, at least, a table that fits.
inline WorkspaceLayout lay_out_workspace(int64_t top_k, int64_t hot_slots, int64_t most_bytes) {
  WorkspaceLayout layout{};
  for (const int64_t times : {4, 2}) {
    layout.hash_bits = hash_bits_for(top_k, times);
    int32_t end = 0;
    const auto take = [&end](int64_t bytes) {
      const int32_t at = end;
      end += static_cast<int32_t>((bytes + 15) / 16 * 16);
      return at;
    };
    const int64_t hash = int64_t{1} << layout.hash_bits;
    const auto bitmap = [](int64_t bits) { return (bits + 63) / 64 * 8; };
    layout.keys = take(4 * hash);
    layout.first = take(4 * hash);
    layout.host = take(8 * top_k);
    layout.tokens = take(4 * top_k);
    layout.result = take(4 * top_k);
    layout.home = take(4 * top_k);
    layout.lru = take(2 * hot_slots);
    layout.order = take(2 * (top_k < hot_slots ? top_k : hot_slots));
    layout.missing = take(2 * top_k);
    layout.miss_dst = take(4 * top_k);
    layout.slot_hits = take(bitmap(hot_slots));
    layout.lru_hits = take(bitmap(hot_slots));
    layout.misses = take(bitmap(top_k));
    layout.repeated = take(4);
    layout.bytes = end;
    if (layout.bytes <= most_bytes) break;
  }
  return layout;
}

KVIO_STEP Workspace workspace_at(char* base, const WorkspaceLayout& at) {
  Workspace w;
  w.keys = reinterpret_cast<int32_t*>(base + at.keys);
  w.first = reinterpret_cast<int32_t*>(base + at.first);
  w.host = reinterpret_cast<int64_t*>(base + at.host);
  w.tokens = reinterpret_cast<int32_t*>(base + at.tokens);
  w.result = reinterpret_cast<int32_t*>(base + at.result);
  w.home = reinterpret_cast<int32_t*>(base + at.home);
  w.lru = reinterpret_cast<uint16_t*>(base + at.lru);
  w.order = reinterpret_cast<uint16_t*>(base + at.order);
  w.missing = reinterpret_cast<uint16_t*>(base + at.missing);
  w.miss_dst = reinterpret_cast<int32_t*>(base + at.miss_dst);
  w.slot_hits = reinterpret_cast<uint32_t*>(base + at.slot_hits);
  w.lru_hits = reinterpret_cast<uint32_t*>(base + at.lru_hits);
  w.misses = reinterpret_cast<uint32_t*>(base + at.misses);
  w.repeated = reinterpret_cast<int32_t*>(base + at.repeated);
  return w;
}

struct ResolveParams {
  Rows<const int32_t> top_k_tokens;
  Rows<int32_t> device_buffer_tokens;
  Rows<const int32_t> device_buffer_locs;
  HostLocs host_cache_locs;
  Rows<int16_t> lru_slots;
  Rows<int32_t> top_k_device_locs;
  IndexList req_pool_indices;
  IndexList seq_lens;
  const int32_t* num_real_reqs;
  Rows<const int32_t> device_locs;
  RecordedPlan plan;
  int64_t pool_slots;
  int64_t max_len;
  int64_t host_slots;
  int64_t device_slots;
  int32_t top_k;
  int32_t hot_slots;
  WorkspaceLayout layout;
};

// A row of the batch.
struct Job {
  int32_t batch_row;
  int64_t request;  // row of the state tensors
  int64_t seq_len;
  bool records;  // this CTA writes the state, the answers, the plan and faults; others only find out what misses
};

// A thread among those of its CTA, whose waves of `wave` threads vote together.
struct Thread {
  int32_t number;
  int32_t count;
  int32_t wave;
};

// The stretch of `total` things, whole waves of them, that a thread's wave takes where their order counts.
struct Share {
  int32_t begin;
  int32_t end;
};
KVIO_STEP Share share_of(const Thread& t, int32_t total) {
  const int32_t each = (total + t.count - 1) / t.count * t.wave;
  const int32_t begin = t.number / t.wave * each;
  return {begin, begin + each};
}

template <class T>
KVIO_STEP T* row_of(const Rows<T>& rows, int64_t row) {
  return rows.data + row * rows.stride;
}

KVIO_STEP int64_t entry_of(const IndexList& list, int64_t at) {
  const int64_t i = at * list.stride;
  return list.is_int64 ? static_cast<const int64_t*>(list.data)[i] : static_cast<const int32_t*>(list.data)[i];
}

KVIO_STEP int64_t host_loc_of(const HostLocs& locs, int64_t request, int64_t token) {
  const int64_t i = request * locs.stride + token;
  return locs.is_int64 ? static_cast<const int64_t*>(locs.data)[i] : static_cast<const int32_t*>(locs.data)[i];
}

// A location of the device buffer as it may be handed out: itself, or -1 and a fault.
template <class Env>
KVIO_STEP int32_t checked_loc(Env& env, const ResolveParams& p, const Job& job, int32_t loc, int64_t position,
                              SwapInArgument argument) {
  if (loc >= 0 && loc < p.device_slots) return loc;
  if (job.records) env.fault(argument, position, loc, p.device_slots);
  return -1;
}

// How many misses a row of the batch has, where a plan is recorded.
KVIO_STEP void record_misses(const ResolveParams& p, int32_t batch_row, int32_t misses) {
  if (p.plan.miss_count.data == nullptr) return;
  p.plan.miss_count.data[batch_row * p.plan.miss_count.stride] = misses;
}

// A fault's position in a 2-D argument, as request/fault_subject.h has it.
KVIO_STEP int64_t at_row(int64_t row, int64_t column) { return row << 32 | column; }

// Entry i where the token names its slot: sequences that fit the hot buffer.
template <class Env>
KVIO_STEP int32_t direct_result(Env& env, const ResolveParams& p, const Job& job, int32_t i) {
  if (i >= job.seq_len) return -1;
  const int32_t token = row_of(p.top_k_tokens, job.batch_row)[i];
  if (token < 0) return -1;
  if (token >= job.seq_len) {
    env.fault(SwapInArgument::kTopK, at_row(job.batch_row, i), token, job.seq_len);
    return -1;
  }
  const int32_t loc = row_of(p.device_buffer_locs, job.request)[token];
  return checked_loc(env, p, job, loc, at_row(job.request, token), SwapInArgument::kDeviceLocs);
}

// What is known of entry i without looking at the hot buffer: its result, or kPending and its host location.
template <class Env>
KVIO_STEP int32_t stage_entry(Env& env, const ResolveParams& p, const Job& job, int32_t i, int32_t token,
                              int64_t* host) {
  if (token < 0) return -1;
  if (token >= job.seq_len || token >= p.max_len) {
    const int64_t limit = job.seq_len < p.max_len ? job.seq_len : p.max_len;
    if (job.records) env.fault(SwapInArgument::kTopK, at_row(job.batch_row, i), token, limit);
    return -1;
  }
  if (p.device_locs.data != nullptr) {
    const int32_t loc = row_of(p.device_locs, job.request)[token];
    if (loc >= 0) return checked_loc(env, p, job, loc, at_row(job.request, token), SwapInArgument::kDirectLocs);
  }
  if (token == job.seq_len - 1) {
    const int32_t loc = row_of(p.device_buffer_locs, job.request)[p.hot_slots];
    return checked_loc(env, p, job, loc, at_row(job.request, p.hot_slots), SwapInArgument::kDeviceLocs);
  }
  *host = host_loc_of(p.host_cache_locs, job.request, token);
  return kPending;
}

// Entries are taken kAtOnce at a time, so that what they wait for is under way together.
constexpr int32_t kAtOnce = 2;
struct Selected {
  int32_t token[kAtOnce];
};

// The tokens of entries begin, begin + count, ...
KVIO_STEP Selected select(const ResolveParams& p, int32_t batch_row, int32_t begin, const Thread& t) {
  const int32_t* selected = row_of(p.top_k_tokens, batch_row);
  Selected tokens;
  KVIO_UNROLL for (int32_t k = 0; k < kAtOnce; ++k) {
    const int32_t i = begin + k * t.count;
    tokens.token[k] = i < p.top_k ? selected[i] : kNoToken;
  }
  return tokens;
}

KVIO_STEP void clear(const ResolveParams& p, const Workspace& w, const Thread& t) {
  for (int32_t h = t.number; h < 1 << p.layout.hash_bits; h += t.count) {
    w.keys[h] = kNoToken;
    w.first[h] = kNoEntry;
  }
  if (t.number == 0) *w.repeated = 0;
}

// What a thread has under way from the state while tokens are put into the table: of the first kAhead rounds.
constexpr int32_t kAhead = 4;
struct Fetched {
  int32_t token[kAhead];  // of slot number + round * count
  int32_t loc[kAhead];    // likewise
  uint16_t lru[kAhead];   // place begin + round * wave + lane of the share
};

struct SlotState {
  const int32_t* tokens;
  const int32_t* locs;
  const int16_t* lru;
};
KVIO_STEP SlotState slot_state(const ResolveParams& p, const Job& job) {
  return {row_of(p.device_buffer_tokens, job.request), row_of(p.device_buffer_locs, job.request),
          row_of(p.lru_slots, job.request)};
}

KVIO_STEP Fetched fetch(const ResolveParams& p, const Job& job, const Thread& t) {
  const SlotState state = slot_state(p, job);
  const int32_t place = share_of(t, p.hot_slots).begin + t.number % t.wave;
  Fetched f;
  KVIO_UNROLL for (int32_t r = 0; r < kAhead; ++r) {
    const int32_t s = t.number + r * t.count;
    const int32_t j = place + r * t.wave;
    f.token[r] = s < p.hot_slots ? state.tokens[s] : kNoToken;
    f.loc[r] = s < p.hot_slots ? state.locs[s] : 0;
    f.lru[r] = j < p.hot_slots ? static_cast<uint16_t>(state.lru[j]) : 0;
  }
  return f;
}

KVIO_STEP uint32_t bucket_of(const ResolveParams& p, int32_t token) {
  return static_cast<uint32_t>(token) * 2654435761u >> (32 - p.layout.hash_bits);
}

// `selected` are the first tokens of this thread.
template <class Env>
KVIO_STEP void insert(Env& env, const ResolveParams& p, const Workspace& w, const Job& job, Selected selected,
                      const Thread& t) {
  const uint32_t mask = (1u << p.layout.hash_bits) - 1;
  for (int32_t begin = t.number; begin < p.top_k; begin += kAtOnce * t.count) {
    if (begin != t.number) selected = select(p, job.batch_row, begin, t);
    const int32_t* token = selected.token;
    int32_t result[kAtOnce];
    int64_t host[kAtOnce];
    KVIO_UNROLL for (int32_t k = 0; k < kAtOnce; ++k) {
      host[k] = 0;
      result[k] = stage_entry(env, p, job, begin + k * t.count, token[k], &host[k]);
    }
    KVIO_UNROLL for (int32_t k = 0; k < kAtOnce; ++k) {
      const int32_t i = begin + k * t.count;
      if (i >= p.top_k) continue;
      w.tokens[i] = result[k] == kPending ? token[k] : kNoToken;
      w.result[i] = result[k];
      if (result[k] != kPending) continue;
      uint32_t h = bucket_of(p, token[k]);
      int32_t before;
      while (true) {
        before = env.claim(&w.keys[h], kNoToken, token[k]);
        if (before == kNoToken || before == token[k]) break;
        h = (h + 1) & mask;
      }
      if (before == token[k]) *w.repeated = 1;
      env.lower(&w.first[h], i);
      w.home[i] = static_cast<int32_t>(h);
    }
    // Last: they are not there yet.
    KVIO_UNROLL for (int32_t k = 0; k < kAtOnce; ++k) {
      if (result[k] == kPending) w.host[begin + k * t.count] = host[k];
    }
  }
}

// Hot slots that hold a selected token answer it, and stay.
template <class Env>
KVIO_STEP void mark(Env& env, const ResolveParams& p, const Workspace& w, const Job& job, const Fetched& fetched,
                    const Thread& t) {
  const SlotState state = slot_state(p, job);
  const uint32_t mask = (1u << p.layout.hash_bits) - 1;
  Fetched f = fetched;
  for (int32_t begin = t.number; begin - t.number < p.hot_slots; begin += kAhead * t.count) {
    if (begin != t.number) {
      KVIO_UNROLL for (int32_t r = 0; r < kAhead; ++r) {
        const int32_t s = begin + r * t.count;
        f.token[r] = s < p.hot_slots ? state.tokens[s] : kNoToken;
        f.loc[r] = s < p.hot_slots ? state.locs[s] : 0;
      }
    }
    uint32_t home[kAhead];
    int32_t key[kAhead];
    KVIO_UNROLL for (int32_t r = 0; r < kAhead; ++r) {
      home[r] = bucket_of(p, f.token[r]);
      key[r] = w.keys[home[r]];
    }
    KVIO_UNROLL for (int32_t r = 0; r < kAhead; ++r) {
      if (f.token[r] < 0) key[r] = kNoToken;
      while (key[r] != kNoToken && key[r] != f.token[r]) {
        home[r] = (home[r] + 1) & mask;
        key[r] = w.keys[home[r]];
      }
    }
    KVIO_UNROLL for (int32_t r = 0; r < kAhead; ++r) {
      const int32_t s = begin + r * t.count;
      const bool hit = key[r] != kNoToken;
      if (hit) {
        w.result[w.first[home[r]]] =
            checked_loc(env, p, job, f.loc[r], at_row(job.request, s), SwapInArgument::kDeviceLocs);
      }
      if (s - t.number % t.wave < p.hot_slots) env.vote(w.slot_hits, s, hit, t);
    }
  }
}

KVIO_STEP bool is_first(const Workspace& w, int32_t i) { return w.first[w.home[i]] == i; }

KVIO_STEP bool bit_of(const uint32_t* words, int32_t at) { return (words[at >> 5] >> (at & 31) & 1) != 0; }

// Bits that are set from `begin` to `end` - 1.
KVIO_STEP int32_t bits_between(const uint32_t* words, int32_t begin, int32_t end) {
  int32_t count = 0;
  for (int32_t at = begin; at < end; at = (at | 31) + 1) {
    uint32_t word = words[at >> 5] >> (at & 31);
    if (end - at < 32) word &= (1u << (end - at)) - 1;
    count += count_bits(word);
  }
  return count;
}

// Of a wave, or of all waves before it, or of all.
struct Tally {
  int32_t hits;  // slots that stay
  int32_t misses;
};

// Which places in the LRU order stay, and which entries have to be loaded. A slot that is named wrongly stays as well:
// it is never given away. Returns what Env's votes count: on a GPU, of the whole wave.
template <class Env>
KVIO_STEP Tally vote(Env& env, const ResolveParams& p, const Workspace& w, const Job& job, const Fetched& fetched,
                     const Thread& t) {
  const int16_t* lru = slot_state(p, job).lru;
  const int32_t lane = t.number % t.wave;
  Tally tally{};
  const Share places = share_of(t, p.hot_slots);
  Fetched f = fetched;
  for (int32_t begin = places.begin; begin < places.end; begin += kAhead * t.wave) {
    if (begin != places.begin) {
      KVIO_UNROLL for (int32_t r = 0; r < kAhead; ++r) {
        const int32_t j = begin + r * t.wave + lane;
        f.lru[r] = j < p.hot_slots ? static_cast<uint16_t>(lru[j]) : 0;
      }
    }
    KVIO_UNROLL for (int32_t r = 0; r < kAhead; ++r) {
      const int32_t from = begin + r * t.wave;
      if (from >= places.end || from >= p.hot_slots) continue;
      const int32_t j = from + lane;
      const uint16_t slot = f.lru[r];
      bool stays = false;
      if (j < p.hot_slots) {
        w.lru[j] = slot;
        stays = slot >= p.hot_slots || bit_of(w.slot_hits, slot);
        if (slot >= p.hot_slots && job.records) {
          env.fault(SwapInArgument::kLru, at_row(job.request, j), static_cast<int16_t>(slot), p.hot_slots);
        }
      }
      tally.hits += env.vote(w.lru_hits, j, stays, t);
    }
  }
  const bool repeated = *w.repeated != 0;
  const Share entries = share_of(t, p.top_k);
  for (int32_t from = entries.begin; from < entries.end && from < p.top_k; from += t.wave) {
    const int32_t i = from + lane;
    bool missing = i < p.top_k && w.result[i] == kPending && (!repeated || is_first(w, i));
    if (missing && (w.host[i] < 0 || w.host[i] >= p.host_slots)) {
      if (job.records) {
        env.fault(SwapInArgument::kHostLocs, at_row(job.request, w.tokens[i]), w.host[i], p.host_slots);
      }
      w.result[i] = -1;
      missing = false;
    }
    tally.misses += env.vote(w.misses, i, missing, t);
  }
  return tally;
}

// The slots in their new order: those that left and were not taken, those that were taken, those that stayed; the
// answers that are known; and which entry misses as which. `before` is of the waves before this thread's.
KVIO_STEP void place(const ResolveParams& p, const Workspace& w, const Job& job, const Tally& before, const Tally& all,
                     const Thread& t) {
  const int32_t lane = t.number % t.wave;
  const int32_t leaving = p.hot_slots - all.hits;
  const int32_t taken = all.misses < leaving ? all.misses : leaving;
  int16_t* lru = row_of(p.lru_slots, job.request);
  const Share places = share_of(t, p.hot_slots);
  int32_t hits = before.hits;
  for (int32_t from = places.begin; from < places.end && from < p.hot_slots; from += t.wave) {
    const int32_t j = from + lane;
    if (j < p.hot_slots) {
      const int32_t hits_before = hits + bits_between(w.lru_hits, from, j);
      const uint16_t slot = w.lru[j];
      int32_t to;
      if (bit_of(w.lru_hits, j)) {
        to = leaving + hits_before;
      } else {
        const int32_t turn = j - hits_before;
        if (turn < taken) w.order[turn] = slot;
        to = turn < taken ? leaving - taken + turn : turn - taken;
      }
      if (job.records) lru[to] = static_cast<int16_t>(slot);
    }
    hits += bits_between(w.lru_hits, from, from + t.wave);
  }
  int32_t* out = row_of(p.top_k_device_locs, job.batch_row);
  const Share entries = share_of(t, p.top_k);
  int32_t misses = before.misses;
  for (int32_t from = entries.begin; from < entries.end && from < p.top_k; from += t.wave) {
    const int32_t i = from + lane;
    if (i < p.top_k) {
      if (bit_of(w.misses, i)) {
        w.missing[misses + bits_between(w.misses, from, i)] = static_cast<uint16_t>(i);
      } else if (job.records && w.result[i] != kPending) {
        out[i] = w.result[i];
      }
    }
    misses += bits_between(w.misses, from, from + t.wave);
  }
}

// Misses take the slots that leave, least recently used first. A slot whose own location is bad stays empty.
template <class Env>
KVIO_STEP void assign(Env& env, const ResolveParams& p, const Workspace& w, const Job& job, const Tally& all,
                      const Thread& t) {
  int32_t* resident = row_of(p.device_buffer_tokens, job.request);
  const int32_t* locs = row_of(p.device_buffer_locs, job.request);
  int32_t* out = row_of(p.top_k_device_locs, job.batch_row);
  const int32_t leaving = p.hot_slots - all.hits;
  for (int32_t m = t.number; m < all.misses; m += t.count) {
    const int32_t i = w.missing[m];
    int32_t given = -1;
    int32_t loc = -1;
    // Fewer slots than misses only where lru_slots names some wrongly.
    if (m < leaving) {
      const uint16_t slot = w.order[m];
      given = locs[slot];
      loc = checked_loc(env, p, job, given, at_row(job.request, slot), SwapInArgument::kDeviceLocs);
      if (job.records) resident[slot] = loc >= 0 ? w.tokens[i] : kNoToken;
    }
    w.result[i] = loc;
    w.miss_dst[m] = loc;
    if (!job.records) continue;
    out[i] = loc;
    if (p.plan.miss_count.data != nullptr) {
      row_of(p.plan.miss_src, job.batch_row)[m] = w.host[i];
      row_of(p.plan.miss_dst, job.batch_row)[m] = given;
    }
  }
  if (t.number == 0 && job.records) record_misses(p, job.batch_row, all.misses);
}

// Entries whose token a lower one selects have its answer.
KVIO_STEP void repeat(const ResolveParams& p, const Workspace& w, const Job& job, const Thread& t) {
  int32_t* out = row_of(p.top_k_device_locs, job.batch_row);
  for (int32_t i = t.number; i < p.top_k; i += t.count) {
    if (w.tokens[i] != kNoToken && !is_first(w, i)) out[i] = w.result[w.first[w.home[i]]];
  }
}

}  // namespace kvio::gpu
