// The `copy_engine` backend: driver copies, no SM.
//
// Work goes to the caller's own stream. A stream of ours, forked and joined by events, would copy in the same order,
// since the caller's stream has to wait for the end of the copies either way, and would cost two event records and two
// waits a call. Only the legacy default stream, where the driver refuses batches, is forked from.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "gpu/driver.h"
#include "gpu/platform.h"
#include "plan/copy_plan.h"
#include "request/request.h"

namespace kvio::gpu {

// Takes copies one by one and enqueues them: batch by batch, so that the first ones run while later ones are planned.
// Copies of one submitter have no order among themselves.
class CopySubmitter {
 public:
  CopySubmitter(const char* op, BatchSides sides, const CopyEngineRoute& route, Stream stream);

  // Both ranges lie inside one allocation or driver registration each. Host memory is named by its host address.
  void add(const CopyEntry& entry) {
    const uint64_t dst = reinterpret_cast<uint64_t>(entry.dst);
    const uint64_t src = reinterpret_cast<uint64_t>(entry.src);
    const size_t nbytes = static_cast<size_t>(entry.nbytes);
    if (!batched_) {
      copy_one(dst, src, nbytes);
      return;
    }
    dst_.push_back(dst);
    src_.push_back(src);
    nbytes_.push_back(nbytes);
    if (nbytes_.size() >= batch_entries_) submit();
  }

  // Enqueues what is left. Nothing is enqueued after it, and what was added is not enqueued without it.
  void finish();

 private:
  void submit();
  void copy_one(uint64_t dst, uint64_t src, size_t nbytes);

  const char* op_;
  BatchSides sides_;
  Stream stream_;
  bool batched_;
  size_t batch_entries_ = 0;
  std::vector<uint64_t> dst_;
  std::vector<uint64_t> src_;
  std::vector<size_t> nbytes_;
};

// Enqueues every copy of `request`, whose indices are on the CPU and checked and whose host buffers still have their
// host addresses, on `stream`. Throws, before anything is enqueued, on a host tensor that is not page-locked. Index
// values are read before it returns; a captured graph has them frozen in.
void launch_copy_engine(const char* op, const TransferRequest& request, const GpuFacts& gpu, Stream stream);

// What launch_copy_engine would do, as text lines. The same errors, nothing enqueued.
std::string explain_copy_engine(const char* op, const TransferRequest& request, const GpuFacts& gpu);

// Enqueues the byte copies of a checked request on `stream`.
void launch_byte_copies(const char* op, const MemcpyBatchRequest& request, Stream stream);

// Batches that the driver refused since the process began, whose copies were then made one by one.
int64_t refused_batches();

}  // namespace kvio::gpu
