// What one CTA does for one request of kvio::swap_in, as steps that every thread takes between two barriers. A step
// reads nothing that another thread writes in it, except through Env's atomic operations, so the outcome depends on no
// order of threads: tests/native runs the same source with its threads in any order.
//
// Steps: stage -> | insert -> | mark -> | count, sum -> order -> | assign -> | finish, with a barrier at every bar, and
// around the sum over all threads. `Env` has the atomic operations and takes faults; compiled for a GPU or a CPU.
#pragma once

#include <cstdint>

#include "request/swap_in_request.h"

#if defined(__CUDACC__) || defined(__HIP__)
#define KVIO_STEP __device__ __forceinline__
#define KVIO_ANYWHERE __host__ __device__ __forceinline__
#else
#define KVIO_STEP inline
#define KVIO_ANYWHERE inline
#endif

namespace kvio::gpu {

// Which argument a fault is about, counted from FaultOp::kSwapIn as in request/fault_subject.cpp.
enum class SwapInArgument : int32_t { kTopK, kHostLocs, kDeviceLocs, kLru, kRequest, kDirectLocs };

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
  int32_t hash_bits;
};

// Entries of the table that finds a token among the selected ones: at least twice as many as can be in it.
constexpr int32_t hash_bits_for(int64_t top_k) {
  int32_t bits = 5;
  while ((int64_t{1} << bits) < 2 * top_k) ++bits;
  return bits;
}

// A CTA's memory, shared or not. Arrays that are done with serve again: miss_src lies where keys were, miss_dst where
// slot_tokens were.
struct Workspace {
  int64_t* host;         // [top_k] host location of an entry that may have to be loaded
  int32_t* keys;         // [hash] token, kNoToken for none
  int32_t* first;        // [hash] lowest entry that selects it
  int32_t* tokens;       // [top_k] token of an entry that is looked for, kNoToken for others
  int32_t* result;       // [top_k] device location, kPending while it is not known
  int32_t* home;         // [top_k] where in the table the token is
  int32_t* slot_tokens;  // [hot_slots]
  int32_t* slot_locs;    // [hot_slots + 1]
  uint16_t* lru;         // [hot_slots] slots as given; kHit is set where a slot stays
  uint16_t* order;       // [hot_slots] slots to be given away, then those that stay, both from least recently used
  int64_t* miss_src;
  int32_t* miss_dst;
};

constexpr int32_t kNoToken = -1;
constexpr int32_t kPending = -2;
constexpr int32_t kNoEntry = 0x7fffffff;
constexpr uint16_t kHit = 0x8000;

// Where the arrays of a workspace are, one behind the other from `base` on, and where it ends.
struct WorkspaceLayout {
  Workspace arrays;
  uintptr_t end;
};

KVIO_ANYWHERE WorkspaceLayout lay_out_workspace(uintptr_t base, int64_t top_k, int64_t hot_slots, int32_t hash_bits) {
  const int64_t hash = int64_t{1} << hash_bits;
  const auto take = [&base](int64_t bytes) {
    void* at = reinterpret_cast<void*>(base);
    base += static_cast<uintptr_t>((bytes + 15) / 16 * 16);
    return at;
  };
  Workspace w;
  w.host = static_cast<int64_t*>(take(8 * top_k));
  w.keys = static_cast<int32_t*>(take(4 * hash));
  w.first = static_cast<int32_t*>(take(4 * hash));
  w.tokens = static_cast<int32_t*>(take(4 * top_k));
  w.result = static_cast<int32_t*>(take(4 * top_k));
  w.home = static_cast<int32_t*>(take(4 * top_k));
  w.slot_tokens = static_cast<int32_t*>(take(4 * hot_slots));
  w.slot_locs = static_cast<int32_t*>(take(4 * (hot_slots + 1)));
  w.lru = static_cast<uint16_t*>(take(2 * hot_slots));
  w.order = static_cast<uint16_t*>(take(2 * hot_slots));
  w.miss_src = reinterpret_cast<int64_t*>(w.keys);
  w.miss_dst = w.slot_tokens;
  return {w, base};
}

inline int64_t workspace_bytes(int64_t top_k, int64_t hot_slots, int32_t hash_bits) {
  return static_cast<int64_t>(lay_out_workspace(0, top_k, hot_slots, hash_bits).end);
}

KVIO_STEP Workspace workspace_at(char* base, const ResolveParams& p) {
  return lay_out_workspace(reinterpret_cast<uintptr_t>(base), p.top_k, p.hot_slots, p.hash_bits).arrays;
}

// A row of the batch.
struct Job {
  int32_t batch_row;
  int64_t request;  // row of the state tensors
  int64_t seq_len;
};

// A thread among those of its CTA.
struct Thread {
  int32_t number;
  int32_t count;
};

// The stretch of `total` things that a thread takes where their order counts.
struct Share {
  int32_t begin;
  int32_t end;
};
KVIO_STEP Share share_of(const Thread& t, int32_t total) {
  const int32_t each = (total + t.count - 1) / t.count;
  const int32_t begin = t.number * each < total ? t.number * each : total;
  return {begin, begin + each < total ? begin + each : total};
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
KVIO_STEP int32_t checked_loc(Env& env, const ResolveParams& p, int32_t loc, int64_t position,
                              SwapInArgument argument) {
  if (loc >= 0 && loc < p.device_slots) return loc;
  env.fault(argument, position, loc, p.device_slots);
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
  return checked_loc(env, p, loc, at_row(job.request, token), SwapInArgument::kDeviceLocs);
}

// What is known of entry i without looking at the hot buffer: its result, or kPending and its host location.
template <class Env>
KVIO_STEP int32_t stage_entry(Env& env, const ResolveParams& p, const Job& job, int32_t i, int32_t token,
                              int64_t* host) {
  if (token < 0) return -1;
  if (token >= job.seq_len || token >= p.max_len) {
    const int64_t limit = job.seq_len < p.max_len ? job.seq_len : p.max_len;
    env.fault(SwapInArgument::kTopK, at_row(job.batch_row, i), token, limit);
    return -1;
  }
  if (p.device_locs.data != nullptr) {
    const int32_t loc = row_of(p.device_locs, job.request)[token];
    if (loc >= 0) return checked_loc(env, p, loc, at_row(job.request, token), SwapInArgument::kDirectLocs);
  }
  if (token == job.seq_len - 1) {
    const int32_t loc = row_of(p.device_buffer_locs, job.request)[p.hot_slots];
    return checked_loc(env, p, loc, at_row(job.request, p.hot_slots), SwapInArgument::kDeviceLocs);
  }
  *host = host_loc_of(p.host_cache_locs, job.request, token);
  return kPending;
}

template <class Env>
KVIO_STEP void stage(Env& env, const ResolveParams& p, const Workspace& w, const Job& job, const Thread& t) {
  const int32_t* selected = row_of(p.top_k_tokens, job.batch_row);
  for (int32_t i = t.number; i < p.top_k; i += t.count) {
    const int32_t token = selected[i];
    int64_t host = 0;
    const int32_t result = stage_entry(env, p, job, i, token, &host);
    w.result[i] = result;
    w.tokens[i] = result == kPending ? token : kNoToken;
    w.host[i] = host;
  }
  for (int32_t h = t.number; h < 1 << p.hash_bits; h += t.count) {
    w.keys[h] = kNoToken;
    w.first[h] = kNoEntry;
  }
  const int32_t* tokens = row_of(p.device_buffer_tokens, job.request);
  const int32_t* locs = row_of(p.device_buffer_locs, job.request);
  const int16_t* lru = row_of(p.lru_slots, job.request);
  for (int32_t s = t.number; s < p.hot_slots; s += t.count) {
    w.slot_tokens[s] = tokens[s];
    w.slot_locs[s] = locs[s];
    w.lru[s] = static_cast<uint16_t>(lru[s]);
  }
}

KVIO_STEP uint32_t bucket_of(const ResolveParams& p, int32_t token) {
  return static_cast<uint32_t>(token) * 2654435761u >> (32 - p.hash_bits);
}

template <class Env>
KVIO_STEP void insert(Env& env, const ResolveParams& p, const Workspace& w, const Thread& t) {
  const uint32_t mask = (1u << p.hash_bits) - 1;
  for (int32_t i = t.number; i < p.top_k; i += t.count) {
    const int32_t token = w.tokens[i];
    if (token == kNoToken) continue;
    uint32_t h = bucket_of(p, token);
    while (true) {
      const int32_t before = env.claim(&w.keys[h], kNoToken, token);
      if (before == kNoToken || before == token) break;
      h = (h + 1) & mask;
    }
    env.lower(&w.first[h], i);
    w.home[i] = static_cast<int32_t>(h);
  }
}

// The lowest entry that selects `token`, -1 for none.
KVIO_STEP int32_t find_entry(const ResolveParams& p, const Workspace& w, int32_t token) {
  const uint32_t mask = (1u << p.hash_bits) - 1;
  for (uint32_t h = bucket_of(p, token); w.keys[h] != kNoToken; h = (h + 1) & mask) {
    if (w.keys[h] == token) return w.first[h];
  }
  return -1;
}

// Hot slots that hold a selected token stay, and answer it. One that is named wrongly stays as well: it is never given
// away.
template <class Env>
KVIO_STEP void mark(Env& env, const ResolveParams& p, const Workspace& w, const Job& job, const Thread& t) {
  for (int32_t j = t.number; j < p.hot_slots; j += t.count) {
    const uint16_t slot = w.lru[j];
    if (slot >= p.hot_slots) {
      env.fault(SwapInArgument::kLru, at_row(job.request, j), static_cast<int16_t>(slot), p.hot_slots);
      w.lru[j] = slot | kHit;
      continue;
    }
    const int32_t token = w.slot_tokens[slot];
    const int32_t entry = token >= 0 ? find_entry(p, w, token) : -1;
    if (entry < 0) continue;
    w.result[entry] = checked_loc(env, p, w.slot_locs[slot], at_row(job.request, slot), SwapInArgument::kDeviceLocs);
    w.lru[j] = slot | kHit;
  }
}

KVIO_STEP bool is_first(const Workspace& w, int32_t i) { return w.first[w.home[i]] == i; }

// An entry that has to be loaded. Its host location is inside its pool once `count` is through.
KVIO_STEP bool is_miss(const Workspace& w, int32_t i) {
  return w.tokens[i] != kNoToken && w.result[i] == kPending && is_first(w, i);
}

// Of a thread, or of all threads before it, or of all.
struct Tally {
  int32_t hits;  // slots that stay
  int32_t misses;
};

template <class Env>
KVIO_STEP Tally count(Env& env, const ResolveParams& p, const Workspace& w, const Job& job, const Thread& t) {
  Tally tally{};
  const Share slots = share_of(t, p.hot_slots);
  for (int32_t j = slots.begin; j < slots.end; ++j) tally.hits += (w.lru[j] & kHit) != 0;
  const Share entries = share_of(t, p.top_k);
  for (int32_t i = entries.begin; i < entries.end; ++i) {
    if (!is_miss(w, i)) continue;
    if (w.host[i] >= 0 && w.host[i] < p.host_slots) {
      ++tally.misses;
      continue;
    }
    env.fault(SwapInArgument::kHostLocs, at_row(job.request, w.tokens[i]), w.host[i], p.host_slots);
    w.result[i] = -1;
  }
  return tally;
}

KVIO_STEP void order(const ResolveParams& p, const Workspace& w, const Tally& before, const Tally& all,
                     const Thread& t) {
  const Share slots = share_of(t, p.hot_slots);
  int32_t stays = p.hot_slots - all.hits + before.hits;
  int32_t leaves = slots.begin - before.hits;
  for (int32_t j = slots.begin; j < slots.end; ++j) {
    const bool hit = (w.lru[j] & kHit) != 0;
    w.order[hit ? stays++ : leaves++] = w.lru[j] & static_cast<uint16_t>(~kHit);
  }
}

// Misses take the slots that leave, least recently used first. A slot whose own location is bad stays empty.
template <class Env>
KVIO_STEP void assign(Env& env, const ResolveParams& p, const Workspace& w, const Job& job, const Tally& before,
                      const Tally& all, const Thread& t) {
  int32_t* resident = row_of(p.device_buffer_tokens, job.request);
  const int32_t leaving = p.hot_slots - all.hits;
  const Share entries = share_of(t, p.top_k);
  int32_t m = before.misses;
  for (int32_t i = entries.begin; i < entries.end; ++i) {
    if (!is_miss(w, i)) continue;
    int32_t given = -1;
    int32_t loc = -1;
    // Fewer slots than misses only where lru_slots names some wrongly.
    if (m < leaving) {
      const uint16_t slot = w.order[m];
      given = w.slot_locs[slot];
      loc = checked_loc(env, p, given, at_row(job.request, slot), SwapInArgument::kDeviceLocs);
      resident[slot] = loc >= 0 ? w.tokens[i] : kNoToken;
    }
    w.result[i] = loc;
    w.miss_src[m] = w.host[i];
    w.miss_dst[m] = loc;
    if (p.plan.miss_count.data != nullptr) {
      row_of(p.plan.miss_src, job.batch_row)[m] = w.host[i];
      row_of(p.plan.miss_dst, job.batch_row)[m] = given;
    }
    ++m;
  }
}

// The answers, and the slots in their new order: those that left and were not taken, those that were taken, those that
// stayed.
KVIO_STEP void finish(const ResolveParams& p, const Workspace& w, const Job& job, const Tally& all, const Thread& t) {
  int32_t* out = row_of(p.top_k_device_locs, job.batch_row);
  for (int32_t i = t.number; i < p.top_k; i += t.count) {
    const bool again = w.tokens[i] != kNoToken && !is_first(w, i);
    out[i] = w.result[again ? w.first[w.home[i]] : i];
  }
  const int32_t leaving = p.hot_slots - all.hits;
  const int32_t taken = all.misses < leaving ? all.misses : leaving;
  int16_t* lru = row_of(p.lru_slots, job.request);
  for (int32_t j = t.number; j < p.hot_slots; j += t.count) {
    int32_t from = j;
    if (j < leaving) from = j + taken < leaving ? j + taken : j + taken - leaving;
    lru[j] = static_cast<int16_t>(w.order[from]);
  }
  if (t.number == 0) record_misses(p, job.batch_row, all.misses);
}

}  // namespace kvio::gpu
