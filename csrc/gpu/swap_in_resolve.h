// What one CTA does for one request of kvio::swap_in, as steps that every thread takes between two barriers. A step
// reads nothing that another thread writes in it, except through Env, so the outcome depends on no order of threads:
// tests/native runs the same source with its threads in any order.
//
// Steps: clear, begin -> | fetch, insert -> | settle if *w.repeated | -> mark -> | find_misses, sum -> | list_misses ->
// | and then, while rows that are missing can be on their way, count_hits, sum -> | place -> | assign -> | tell -> |
// repeat if *w.repeated, with a barrier at every bar, and in the sums over all threads. `Env` has the atomic operations
// and takes faults; compiled for a GPU or a CPU.
//
// What shaped it (H200): one SM does all of it for a request, so instructions and accesses to shared memory count. A
// thread takes a few neighbours at once: one load brings them, and their searches are under way together. What an SM
// needs from memory it asks for before the first barrier. CTAs of a cluster, which share the copying, all do the same,
// and one records it: a table cut over their shared memories took longer.
#pragma once

#include <cstdint>
#include <type_traits>

#include "request/swap_in_request.h"

#if defined(__CUDACC__) || defined(__HIP__)
#define KVIO_STEP __device__ __forceinline__
#define KVIO_ROLLED _Pragma("unroll 1")
#define KVIO_UNROLLED _Pragma("unroll")
#else
#define KVIO_STEP inline
#define KVIO_ROLLED
#define KVIO_UNROLLED
#endif
#define KVIO_RARELY(condition) __builtin_expect(!!(condition), 0)

namespace kvio::gpu {

// Which argument a fault is about, counted from FaultOp::kSwapIn as in request/fault_subject.cpp.
enum class SwapInArgument : int32_t { kTopK, kHostLocs, kDeviceLocs, kLru, kRequest, kDirectLocs };

// Neighbours that a thread takes at once, of the selection and of the hot slots.
constexpr int kEntriesAtOnce = 2;
constexpr int kSlotsAtOnce = 4;

// Entries of the table that finds a token among the selected ones: `times` as many as can be in it, or more.
constexpr int32_t hash_bits_for(int64_t top_k, int64_t times) {
  int32_t bits = 5;
  while ((int64_t{1} << bits) < times * top_k) ++bits;
  return bits;
}

// N of T that are loaded and stored together.
template <class T, int N>
struct alignas(sizeof(T) * N) Pack {
  T at[N];
};
template <class T>
using PerEntry = Pack<T, kEntriesAtOnce>;
template <class T>
using PerSlot = Pack<T, kSlotsAtOnce>;

// Where the arrays of a CTA's memory are: bytes from where it begins, and how many in all. What depends on their sizes.
struct WorkspaceLayout {
  int32_t entry_rounds;  // in which all threads take all entries
  int32_t slot_rounds;
  uint32_t hash_mask;
  int32_t hash_shift;  // what is left of 32 bits is a pair of places in the table
  int32_t keys;
  int32_t values;
  int32_t home;
  int32_t kinds;
  int32_t host;
  int32_t lru;
  int32_t stays;
  int32_t hits;
  int32_t locs;
  int32_t order;
  int32_t missing;
  int32_t miss_src;
  int32_t miss_dst;
  int32_t repeated;
  int32_t bytes;
};

// A CTA's memory, shared or not.
struct Workspace {
  int32_t* keys;    // [hash] token, kNoToken for none; of no use after list_misses
  int32_t* values;  // [hash] its device location, -1 for none that may be given out; pending_of an entry until known
  // Of a thread's own entries and places, in whole rounds of all threads.
  PerEntry<int32_t>* home;  // where in the table the token of an entry is, kNotInTable
  PerEntry<uint8_t>* kinds;
  PerEntry<int64_t>* host;  // host location of an entry that misses
  PerSlot<uint16_t>* lru;   // slots as given
  uint8_t* stays;           // a bit for each of them
  // Of all.
  PerSlot<uint8_t>* hits;    // [slots, in whole rounds] 1: it holds a selected token
  PerSlot<int32_t>* locs;    // [slots, in whole rounds] device locations of slots
  PerSlot<uint16_t>* order;  // [slots, in whole rounds] slots in their new order
  uint16_t* missing;         // [top_k] entry of each miss
  int64_t* miss_src;         // [top_k] host location of each miss
  int32_t* miss_dst;         // [top_k] token of each miss; then its device location, -1 for one that is not copied
  int32_t* repeated;         // not 0: a token is selected twice
};

constexpr int32_t kNotInTable = -1;

// What becomes of an entry.
constexpr uint8_t kKnown = 0;      // its answer is
constexpr uint8_t kMisses = 1;     // it has to be loaded
constexpr uint8_t kNoHostLoc = 2;  // it should be, but from no location of the pool
constexpr uint8_t kWaits = 3;      // another entry asks for the same token

// The workspace of a CTA of `threads`. The table is eight times as large as the selection where that is no more than
// `most_bytes` in all, else four or two times: shorter searches or, at least, a table that fits. Where its keys were
// there is room for `staged_bytes`.
inline WorkspaceLayout lay_out_workspace(int64_t top_k, int64_t hot_slots, int64_t threads, int64_t most_bytes,
                                         int64_t staged_bytes) {
  WorkspaceLayout layout{};
  const auto rounds_of = [threads](int64_t count, int64_t at_once) {
    return static_cast<int32_t>((count + threads * at_once - 1) / (threads * at_once));
  };
  layout.entry_rounds = rounds_of(top_k, kEntriesAtOnce);
  layout.slot_rounds = rounds_of(hot_slots, kSlotsAtOnce);
  const int64_t entries = layout.entry_rounds * threads * kEntriesAtOnce;
  const int64_t slots = layout.slot_rounds * threads * kSlotsAtOnce;
  for (const int64_t times : {8, 4, 2}) {
    const int32_t bits = hash_bits_for(top_k, times);
    const int64_t hash = int64_t{1} << bits;
    layout.hash_mask = static_cast<uint32_t>(hash - 1);
    layout.hash_shift = 32 - (bits - 1);
    int32_t end = 0;
    const auto take = [&end](int64_t bytes) {
      const int32_t at = end;
      end += static_cast<int32_t>((bytes + 15) / 16 * 16);
      return at;
    };
    layout.keys = take(4 * hash > staged_bytes ? 4 * hash : staged_bytes);
    layout.values = take(4 * hash);
    layout.home = take(4 * entries);
    layout.kinds = take(entries);
    layout.host = take(8 * entries);
    layout.lru = take(2 * slots);
    layout.stays = take(slots / kSlotsAtOnce);
    layout.hits = take(slots);
    layout.locs = take(4 * slots);
    layout.order = take(2 * slots);
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
  w.home = reinterpret_cast<PerEntry<int32_t>*>(base + at.home);
  w.kinds = reinterpret_cast<PerEntry<uint8_t>*>(base + at.kinds);
  w.host = reinterpret_cast<PerEntry<int64_t>*>(base + at.host);
  w.lru = reinterpret_cast<PerSlot<uint16_t>*>(base + at.lru);
  w.stays = reinterpret_cast<uint8_t*>(base + at.stays);
  w.hits = reinterpret_cast<PerSlot<uint8_t>*>(base + at.hits);
  w.locs = reinterpret_cast<PerSlot<int32_t>*>(base + at.locs);
  w.order = reinterpret_cast<PerSlot<uint16_t>*>(base + at.order);
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

// Rows of a tensor as kernels have them: `stride` is in bytes, below 2^32, so that an address is one multiplication.
template <class T>
struct ShortRows {
  T* data;
  uint32_t stride;
};

template <class T>
ShortRows<T> short_rows(const Rows<T>& rows) {
  return {rows.data, static_cast<uint32_t>(rows.stride * static_cast<int64_t>(sizeof(T)))};
}

template <class T>
KVIO_STEP T* row_of(const ShortRows<T>& rows, uint32_t row) {
  char* data = reinterpret_cast<char*>(const_cast<std::remove_const_t<T>*>(rows.data));
  return reinterpret_cast<T*>(data + static_cast<uint64_t>(row) * rows.stride);
}

// Whether packs of N can be loaded from every row, and stored to it.
template <int N, class T>
bool has_packs(const ShortRows<T>& rows) {
  return (reinterpret_cast<uint64_t>(rows.data) | rows.stride) % (sizeof(T) * N) == 0;
}

// Entries of an index list as kernels have them.
struct ShortList {
  const char* data;
  uint32_t stride;  // bytes
  bool is_int64;
};
inline ShortList short_list(const IndexList& list) {
  return {static_cast<const char*>(list.data), static_cast<uint32_t>(list.stride * (list.is_int64 ? 8 : 4)),
          list.is_int64};
}

// An entry as it was loaded, put together only when it is used: that would wait for the load.
struct EntryWords {
  uint32_t low;
  uint32_t high;  // of an int64
};
KVIO_STEP EntryWords load_entry(const ShortList& list, uint32_t at) {
  const uint32_t* entry = reinterpret_cast<const uint32_t*>(list.data + static_cast<uint64_t>(at) * list.stride);
  return {entry[0], list.is_int64 ? entry[1] : 0};
}
KVIO_STEP int64_t value_of(const EntryWords& words, bool is_int64) {
  if (!is_int64) return static_cast<int32_t>(words.low);
  return static_cast<int64_t>(uint64_t{words.high} << 32 | words.low);
}

// The entry, or the int32 that is nearest to it.
KVIO_STEP int32_t short_value_of(const EntryWords& words, bool is_int64) {
  const int32_t low = static_cast<int32_t>(words.low);
  const int32_t high = static_cast<int32_t>(words.high);
  if (KVIO_RARELY(is_int64 && high != low >> 31)) return high < 0 ? -0x7fffffff - 1 : 0x7fffffff;
  return low;
}

struct ResolveParams {
  ShortRows<const int32_t> top_k_tokens;
  ShortRows<int32_t> device_buffer_tokens;
  ShortRows<const int32_t> device_buffer_locs;
  ShortRows<const char> host_cache_locs;  // int64 where host_is_int64, else int32
  bool host_is_int64;
  ShortRows<int16_t> lru_slots;
  ShortRows<int32_t> top_k_device_locs;
  ShortList req_pool_indices;
  ShortList seq_lens;
  const int32_t* num_real_reqs;
  ShortRows<const int32_t> device_locs;
  ShortRows<int64_t> miss_src;  // the recorded plan; null without
  ShortRows<int32_t> miss_dst;
  Strided<int32_t> miss_count;
  int64_t host_slots;
  int32_t pool_slots;
  int32_t max_len;
  uint32_t device_slots;  // at most 2^31
  int32_t top_k;
  int32_t hot_slots;
  bool packed_entries;  // packs can be loaded, and none has but a part of the entries
  bool packed_slots;
  WorkspaceLayout layout;
};

inline void find_packs(ResolveParams* p) {
  p->packed_entries = p->top_k % kEntriesAtOnce == 0 && has_packs<kEntriesAtOnce>(p->top_k_tokens) &&
                      has_packs<kEntriesAtOnce>(p->top_k_device_locs);
  p->packed_slots = p->hot_slots % kSlotsAtOnce == 0 && has_packs<kSlotsAtOnce>(p->device_buffer_tokens) &&
                    has_packs<kSlotsAtOnce>(p->device_buffer_locs) && has_packs<kSlotsAtOnce>(p->lru_slots);
}

// A row of the batch.
struct Job {
  int32_t batch_row;
  int32_t token_limit;   // tokens are below it
  uint32_t plain_limit;  // those below it, but for the newest, are looked for
  int32_t newest;        // the token with a slot of its own, below 0 for none
  uint32_t request;      // row of the state tensors
  bool records;          // this CTA writes the state, the answers, the plan and faults; others only find what misses
  const int32_t* selected;
  int32_t* out;
  int32_t* tokens;
  const int32_t* locs;
  int16_t* lru;
  const int32_t* direct;  // row of device_locs, null without
};

// Whether the request's tokens do not all have slots of their own.
KVIO_STEP bool is_long(const ResolveParams& p, int32_t seq_len) {
  return seq_len > p.hot_slots || p.device_locs.data != nullptr;
}

KVIO_STEP Job make_job(const ResolveParams& p, int32_t batch_row, uint32_t request, int32_t seq_len, bool records) {
  Job job;
  job.batch_row = batch_row;
  // Where the token names its slot, host locations are not looked at.
  const int32_t limit = seq_len < p.max_len || !is_long(p, seq_len) ? seq_len : p.max_len;
  job.token_limit = limit < 0 ? 0 : limit;
  job.plain_limit = p.device_locs.data != nullptr ? 0 : static_cast<uint32_t>(job.token_limit);
  job.newest = seq_len < 0 ? -1 : seq_len - 1;
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

// A thread among those of its CTA.
struct Thread {
  int32_t number;
  int32_t count;

  // Where arrays have what is this thread's own in round r.
  KVIO_STEP int32_t own(int32_t r) const { return r * count + number; }
};

// Where order counts, a thread takes the things from first_of on, N in a round.
template <int N>
KVIO_STEP int32_t first_of(const Thread& t, int32_t rounds) {
  return t.number * rounds * N;
}

// Entries at, at + 1, ... of a row of `end`; `other` beyond it.
template <int N, class T>
KVIO_STEP Pack<T, N> load_pack(bool packed, const T* row, int32_t at, int32_t end, T other) {
  Pack<T, N> pack;
  KVIO_UNROLLED for (int k = 0; k < N; ++k) pack.at[k] = other;
  if (packed) {
    if (at < end) pack = *reinterpret_cast<const Pack<T, N>*>(row + at);
  } else {
    KVIO_UNROLLED for (int k = 0; k < N; ++k) {
      if (at + k < end) pack.at[k] = row[at + k];
    }
  }
  return pack;
}

template <int N, class T>
KVIO_STEP void store_pack(bool packed, T* row, int32_t at, int32_t end, const Pack<T, N>& pack) {
  if (packed) {
    if (at < end) *reinterpret_cast<Pack<T, N>*>(row + at) = pack;
  } else {
    KVIO_UNROLLED for (int k = 0; k < N; ++k) {
      if (at + k < end) row[at + k] = pack.at[k];
    }
  }
}

// What a thread has under way from its first round while others wait.
struct First {
  PerEntry<int32_t> selected;
  PerSlot<int32_t> tokens;
  PerSlot<int32_t> locs;
  PerSlot<int16_t> lru;
};

KVIO_STEP int64_t host_loc_of(const ResolveParams& p, const Job& job, int32_t token) {
  const char* row = row_of(p.host_cache_locs, job.request);
  if (p.host_is_int64) return reinterpret_cast<const int64_t*>(row)[token];
  return reinterpret_cast<const int32_t*>(row)[token];
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
KVIO_STEP int32_t direct_result(Env& env, const ResolveParams& p, const Job& job, int32_t i) {
  if (i >= job.token_limit) return -1;
  const int32_t token = job.selected[i];
  if (token < 0) return -1;
  if (token >= job.token_limit) {
    env.note(SwapInArgument::kTopK, i, token);
    return -1;
  }
  return checked_loc(env, p, job.locs[token], token, SwapInArgument::kDeviceLocs);
}

KVIO_STEP PerEntry<int32_t> load_selected(const ResolveParams& p, const int32_t* selected, int32_t at) {
  return load_pack<kEntriesAtOnce>(p.packed_entries, selected, at, p.top_k, kNoToken);
}
KVIO_STEP PerSlot<int32_t> load_tokens(const ResolveParams& p, const Job& job, int32_t at) {
  return load_pack<kSlotsAtOnce>(p.packed_slots, static_cast<const int32_t*>(job.tokens), at, p.hot_slots, kNoToken);
}
KVIO_STEP PerSlot<int32_t> load_locs(const ResolveParams& p, const Job& job, int32_t at) {
  return load_pack<kSlotsAtOnce>(p.packed_slots, job.locs, at, p.hot_slots, 0);
}
KVIO_STEP PerSlot<int16_t> load_lru(const ResolveParams& p, const Job& job, int32_t at) {
  return load_pack<kSlotsAtOnce>(p.packed_slots, static_cast<const int16_t*>(job.lru), at, p.hot_slots, int16_t{0});
}

// What needs no request.
KVIO_STEP void begin(const ResolveParams& p, int32_t batch_row, const Thread& t, First* first) {
  const int32_t rounds = p.layout.entry_rounds;
  first->selected = load_selected(p, row_of(p.top_k_tokens, batch_row), first_of<kEntriesAtOnce>(t, rounds));
}

KVIO_STEP void fetch(const ResolveParams& p, const Job& job, const Thread& t, First* first) {
  const int32_t rounds = p.layout.slot_rounds;
  first->tokens = load_tokens(p, job, t.number * kSlotsAtOnce);
  first->locs = load_locs(p, job, t.number * kSlotsAtOnce);
  first->lru = load_lru(p, job, first_of<kSlotsAtOnce>(t, rounds));
}

// The table of this thread's CTA.
KVIO_STEP void clear(const ResolveParams& p, const Workspace& w, const Thread& t) {
  Pack<int32_t, 4>* keys = reinterpret_cast<Pack<int32_t, 4>*>(w.keys);
  const int32_t packs = static_cast<int32_t>((p.layout.hash_mask + 1) / 4);
  KVIO_ROLLED for (int32_t h = t.number; h < packs; h += t.count) {
    keys[h] = {{kNoToken, kNoToken, kNoToken, kNoToken}};
  }
  if (t.number == 0) *w.repeated = 0;
}

// Where the search for a token begins, an even place: it is in the first free one from there on.
KVIO_STEP uint32_t home_of(const ResolveParams& p, int32_t token) {
  return (static_cast<uint32_t>(token) * 2654435761u >> p.layout.hash_shift) << 1;
}

// Two places of the table.
KVIO_STEP Pack<int32_t, 2> pair_at(const Workspace& w, uint32_t home) {
  return *reinterpret_cast<const Pack<int32_t, 2>*>(w.keys + home);
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

// Puts tokens into the table. Answers entries whose token is none that is looked for.
template <class Env>
KVIO_STEP void insert(Env& env, const ResolveParams& p, const Workspace& w, const Job& job, const Thread& t,
                      const First& first) {
  const uint32_t mask = p.layout.hash_mask;
  const int32_t rounds = p.layout.entry_rounds;
  const int32_t begin = first_of<kEntriesAtOnce>(t, rounds);
  PerEntry<int32_t> tokens = first.selected;
  KVIO_ROLLED for (int32_t r = 0; r < rounds; ++r) {
    const int32_t i = begin + r * kEntriesAtOnce;
    if (r > 0) tokens = load_selected(p, job.selected, i);
    PerEntry<int32_t> home;
    PerEntry<int32_t> before;
    KVIO_UNROLLED for (int k = 0; k < kEntriesAtOnce; ++k) {
      const int32_t token = tokens.at[k];
      home.at[k] = static_cast<int32_t>(home_of(p, token));
      const bool is_plain = static_cast<uint32_t>(token) < job.plain_limit && token != job.newest;
      if (KVIO_RARELY(!is_plain)) {
        const int32_t result = i + k < p.top_k ? other_result(env, p, job, i + k, token) : -1;
        if (result != kPending) home.at[k] = kNotInTable;
        if (result != kPending && job.records && i + k < p.top_k) job.out[i + k] = result;
      }
      before.at[k] = token;
      if (home.at[k] != kNotInTable) before.at[k] = env.claim(&w.keys[home.at[k]], kNoToken, token);
    }
    KVIO_UNROLLED for (int k = 0; k < kEntriesAtOnce; ++k) {
      if (home.at[k] == kNotInTable) continue;
      const int32_t token = tokens.at[k];
      uint32_t at = static_cast<uint32_t>(home.at[k]);
      KVIO_ROLLED while (before.at[k] != kNoToken && before.at[k] != token) {
        at = (at + 1) & mask;
        before.at[k] = env.claim(&w.keys[at], kNoToken, token);
      }
      home.at[k] = static_cast<int32_t>(at);
      if (before.at[k] == kNoToken) {
        w.values[at] = pending_of(i + k);
      } else {
        *w.repeated = 1;
      }
    }
    w.home[t.own(r)] = home;
  }
}

// The lowest of several entries with one token asks for it.
template <class Env>
KVIO_STEP void settle(Env& env, const ResolveParams& p, const Workspace& w, const Thread& t) {
  const int32_t rounds = p.layout.entry_rounds;
  const int32_t begin = first_of<kEntriesAtOnce>(t, rounds);
  KVIO_ROLLED for (int32_t r = 0; r < rounds; ++r) {
    const PerEntry<int32_t> home = w.home[t.own(r)];
    KVIO_UNROLLED for (int k = 0; k < kEntriesAtOnce; ++k) {
      if (home.at[k] != kNotInTable) env.raise(&w.values[home.at[k]], pending_of(begin + r * kEntriesAtOnce + k));
    }
  }
}

// Slots that hold a selected token answer it, and stay.
template <class Env>
KVIO_STEP void mark(Env& env, const ResolveParams& p, const Workspace& w, const Job& job, const Thread& t,
                    const First& first) {
  const uint32_t mask = p.layout.hash_mask;
  const int32_t rounds = p.layout.slot_rounds;
  PerSlot<int32_t> tokens = first.tokens;
  PerSlot<int32_t> locs = first.locs;
  KVIO_ROLLED for (int32_t r = 0; r < rounds; ++r) {
    const int32_t slot = t.own(r) * kSlotsAtOnce;
    if (r > 0) {
      tokens = load_tokens(p, job, slot);
      locs = load_locs(p, job, slot);
    }
    uint32_t home[kSlotsAtOnce];
    Pack<int32_t, 2> keys[kSlotsAtOnce];
    KVIO_UNROLLED for (int k = 0; k < kSlotsAtOnce; ++k) {
      home[k] = home_of(p, tokens.at[k]);
      keys[k] = pair_at(w, home[k]);
    }
    PerSlot<uint8_t> hits;
    KVIO_UNROLLED for (int k = 0; k < kSlotsAtOnce; ++k) {
      const int32_t token = tokens.at[k];
      // A place is taken only when those before it are.
      KVIO_ROLLED while (KVIO_RARELY(keys[k].at[0] != token && keys[k].at[1] != token && keys[k].at[1] != kNoToken)) {
        home[k] = (home[k] + 2) & mask;
        keys[k] = pair_at(w, home[k]);
      }
      if (keys[k].at[1] == token) ++home[k];
      const bool is_hit = (keys[k].at[0] == token || keys[k].at[1] == token) && token >= 0;
      hits.at[k] = is_hit ? 1 : 0;
      if (is_hit) {
        int32_t loc = locs.at[k];
        if (KVIO_RARELY(static_cast<uint32_t>(loc) >= p.device_slots)) {
          env.note(SwapInArgument::kDeviceLocs, slot + k, loc);
          loc = -1;
        }
        w.values[home[k]] = loc;
      }
    }
    w.hits[t.own(r)] = hits;
    w.locs[t.own(r)] = locs;
  }
}

// Which entries have to be loaded; returns how many of this thread's. Answers entries whose token a slot holds.
template <class Env>
KVIO_STEP int32_t find_misses(Env& env, const ResolveParams& p, const Workspace& w, const Job& job, const Thread& t) {
  const int32_t rounds = p.layout.entry_rounds;
  const int32_t begin = first_of<kEntriesAtOnce>(t, rounds);
  int32_t misses = 0;
  KVIO_ROLLED for (int32_t r = 0; r < rounds; ++r) {
    const int32_t i = begin + r * kEntriesAtOnce;
    const PerEntry<int32_t> home = w.home[t.own(r)];
    PerEntry<int32_t> result;
    PerEntry<uint8_t> kinds;
    bool all_known = true;
    KVIO_UNROLLED for (int k = 0; k < kEntriesAtOnce; ++k) {
      result.at[k] = home.at[k] != kNotInTable ? w.values[home.at[k]] : kPending;
      kinds.at[k] = kKnown;
      all_known = all_known && result.at[k] > kPending;
    }
    if (all_known) {
      if (job.records) store_pack<kEntriesAtOnce>(p.packed_entries, job.out, i, p.top_k, result);
    } else {
      KVIO_UNROLLED for (int k = 0; k < kEntriesAtOnce; ++k) {
        if (home.at[k] == kNotInTable) continue;
        int32_t answer = result.at[k];
        if (answer == pending_of(i + k)) {
          // Only now, and for few: host locations lie far apart, and a load of them takes as long as 32 others.
          const int32_t token = w.keys[home.at[k]];
          const int64_t host = host_loc_of(p, job, token);
          w.host[t.own(r)].at[k] = host;
          kinds.at[k] = kMisses;
          if (KVIO_RARELY(static_cast<uint64_t>(host) >= static_cast<uint64_t>(p.host_slots))) {
            env.note(SwapInArgument::kHostLocs, token, host);
            kinds.at[k] = kNoHostLoc;
            answer = -1;
          } else {
            ++misses;
          }
        } else if (answer <= kPending) {
          kinds.at[k] = kWaits;
        }
        if (job.records && answer > kPending) job.out[i + k] = answer;
      }
    }
    w.kinds[t.own(r)] = kinds;
  }
  return misses;
}

// Which entry misses as which: `m` misses are of the threads before this one.
KVIO_STEP void list_misses(const ResolveParams& p, const Workspace& w, const Thread& t, int32_t m) {
  const int32_t rounds = p.layout.entry_rounds;
  const int32_t begin = first_of<kEntriesAtOnce>(t, rounds);
  KVIO_ROLLED for (int32_t r = 0; r < rounds; ++r) {
    const PerEntry<uint8_t> kinds = w.kinds[t.own(r)];
    KVIO_UNROLLED for (int k = 0; k < kEntriesAtOnce; ++k) {
      if (kinds.at[k] != kMisses) continue;
      w.missing[m] = static_cast<uint16_t>(begin + r * kEntriesAtOnce + k);
      w.miss_src[m] = w.host[t.own(r)].at[k];
      w.miss_dst[m] = w.keys[w.home[t.own(r)].at[k]];
      ++m;
    }
  }
}

// Which slots stay; returns how many of this thread's places.
template <class Env>
KVIO_STEP int32_t count_hits(Env& env, const ResolveParams& p, const Workspace& w, const Job& job, const Thread& t,
                             const First& first) {
  const int32_t rounds = p.layout.slot_rounds;
  const int32_t begin = first_of<kSlotsAtOnce>(t, rounds);
  const uint8_t* slot_hits = &w.hits->at[0];
  PerSlot<int16_t> lru = first.lru;
  int32_t hits = 0;
  KVIO_ROLLED for (int32_t r = 0; r < rounds; ++r) {
    const int32_t j = begin + r * kSlotsAtOnce;
    if (r > 0) lru = load_lru(p, job, j);
    uint32_t stays = 0;
    PerSlot<uint16_t> given;
    KVIO_UNROLLED for (int k = 0; k < kSlotsAtOnce; ++k) {
      const int32_t slot = lru.at[k];
      given.at[k] = static_cast<uint16_t>(slot);
      // A slot that is named wrongly stays as well: it is never given away.
      uint32_t stay = 1;
      if (KVIO_RARELY(static_cast<uint32_t>(slot) >= static_cast<uint32_t>(p.hot_slots))) {
        env.note(SwapInArgument::kLru, j + k, slot);
      } else {
        stay = slot_hits[slot];
      }
      if (j + k >= p.hot_slots) stay = 0;
      hits += static_cast<int32_t>(stay);
      stays |= stay << k;
    }
    w.lru[t.own(r)] = given;
    w.stays[t.own(r)] = static_cast<uint8_t>(stays);
  }
  return hits;
}

// How the hot slots are used.
struct Use {
  int32_t leaving;  // slots that do not stay
  int32_t taken;    // those of them that misses take: fewer than misses only where lru_slots names some wrongly
};
KVIO_STEP Use use_of(const ResolveParams& p, int32_t hits, int32_t misses) {
  const int32_t leaving = p.hot_slots - hits;
  return {leaving, misses < leaving ? misses : leaving};
}

// The slots in their new order: those that left and were not taken, those that were taken, those that stayed. `hits`
// are of the threads before this one.
KVIO_STEP void place(const ResolveParams& p, const Workspace& w, const Thread& t, int32_t hits, const Use& use) {
  const int32_t rounds = p.layout.slot_rounds;
  const int32_t begin = first_of<kSlotsAtOnce>(t, rounds);
  uint16_t* order = &w.order->at[0];
  KVIO_ROLLED for (int32_t r = 0; r < rounds; ++r) {
    const int32_t j = begin + r * kSlotsAtOnce;
    const PerSlot<uint16_t> slots = w.lru[t.own(r)];
    const uint32_t stays = w.stays[t.own(r)];
    KVIO_UNROLLED for (int k = 0; k < kSlotsAtOnce; ++k) {
      const int32_t stay = static_cast<int32_t>(stays >> k & 1);
      const int32_t turn = j + k - hits;
      const int32_t left = turn < use.taken ? use.leaving - use.taken + turn : turn - use.taken;
      const int32_t to = stay != 0 ? use.leaving + hits : left;
      hits += stay;
      if (j + k < p.hot_slots) order[to] = slots.at[k];
    }
  }
}

// Misses take the slots that leave, least recently used first. A slot whose own location is bad stays empty.
template <class Env>
KVIO_STEP void assign(Env& env, const ResolveParams& p, const Workspace& w, const Job& job, const Thread& t,
                      int32_t misses, const Use& use) {
  const uint16_t* order = &w.order->at[0];
  const int32_t* locs = &w.locs->at[0];
  KVIO_ROLLED for (int32_t m = t.number; m < misses; m += t.count) {
    const int32_t token = w.miss_dst[m];
    int32_t given = -1;
    int32_t loc = -1;
    if (m < use.taken) {
      const uint16_t slot = order[use.leaving - use.taken + m];
      given = locs[slot];
      loc = checked_loc(env, p, given, slot, SwapInArgument::kDeviceLocs);
      if (job.records) job.tokens[slot] = loc >= 0 ? token : kNoToken;
    }
    w.miss_dst[m] = loc;
    if (!job.records) continue;
    job.out[w.missing[m]] = loc;
    if (p.miss_count.data == nullptr) continue;
    row_of(p.miss_src, job.batch_row)[m] = w.miss_src[m];
    row_of(p.miss_dst, job.batch_row)[m] = given;
  }
  if (!job.records) return;
  const int32_t rounds = p.layout.slot_rounds;
  KVIO_ROLLED for (int32_t r = 0; r < rounds; ++r) {
    const PerSlot<uint16_t> slots = w.order[t.own(r)];
    store_pack<kSlotsAtOnce>(p.packed_slots, reinterpret_cast<uint16_t*>(job.lru), t.own(r) * kSlotsAtOnce, p.hot_slots,
                             slots);
  }
  if (t.number == 0) record_misses(p, job.batch_row, misses);
}

// The two steps after it where tokens are repeated: who asked tells, and the others are told.
KVIO_STEP void tell(const ResolveParams& p, const Workspace& w, const Thread& t, int32_t m) {
  const int32_t rounds = p.layout.entry_rounds;
  KVIO_ROLLED for (int32_t r = 0; r < rounds; ++r) {
    const PerEntry<uint8_t> kinds = w.kinds[t.own(r)];
    KVIO_UNROLLED for (int k = 0; k < kEntriesAtOnce; ++k) {
      if (kinds.at[k] == kMisses) w.values[w.home[t.own(r)].at[k]] = w.miss_dst[m++];
      if (kinds.at[k] == kNoHostLoc) w.values[w.home[t.own(r)].at[k]] = -1;
    }
  }
}
KVIO_STEP void repeat(const ResolveParams& p, const Workspace& w, const Job& job, const Thread& t) {
  const int32_t rounds = p.layout.entry_rounds;
  const int32_t begin = first_of<kEntriesAtOnce>(t, rounds);
  KVIO_ROLLED for (int32_t r = 0; r < rounds; ++r) {
    const PerEntry<uint8_t> kinds = w.kinds[t.own(r)];
    KVIO_UNROLLED for (int k = 0; k < kEntriesAtOnce; ++k) {
      if (kinds.at[k] != kWaits) continue;
      job.out[begin + r * kEntriesAtOnce + k] = w.values[w.home[t.own(r)].at[k]];
    }
  }
}

}  // namespace kvio::gpu
