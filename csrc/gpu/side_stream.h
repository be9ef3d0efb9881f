// Streams of the library's own, for work that runs beside the caller's stream: during one call, or for good.
#pragma once

#include "gpu/platform.h"

namespace kvio::gpu {

// A stream that nobody else uses, forked from the caller's and joined to it, and four events for the edges between.
// Reused at once by the next call on the same caller's stream, which comes after this one anyway, and by other streams'
// calls when its work is done, so that calls on different streams never wait for each other.
class SideStream {
 public:
  static constexpr int kEvents = 4;

  // From here on the stream waits for what `caller` holds by now.
  SideStream(const char* op, int device, Stream caller);
  // Joins if join() was not reached: when a call fails, nothing it enqueued here escapes the caller's order.
  ~SideStream();
  SideStream(const SideStream&) = delete;
  SideStream& operator=(const SideStream&) = delete;

  Stream get() const { return lease_->stream; }
  // Makes the caller's stream wait for everything enqueued here. Nothing is enqueued after it.
  void join();

  // Makes `later` wait for what `earlier` holds by now. `event` numbers one of the events; its earlier use is
  // forgotten.
  void order(int event, Stream earlier, Stream later);
  void record(int event, Stream stream);
  void wait(int event, Stream stream);

  struct Lease {
    Stream stream = nullptr;
    Event events[kEvents] = {};
    Event done = nullptr;
    int device = 0;
    Stream caller = nullptr;  // of the last call
  };

 private:
  Error try_join();

  const char* op_;
  Stream caller_;
  Lease* lease_;
};

// A stream for a caller who wants one that is nobody else's, as those of torch's pool are not. It lives as long as the
// process: torch's allocator may name it long after its last use.
Stream create_stream(const char* op, int device);

}  // namespace kvio::gpu
