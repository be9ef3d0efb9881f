// Page-locked host memory: which addresses a GPU may use, and under which alias.
//
// A registration is what one host_register call made (it may consist of several driver registrations, made in chunks)
// or one allocation that somebody else page-locked. A tensor must lie inside one: only there does alias + offset hold.
#pragma once

#include <cstdint>
#include <string>

namespace kvio::gpu {

void host_register(char* data, int64_t nbytes, int64_t chunk_bytes, int device_index);
// Waits for every GPU of the process first. While a stream is being captured that is impossible: then it throws, and
// the memory stays registered. No call that uses the range may be running.
void host_unregister(char* data, int64_t nbytes, int device_index);

// Translates host addresses of one call. Keeps the last registration found, because the buffers of a pool mostly share
// one and a driver query costs more than the whole lookup.
class HostTranslator {
 public:
  explicit HostTranslator(const char* op) : op_(op) {}

  // Address the GPU uses for data[0]; data[0..extent) must be page-locked and inside one registration, else throws
  // with `argument[position]` and the call that fixes it.
  char* device_address(const char* argument, int64_t position, const char* data, int64_t extent);

  // Bytes from `data`, which device_address has accepted last, to the end of the driver registration that holds it: a
  // driver copy must not go further.
  int64_t bytes_in_chunk(const char* data) const;

 private:
  // Each makes the registration that holds the address the current one; false when there is none.
  bool find_ours(uintptr_t address);
  bool find_others(const char* data);

  const char* op_;
  uintptr_t begin_ = 0;
  uintptr_t end_ = 0;
  int64_t alias_delta_ = 0;
  uintptr_t chunk_bytes_ = 0;
};

}  // namespace kvio::gpu
