#include "gpu/side_stream.h"

#include <algorithm>
#include <memory>
#include <mutex>
#include <vector>

#include "gpu/device_guard.h"
#include "gpu/stream.h"

namespace kvio::gpu {
namespace {

std::mutex leases_mutex;
std::vector<SideStream::Lease*>& idle_leases() {
  static auto* leases = new std::vector<SideStream::Lease*>();  // outlives every other static
  return *leases;
}

Stream make_stream(const char* op) {
  Stream stream = nullptr;
  check(op, "creating a stream", cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  return stream;
}

SideStream::Lease* make_lease(const char* op, int device) {
  auto lease = std::make_unique<SideStream::Lease>();
  lease->device = device;
  lease->stream = make_stream(op);
  for (Event& event : lease->events) {
    check(op, "creating an event", cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  }
  check(op, "creating an event", cudaEventCreateWithFlags(&lease->done, cudaEventDisableTiming));
  return lease.release();
}

// A stream that was drawn into a capture belongs to it until the capture ends, although its user is gone.
bool is_idle(const SideStream::Lease& lease) {
  if (is_capturing(lease.stream)) return false;
  const Error error = cudaEventQuery(lease.done);
  if (error == cudaSuccess) return true;
  (void)cudaGetLastError();
  // An event that was recorded into a graph says nothing of the stream any more.
  return error == cudaErrorCapturedEvent;
}

// First one whose last call was on the same stream: no query, and calls queued there share one lease instead of taking
// one each.
SideStream::Lease* find_lease(int device, Stream caller) {
  const std::lock_guard<std::mutex> lock(leases_mutex);
  auto& leases = idle_leases();
  const auto ours = [&](const SideStream::Lease* lease) { return lease->device == device && lease->caller == caller; };
  auto found = std::find_if(leases.begin(), leases.end(), ours);
  if (found == leases.end()) {
    const auto idle = [&](const SideStream::Lease* lease) { return lease->device == device && is_idle(*lease); };
    found = std::find_if(leases.begin(), leases.end(), idle);
  }
  if (found == leases.end()) return nullptr;
  SideStream::Lease* lease = *found;
  leases.erase(found);
  return lease;
}

SideStream::Lease* take_lease(const char* op, int device, Stream caller) {
  // Neither query nor creation touches what some other thread may be capturing.
  const RelaxedCapture relaxed;
  SideStream::Lease* lease = find_lease(device, caller);
  if (lease == nullptr) lease = make_lease(op, device);
  lease->caller = caller;
  return lease;
}

void give_back(SideStream::Lease* lease) {
  const std::lock_guard<std::mutex> lock(leases_mutex);
  idle_leases().push_back(lease);
}

}  // namespace

SideStream::SideStream(const char* op, int device, Stream caller)
    : op_(op), caller_(caller), lease_(take_lease(op, device, caller)) {
  Error error = cudaEventRecord(lease_->done, caller);
  if (error == cudaSuccess) error = cudaStreamWaitEvent(lease_->stream, lease_->done, 0);
  if (error != cudaSuccess) give_back(lease_);
  check(op, "forking a stream from the caller's", error);
}

Error SideStream::try_join() {
  if (lease_ == nullptr) return cudaSuccess;
  Lease* lease = lease_;
  lease_ = nullptr;
  Error error = cudaEventRecord(lease->done, lease->stream);
  if (error == cudaSuccess) error = cudaStreamWaitEvent(caller_, lease->done, 0);
  if (error == cudaSuccess) give_back(lease);  // else it has work that nobody waits for: it is given up
  return error;
}

void SideStream::join() { check(op_, "joining a stream to the caller's", try_join()); }

SideStream::~SideStream() {
  if (try_join() != cudaSuccess) (void)cudaGetLastError();
}

void SideStream::record(int event, Stream stream) {
  check(op_, "recording an event", cudaEventRecord(lease_->events[event], stream));
}

void SideStream::wait(int event, Stream stream) {
  check(op_, "waiting for an event", cudaStreamWaitEvent(stream, lease_->events[event], 0));
}

void SideStream::order(int event, Stream earlier, Stream later) {
  record(event, earlier);
  wait(event, later);
}

Stream create_stream(const char* op, int device) {
  const DeviceGuard guard(op, device);
  const RelaxedCapture relaxed;
  return make_stream(op);
}

}  // namespace kvio::gpu
