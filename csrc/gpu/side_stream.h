// Streams of the library's own, for work that runs beside the caller's stream during one call.
#pragma once

#include "gpu/platform.h"

namespace kvio::gpu {

// A stream that nobody else uses, and four events. Given back when the object dies; reused once its work is done, so
// that calls on different streams never wait for each other. The caller makes both edges: the stream waits for his
// before it does anything, and his stream waits for it in the end.
class SideStream {
 public:
  static constexpr int kEvents = 4;

  SideStream(const char* op, int device);
  // Marks where the stream's work ends.
  ~SideStream();
  SideStream(const SideStream&) = delete;
  SideStream& operator=(const SideStream&) = delete;

  Stream get() const { return lease_->stream; }

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
  };

 private:
  const char* op_;
  Lease* lease_;
};

}  // namespace kvio::gpu
