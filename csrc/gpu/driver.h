// Driver calls, looked up at run time: the extension has no link to libcuda, so it loads where no driver is.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace kvio::gpu {

struct HostRange {
  bool page_locked = false;
  uintptr_t begin = 0;  // of the allocation or registration that holds the address
  uintptr_t end = 0;
  uintptr_t alias = 0;  // device address of `begin`
};

// Asks the driver about one host address. Never leaves an error behind.
HostRange query_host_range(const void* address);

// True when some part of the process has made a context on `device`.
bool has_context(int device);

struct EntryPoint {
  std::string name;
  bool found;
};

// The driver calls this library can use, and whether the driver at hand has them.
std::vector<EntryPoint> entry_points();

}  // namespace kvio::gpu
