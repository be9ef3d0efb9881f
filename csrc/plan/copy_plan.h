// What the copy engines are asked to do: a list of byte ranges, each in one piece on both sides. Pure host code.
//
// The driver takes about 0.8 us of CPU for an entry whatever its size, so an entry must be as long as memory allows:
// rows that follow each other, whole pages, and, where both pools keep a page's layers side by side, all of them. The
// plan itself is walked, not stored: the first copies run while later entries are still being worked out.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "plan/backend.h"
#include "request/request.h"

namespace kvio {

struct CopyEntry {
  char* dst;
  const char* src;
  int64_t nbytes;
};

// Slots that are consecutive on both sides and stay inside one page of each: rows that are one token stride apart.
struct Stretch {
  int64_t dst_offset;  // of the first slot in any buffer of the group
  int64_t src_offset;
  int64_t num_slots;
};

// The index positions of `request`, whose indices are on the CPU and checked, in order and as long as they can be.
std::vector<Stretch> find_stretches(const TransferRequest& request, const BufferGroup& group);

// How the pieces of one stretch are walked, in all buffers that one nest serves: the innermost dim is the one whose
// steps are shortest, so that pieces which follow each other in memory come one after the other.
struct CopyNest {
  struct Dim {
    int64_t count = 1;
    int64_t dst_stride = 0;
    int64_t src_stride = 0;
  };
  char* dst = nullptr;          // of the first buffer
  const char* src = nullptr;    // of the same buffer
  int64_t block_bytes = 0;      // in one piece on both sides
  bool slots_in_block = false;  // blocks of a stretch's slots follow each other on both sides
  int slot_dim = -1;            // which of `dims` counts the slots, whose count is the stretch's
  Dim dims[3];                  // outermost first
};

// One nest a buffer, but one for several buffers that are equally far apart on both sides while each begins inside the
// one before: layers of a token-major or page-wise pool. Buffers that do not overlap like that may lie in memory of
// another allocation even where addresses follow each other, and a driver copy must not span two.
std::vector<CopyNest> make_copy_nests(const BufferGroup& group);

// Calls piece(dst, src, nbytes) for every block of a stretch. The nest takes on the stretch's count of slots.
template <class Piece>
void walk_stretch(CopyNest& nest, const Stretch& stretch, Piece piece) {
  const int64_t nbytes = nest.slots_in_block ? nest.block_bytes * stretch.num_slots : nest.block_bytes;
  if (nest.slot_dim >= 0) nest.dims[nest.slot_dim].count = stretch.num_slots;
  char* dst = nest.dst + stretch.dst_offset;
  const char* src = nest.src + stretch.src_offset;
  const auto& [outer, middle, inner] = nest.dims;
  for (int64_t i = 0; i < outer.count; ++i) {
    for (int64_t j = 0; j < middle.count; ++j) {
      char* to = dst + i * outer.dst_stride + j * middle.dst_stride;
      const char* from = src + i * outer.src_stride + j * middle.src_stride;
      for (int64_t k = 0; k < inner.count; ++k) piece(to + k * inner.dst_stride, from + k * inner.src_stride, nbytes);
    }
  }
}

// Calls emit(CopyEntry) for all groups and buffers of a request with checked CPU indices. Entries cover every byte once
// and no other byte. One grows over the next piece only where that follows on both sides.
template <class Emit>
void for_each_copy_entry(const TransferRequest& request, Emit emit) {
  for (const BufferGroup& group : request.groups) {
    if (group.dst.row_bytes() == 0) continue;
    const std::vector<Stretch> stretches = find_stretches(request, group);
    for (CopyNest nest : make_copy_nests(group)) {
      CopyEntry pending{nullptr, nullptr, 0};
      for (const Stretch& stretch : stretches) {
        walk_stretch(nest, stretch, [&](char* dst, const char* src, int64_t nbytes) {
          if (dst == pending.dst + pending.nbytes && src == pending.src + pending.nbytes) {
            pending.nbytes += nbytes;
            return;
          }
          if (pending.nbytes > 0) emit(pending);
          pending = {dst, src, nbytes};
        });
      }
      if (pending.nbytes > 0) emit(pending);
    }
  }
}

// Calls emit(CopyEntry) for the parts of `entry` that stay inside one driver registration on each side: a copy across
// two is an invalid argument. The rooms tell how many bytes of an entry's side may be copied at once from its start on.
template <class DstRoom, class SrcRoom, class Emit>
void split_copy_entry(CopyEntry entry, DstRoom dst_room, SrcRoom src_room, Emit emit) {
  while (entry.nbytes > 0) {
    const int64_t take = std::min({entry.nbytes, dst_room(entry), src_room(entry)});
    emit(CopyEntry{entry.dst, entry.src, take});
    entry.dst += take;
    entry.src += take;
    entry.nbytes -= take;
  }
}

// How entries are cut into driver calls. A call starts to copy only when all of it has been submitted, so the first one
// is small and the next ones grow no faster than the engine works off what it has: an entry of 64 KiB takes 1.2 us to
// copy and 0.9 us to submit.
struct BatchPolicy {
  int64_t first = 64;           // entries
  int64_t growth_percent = 25;  // of one batch over the one before
  int64_t most = 512;
};

// Larger calls fault or hang on some drivers.
constexpr int64_t kMaxBatchEntries = 8192;

// Entries of the batch that follows one of `previous` entries; 0 for the first.
int64_t next_batch_entries(int64_t previous, const BatchPolicy& policy = BatchPolicy());

// Sizes of all batches of `entries` entries.
std::vector<int64_t> cut_into_batches(int64_t entries, const BatchPolicy& policy = BatchPolicy());

// How entries reach the copy engines.
struct CopyEngineRoute {
  bool batched;                 // batched driver calls, else one asynchronous copy an entry
  bool forked;                  // through a stream of the library's own, because the caller's one is refused
  const char* why_not_batched;  // null when batched
};

// `alias_differs`: the GPU knows some host memory of the call under another address than the CPU.
CopyEngineRoute copy_engine_route(const GpuFacts& gpu, bool alias_differs);
CopyEngineRoute copy_engine_route(const TransferRequest& request, const GpuFacts& gpu, bool alias_differs);

// A line of explain.
std::string describe(const CopyEngineRoute& route);

}  // namespace kvio
