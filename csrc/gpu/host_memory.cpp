#include "gpu/host_memory.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <vector>

#include "error.h"
#include "gpu/device_guard.h"
#include "gpu/driver.h"
#include "gpu/platform.h"

namespace kvio::gpu {
namespace {

struct Registration {
  uintptr_t end = 0;
  uintptr_t chunk_bytes = 0;
  int64_t alias_delta = 0;        // device address less host address
  bool closing = false;           // host_unregister is waiting for the GPUs
  std::vector<uintptr_t> chunks;  // addresses handed to the driver, ascending
};

std::mutex registrations_mutex;
std::map<uintptr_t, Registration>& registrations() {
  static auto* map = new std::map<uintptr_t, Registration>();  // outlives every other static
  return *map;
}

// The registration of ours that holds `address`, if any; the caller holds the mutex.
const std::pair<const uintptr_t, Registration>* find_registration(uintptr_t address) {
  auto it = registrations().upper_bound(address);
  if (it == registrations().begin()) return nullptr;
  --it;
  return address < it->second.end ? &*it : nullptr;
}

// Undoes every chunk; returns the first error, if any.
Error unregister_chunks(const std::vector<uintptr_t>& chunks) {
  Error first = cudaSuccess;
  for (auto it = chunks.rbegin(); it != chunks.rend(); ++it) {
    const Error error = cudaHostUnregister(reinterpret_cast<void*>(*it));
    if (error != cudaSuccess) (void)cudaGetLastError();
    if (first == cudaSuccess) first = error;
  }
  return first;
}

// Waits for all work of the process on every GPU that it uses; returns the first error, if any.
Error wait_for_gpus(const char* op) {
  int devices = 0;
  Error first = cudaGetDeviceCount(&devices);
  for (int device = 0; device < devices; ++device) {
    if (!has_context(device)) continue;
    const DeviceGuard guard(op, device);
    const Error error = cudaDeviceSynchronize();
    if (error != cudaSuccess) (void)cudaGetLastError();
    if (first == cudaSuccess) first = error;
  }
  return first;
}

bool is_capture_error(Error error) {
  return error >= cudaErrorStreamCaptureUnsupported && error <= cudaErrorStreamCaptureWrongThread;
}

}  // namespace

void host_register(char* data, int64_t nbytes, int64_t chunk_bytes, int device_index) {
  constexpr const char* op = "host_register";
  if (chunk_bytes < 0) fail(op, "chunk_bytes is ", chunk_bytes, "; it needs 0 (one piece) or more");
  if (nbytes == 0) return;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(data);
  const uintptr_t end = begin + static_cast<uintptr_t>(nbytes);

  const std::lock_guard<std::mutex> lock(registrations_mutex);
  auto next = registrations().lower_bound(begin);
  if (next != registrations().end() && next->first == begin && next->second.end == end) return;
  const auto* before = find_registration(begin);
  if (before != nullptr || (next != registrations().end() && next->first < end)) {
    fail(op,
         "tensor overlaps memory that an earlier host_register call page-locked; it needs exactly that range (then "
         "nothing happens) or memory apart from it");
  }

  const DeviceGuard guard(op, device_index);
  const RelaxedCapture relaxed;
  Registration made;
  made.end = end;
  const uintptr_t step = chunk_bytes > 0 ? static_cast<uintptr_t>(chunk_bytes) : end - begin;
  made.chunk_bytes = step;
  int64_t delta = 0;
  for (uintptr_t at = begin; at < end; at += step) {
    const uintptr_t size = std::min(step, end - at);
    void* host = reinterpret_cast<void*>(at);
    Error error = cudaHostRegister(host, size, cudaHostRegisterPortable | cudaHostRegisterMapped);
    void* alias = nullptr;
    if (error == cudaSuccess) {
      made.chunks.push_back(at);
      error = cudaHostGetDevicePointer(&alias, host, 0);
    }
    if (error != cudaSuccess) (void)cudaGetLastError();
    const int64_t this_delta = static_cast<int64_t>(reinterpret_cast<uintptr_t>(alias) - at);
    if (error == cudaSuccess && at != begin && this_delta != delta) {
      (void)unregister_chunks(made.chunks);
      fail(op, "the device aliases of the chunks of tensor do not follow each other; it needs chunk_bytes=0 here");
    }
    if (error != cudaSuccess) {
      (void)unregister_chunks(made.chunks);
      if (error == cudaErrorHostMemoryAlreadyRegistered) {
        fail(op, "tensor lies in memory that is page-locked already, outside this library; it needs pageable memory");
      }
      check(op, ("page-locking " + std::to_string(nbytes) + " bytes of tensor").c_str(), error);
    }
    delta = this_delta;
  }
  made.alias_delta = delta;
  registrations().emplace(begin, std::move(made));
}

void host_unregister(char* data, int64_t nbytes, int device_index) {
  constexpr const char* op = "host_unregister";
  const uintptr_t begin = reinterpret_cast<uintptr_t>(data);
  {
    const std::lock_guard<std::mutex> lock(registrations_mutex);
    const auto it = registrations().find(begin);
    const uintptr_t end = begin + static_cast<uintptr_t>(nbytes);
    if (it == registrations().end() || it->second.end != end || it->second.closing) {
      fail(op, "tensor is not a range that host_register page-locked; it needs the tensor given to host_register");
    }
    it->second.closing = true;
  }
  // Without the lock: other threads may have to enqueue what a GPU is waiting for.
  const DeviceGuard guard(op, device_index);
  const Error waited = wait_for_gpus(op);

  const std::lock_guard<std::mutex> lock(registrations_mutex);
  const auto it = registrations().find(begin);
  if (is_capture_error(waited)) {
    it->second.closing = false;
    check(op, "waiting for the GPUs, of which a stream is being captured,", waited);
  }
  const Error undone = unregister_chunks(it->second.chunks);
  registrations().erase(it);
  check(op, "waiting for the GPUs", waited);
  check(op, "unregistering tensor", undone);
}

// A registration of this library's own: known without asking the driver.
bool HostTranslator::find_ours(uintptr_t address) {
  const std::lock_guard<std::mutex> lock(registrations_mutex);
  const auto* ours = find_registration(address);
  if (ours == nullptr) return false;
  begin_ = ours->first;
  end_ = ours->second.end;
  chunk_bytes_ = ours->second.chunk_bytes;
  alias_delta_ = ours->second.alias_delta;
  return true;
}

bool HostTranslator::find_others(const char* data) {
  const HostRange range = query_host_range(data);
  if (!range.page_locked) return false;
  begin_ = range.begin;
  end_ = range.end;
  chunk_bytes_ = end_ - begin_;
  alias_delta_ = static_cast<int64_t>(range.alias - range.begin);
  return true;
}

char* HostTranslator::device_address(const char* argument, int64_t position, const char* data, int64_t extent) {
  const uintptr_t begin = reinterpret_cast<uintptr_t>(data);
  const uintptr_t end = begin + static_cast<uintptr_t>(extent);
  const auto alias = [&] { return reinterpret_cast<char*>(begin + static_cast<uintptr_t>(alias_delta_)); };
  if (begin >= begin_ && end <= end_) return alias();

  if (!find_ours(begin) && !find_others(data)) {
    fail(op_, argument, "[", position,
         "] is host memory that is not page-locked, which a GPU kernel must not touch; it "
         "needs sgl_kvio.HostKVPool, torch's pin_memory=True, or torch.ops.kvio.host_register on its storage. Under "
         "torch.compile with aot_eager a pinned destination arrives as a pageable clone: name the pool by its handle "
         "(kvio::write_back), use inductor, or call eagerly");
  }
  if (begin < begin_ || end > end_) {
    fail(op_, argument, "[", position, "] spans ", extent, " bytes but only ", end_ - begin,
         " of them lie in the page-locked registration that holds its first byte; it needs to lie inside one "
         "registration");
  }
  return alias();
}

int64_t HostTranslator::bytes_in_chunk(const char* data) const {
  const uintptr_t at = reinterpret_cast<uintptr_t>(data);
  const uintptr_t next = begin_ + ((at - begin_) / chunk_bytes_ + 1) * chunk_bytes_;
  return static_cast<int64_t>(std::min(next, end_) - at);
}

}  // namespace kvio::gpu
