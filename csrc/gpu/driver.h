// Driver calls, looked up at run time: the extension has no link to libcuda, so it loads where no driver is.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "gpu/platform.h"

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

// A pool at a pitch, as a tensor map sees it: dims and byte strides of (piece, token, page), and the pieces and tokens
// of one box, which lies inside one page.
struct BoxShape {
  int64_t piece_bytes;
  int64_t dims[3];
  int64_t strides[3];
  int64_t box[2];
};

// Whether the driver can encode tensor maps.
bool has_tensor_maps();

// Writes the map of the pool at `base` into `map` (a CUtensorMap, 64-byte aligned). False when the driver refuses.
bool encode_box_map(const BoxShape& shape, const void* base, void* map);

// True when the driver has the batched copy (CUDA 12.8 and later).
bool has_batch_copy();

// Where the two sides of a batch lie: a device, or kHostSide.
constexpr int kHostSide = -1;
struct BatchSides {
  int dst = kHostSide;
  int src = kHostSide;
};

// Enqueues `count` copies, in no order among themselves, on `stream`: each reads its source in stream order, never
// earlier. Needs has_batch_copy(). The driver refuses the legacy default stream and a stream that is being captured (a
// capture goes on without the copies), and then has copied nothing. Leaves no error behind; the numbers of the driver's
// errors are the runtime's.
Error batch_copy(uint64_t* dst, uint64_t* src, size_t* nbytes, size_t count, BatchSides sides, Stream stream);

struct EntryPoint {
  std::string name;
  bool found;
};

// The driver calls this library can use, and whether the driver at hand has them.
std::vector<EntryPoint> entry_points();

}  // namespace kvio::gpu
