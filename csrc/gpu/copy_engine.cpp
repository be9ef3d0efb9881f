#include "gpu/copy_engine.h"

#include <atomic>
#include <memory>
#include <mutex>
#include <sstream>

#include "gpu/host_memory.h"
#include "gpu/stream.h"

namespace kvio::gpu {
namespace {

std::atomic<int64_t> refusals{0};

std::mutex branches_mutex;
std::vector<ForkedStream::Branch*>& idle_branches() {
  static auto* branches = new std::vector<ForkedStream::Branch*>();  // outlives every other static
  return *branches;
}

ForkedStream::Branch* make_branch(const char* op, int device) {
  const RelaxedCapture relaxed;
  auto branch = std::make_unique<ForkedStream::Branch>();
  branch->device = device;
  check(op, "creating a stream", cudaStreamCreateWithFlags(&branch->stream, cudaStreamNonBlocking));
  check(op, "creating an event", cudaEventCreateWithFlags(&branch->forked, cudaEventDisableTiming));
  check(op, "creating an event", cudaEventCreateWithFlags(&branch->joined, cudaEventDisableTiming));
  return branch.release();
}

// A branch belongs to one call at a time. It may still have the work of an earlier call: that call was joined to the
// same legacy stream that this one forks from, so this one has to come after it anyway.
ForkedStream::Branch* take_branch(const char* op, int device) {
  {
    const std::lock_guard<std::mutex> lock(branches_mutex);
    auto& idle = idle_branches();
    for (auto it = idle.begin(); it != idle.end(); ++it) {
      if ((*it)->device != device) continue;
      ForkedStream::Branch* taken = *it;
      idle.erase(it);
      return taken;
    }
  }
  return make_branch(op, device);
}

void give_back(ForkedStream::Branch* branch) {
  const std::lock_guard<std::mutex> lock(branches_mutex);
  idle_branches().push_back(branch);
}

// The driver does not do batches here. Should it have enqueued some copies before it said so, they are made again
// behind them, which changes no byte.
bool is_refusal(Error error) { return error == cudaErrorInvalidValue || error == cudaErrorNotSupported; }

int side_of(DeviceKind kind, int device) { return kind == DeviceKind::kCpu ? kHostSide : device; }

// The host side of a call: page-locked addresses and where registrations end.
class HostSide {
 public:
  HostSide(const char* op, const char* argument, DeviceKind device)
      : argument_(argument), on_host_(device == DeviceKind::kCpu), translator_(op) {}

  // Throws when the range is host memory that is not page-locked.
  void accept(int64_t position, const char* data, int64_t extent) {
    if (on_host_) alias_differs_ |= translator_.device_address(argument_, position, data, extent) != data;
  }

  // Bytes that one driver copy may take from the start of an entry that lies in accepted memory.
  int64_t room(const CopyEntry& entry, const char* data) {
    if (!on_host_) return entry.nbytes;
    translator_.device_address(argument_, 0, data, entry.nbytes);
    return translator_.bytes_in_chunk(data);
  }

  bool alias_differs() const { return alias_differs_; }

 private:
  const char* argument_;
  bool on_host_;
  bool alias_differs_ = false;
  HostTranslator translator_;
};

struct HostSides {
  HostSides(const char* op, DeviceKind dst_device, DeviceKind src_device)
      : dst(op, "dst", dst_device), src(op, "src", src_device) {}

  bool alias_differs() const { return dst.alias_differs() || src.alias_differs(); }

  template <class Emit>
  void split(const CopyEntry& entry, Emit emit) {
    split_copy_entry(
        entry, [&](const CopyEntry& rest) { return dst.room(rest, rest.dst); },
        [&](const CopyEntry& rest) { return src.room(rest, rest.src); }, emit);
  }

  HostSide dst;
  HostSide src;
};

HostSides accept_buffers(const char* op, const TransferRequest& request) {
  HostSides host(op, request.dst_device, request.src_device);
  for (const BufferGroup& group : request.groups) {
    if (group.dst.row_bytes() == 0) continue;
    for (size_t b = 0; b < group.dst_base.size(); ++b) {
      host.dst.accept(group.position[b], group.dst_base[b], group.dst_extent);
      host.src.accept(group.position[b], group.src_base[b], group.src_extent);
    }
  }
  return host;
}

}  // namespace

GpuFacts copy_facts(Stream stream) {
  GpuFacts facts;
  facts.capturing = is_capturing(stream);
  facts.legacy_stream = is_legacy_stream(stream);
  facts.has_batch_call = has_batch_copy();
  return facts;
}

ForkedStream::ForkedStream(const char* op, int device, Stream stream, bool wanted) : op_(op), caller_(stream) {
  if (!wanted) return;
  Branch* branch = take_branch(op, device);
  Error error = cudaEventRecord(branch->forked, stream);
  if (error == cudaSuccess) error = cudaStreamWaitEvent(branch->stream, branch->forked, 0);
  if (error != cudaSuccess) give_back(branch);
  check(op, "forking a stream from the legacy default stream", error);
  branch_ = branch;
}

Error ForkedStream::try_join() {
  if (branch_ == nullptr) return cudaSuccess;
  Branch* branch = branch_;
  branch_ = nullptr;
  Error error = cudaEventRecord(branch->joined, branch->stream);
  if (error == cudaSuccess) error = cudaStreamWaitEvent(caller_, branch->joined, 0);
  if (error == cudaSuccess) give_back(branch);  // else it has work that nobody waits for: it is given up
  return error;
}

void ForkedStream::join() { check(op_, "joining a stream to the legacy default stream", try_join()); }

ForkedStream::~ForkedStream() {
  if (try_join() != cudaSuccess) cudaGetLastError();
}

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
  HostSides host = accept_buffers(op, request);
  const CopyEngineRoute route = copy_engine_route(request, gpu, host.alias_differs());
  const int device = request.gpu_index;
  ForkedStream branch(op, device, stream, route.forked);
  CopySubmitter submitter(op, {side_of(request.dst_device, device), side_of(request.src_device, device)}, route,
                          branch.get());
  for_each_copy_entry(
      request, [&](const CopyEntry& entry) { host.split(entry, [&](const CopyEntry& part) { submitter.add(part); }); });
  submitter.finish();
  branch.join();
}

std::string explain_copy_engine(const char* op, const TransferRequest& request, const GpuFacts& gpu) {
  HostSides host = accept_buffers(op, request);
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
  HostSides host(op, request.dst_device, request.src_device);
  for (const ByteCopy& copy : request.copies) {
    host.dst.accept(copy.dst_position, copy.dst, copy.nbytes);
    host.src.accept(copy.src_position, copy.src, copy.nbytes);
  }
  const int device = request.gpu_index;
  const CopyEngineRoute route = copy_engine_route(copy_facts(stream), host.alias_differs());
  ForkedStream branch(op, device, stream, route.forked);
  CopySubmitter submitter(op, {side_of(request.dst_device, device), side_of(request.src_device, device)}, route,
                          branch.get());
  for (const ByteCopy& copy : request.copies) {
    host.split({copy.dst, copy.src, copy.nbytes}, [&](const CopyEntry& part) { submitter.add(part); });
  }
  submitter.finish();
  branch.join();
}

int64_t refused_batches() { return refusals.load(std::memory_order_relaxed); }

}  // namespace kvio::gpu
