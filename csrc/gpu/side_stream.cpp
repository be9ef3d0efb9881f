#include "gpu/side_stream.h"

#include <memory>
#include <mutex>
#include <vector>

#include "gpu/stream.h"

namespace kvio::gpu {
namespace {

std::mutex leases_mutex;
std::vector<SideStream::Lease*>& idle_leases() {
  static auto* leases = new std::vector<SideStream::Lease*>();  // outlives every other static
  return *leases;
}

SideStream::Lease* make_lease(const char* op, int device) {
  auto lease = std::make_unique<SideStream::Lease>();
  lease->device = device;
  check(op, "creating a stream", cudaStreamCreateWithFlags(&lease->stream, cudaStreamNonBlocking));
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
  cudaGetLastError();
  // An event that was recorded into a graph says nothing of the stream any more.
  return error == cudaErrorCapturedEvent;
}

SideStream::Lease* take_lease(const char* op, int device) {
  // Neither query nor creation touches what some other thread may be capturing.
  const RelaxedCapture relaxed;
  {
    const std::lock_guard<std::mutex> lock(leases_mutex);
    auto& idle = idle_leases();
    for (auto it = idle.begin(); it != idle.end(); ++it) {
      if ((*it)->device != device || !is_idle(**it)) continue;
      SideStream::Lease* taken = *it;
      idle.erase(it);
      return taken;
    }
  }
  return make_lease(op, device);
}

}  // namespace

SideStream::SideStream(const char* op, int device) : op_(op), lease_(take_lease(op, device)) {}

SideStream::~SideStream() {
  // Without its mark the stream could be reused too early: it is given up.
  if (cudaEventRecord(lease_->done, lease_->stream) != cudaSuccess) {
    cudaGetLastError();
    return;
  }
  const std::lock_guard<std::mutex> lock(leases_mutex);
  idle_leases().push_back(lease_);
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

}  // namespace kvio::gpu
