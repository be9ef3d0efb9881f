#include "gpu/copy_engine.h"

#include <atomic>
#include <optional>
#include <sstream>

#include "gpu/device_facts.h"
#include "gpu/host_sides.h"
#include "gpu/side_stream.h"
#include "gpu/stream.h"

namespace kvio::gpu {
namespace {

std::atomic<int64_t> refusals{0};

// The driver does not do batches here. Should it have enqueued some copies before it said so, they are made again
// behind them, which changes no byte.
bool is_refusal(Error error) { return error == cudaErrorInvalidValue || error == cudaErrorNotSupported; }

int side_of(DeviceKind kind, int device) { return kind == DeviceKind::kCpu ? kHostSide : device; }

// Calls submit(CopySubmitter&) and sees that what it adds is enqueued in the order of `stream`.
template <class Submit>
void submit_copies(const char* op, int device, BatchSides sides, const CopyEngineRoute& route, Stream stream,
                   Submit submit) {
  std::optional<SideStream> side;
  if (route.forked) side.emplace(op, device, stream);
  CopySubmitter submitter(op, sides, route, side ? side->get() : stream);
  submit(submitter);
  submitter.finish();
  if (side) side->join();
}

}  // namespace

CopySubmitter::CopySubmitter(const char* op, BatchSides sides, const CopyEngineRoute& route, Stream stream)
    : op_(op), sides_(sides), stream_(stream), batched_(route.batched) {
  if (!batched_) return;
  batch_entries_ = static_cast<size_t>(next_batch_entries(0));
  dst_.reserve(batch_entries_);
  src_.reserve(batch_entries_);
  nbytes_.reserve(batch_entries_);
}

void CopySubmitter::submit() {
  if (nbytes_.empty()) return;
  const Error error = batch_copy(dst_.data(), src_.data(), nbytes_.data(), nbytes_.size(), sides_, stream_);
  if (is_refusal(error)) {
    refusals.fetch_add(1, std::memory_order_relaxed);
    batched_ = false;
    for (size_t i = 0; i < nbytes_.size(); ++i) copy_one(dst_[i], src_[i], nbytes_[i]);
  } else {
    check(op_, "copying a batch", error);
  }
  dst_.clear();
  src_.clear();
  nbytes_.clear();
  batch_entries_ = static_cast<size_t>(next_batch_entries(static_cast<int64_t>(batch_entries_)));
}

void CopySubmitter::copy_one(uint64_t dst, uint64_t src, size_t nbytes) {
  check(op_, "copying",
        cudaMemcpyAsync(reinterpret_cast<void*>(dst), reinterpret_cast<const void*>(src), nbytes, cudaMemcpyDefault,
                        stream_));
}

void CopySubmitter::finish() { submit(); }

void launch_copy_engine(const char* op, const TransferRequest& request, const GpuFacts& gpu, Stream stream) {
  if (request.empty()) return;
  HostSides host = accept_host_buffers(op, request);
  const CopyEngineRoute route = copy_engine_route(request, gpu, host.alias_differs());
  const int device = request.gpu_index;
  const BatchSides sides = {side_of(request.dst_device, device), side_of(request.src_device, device)};
  submit_copies(op, device, sides, route, stream, [&](CopySubmitter& submitter) {
    const auto add = [&](const CopyEntry& part) { submitter.add(part); };
    for_each_copy_entry(request, [&](const CopyEntry& entry) { host.split(entry, add); });
  });
}

std::string explain_copy_engine(const char* op, const TransferRequest& request, const GpuFacts& gpu) {
  HostSides host = accept_host_buffers(op, request);
  const CopyEngineRoute route = copy_engine_route(request, gpu, host.alias_differs());
  int64_t entries = 0;
  for_each_copy_entry(request,
                      [&](const CopyEntry& entry) { host.split(entry, [&](const CopyEntry&) { ++entries; }); });
  std::ostringstream text;
  text << describe(route) << "\ndriver copies: " << entries;
  if (entries > 0) text << " of " << request.payload_bytes() / entries << " bytes on average";
  if (route.batched) text << " in " << cut_into_batches(entries).size() << " batches";
  if (refused_batches() > 0) text << "; the driver refused " << refused_batches() << " batches so far";
  text << "\n";
  return text.str();
}

void launch_byte_copies(const char* op, const MemcpyBatchRequest& request, Stream stream) {
  HostSides host(op, SideNames{"dst", "src"}, request.dst_device, request.src_device);
  for (const ByteCopy& copy : request.copies) {
    host.dst.accept(copy.dst_position, copy.dst, copy.nbytes);
    host.src.accept(copy.src_position, copy.src, copy.nbytes);
  }
  const int device = request.gpu_index;
  const GpuFacts gpu = gpu_facts(op, device, stream, is_capturing(stream));
  const BatchSides sides = {side_of(request.dst_device, device), side_of(request.src_device, device)};
  submit_copies(op, device, sides, copy_engine_route(gpu, host.alias_differs()), stream, [&](CopySubmitter& submitter) {
    const auto add = [&](const CopyEntry& part) { submitter.add(part); };
    for (const ByteCopy& copy : request.copies) host.split({copy.dst, copy.src, copy.nbytes}, add);
  });
}

int64_t refused_batches() { return refusals.load(std::memory_order_relaxed); }

}  // namespace kvio::gpu
