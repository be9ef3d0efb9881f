// Which side of a call is on the host, what of it a GPU may touch, and where driver copies of it have to be cut.
#pragma once

#include "gpu/host_memory.h"
#include "plan/copy_plan.h"
#include "request/load_layers_request.h"
#include "request/request.h"

namespace kvio::gpu {

// One side. On the host: page-locked memory and where registrations end. Elsewhere everything is accepted.
class HostSide {
 public:
  HostSide(const char* op, const char* argument, DeviceKind device)
      : argument_(argument), on_host_(device == DeviceKind::kCpu), translator_(op) {}

  // The address that the GPU uses for data[0]. Throws when data[0..extent) is host memory that is not page-locked.
  template <class Pointer>
  Pointer accept(int64_t position, Pointer data, int64_t extent) {
    if (!on_host_) return data;
    char* address = translator_.device_address(argument_, position, data, extent);
    alias_differs_ |= address != data;
    return address;
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
  HostSides(const char* op, const SideNames& names, DeviceKind dst_device, DeviceKind src_device)
      : dst(op, names.dst, dst_device), src(op, names.src, src_device) {}

  bool alias_differs() const { return dst.alias_differs() || src.alias_differs(); }

  // Calls emit(CopyEntry) for the parts of `entry` that one driver copy may take.
  template <class Emit>
  void split(const CopyEntry& entry, Emit emit) {
    split_copy_entry(
        entry, [&](const CopyEntry& rest) { return dst.room(rest, rest.dst); },
        [&](const CopyEntry& rest) { return src.room(rest, rest.src); }, emit);
  }

  HostSide dst;
  HostSide src;
};

// Calls use(group, buffer, dst, src) with the GPU's addresses of every pair of buffers that has bytes; throws on host
// memory that is not page-locked.
template <class Request, class Use>
void accept_buffers(HostSides* host, Request& request, Use use) {
  for (auto& group : request.groups) {
    if (group.dst.row_bytes() == 0) continue;
    for (size_t b = 0; b < group.dst_base.size(); ++b) {
      use(group, b, host->dst.accept(group.position[b], group.dst_base[b], group.dst_extent),
          host->src.accept(group.position[b], group.src_base[b], group.src_extent));
    }
  }
}

// The host memory of a call, accepted; its addresses stay.
inline HostSides accept_host_buffers(const char* op, const TransferRequest& request) {
  HostSides host(op, request.names, request.dst_device, request.src_device);
  accept_buffers(&host, request, [](const BufferGroup&, size_t, const char*, const char*) {});
  return host;
}

// Puts the addresses that the GPU uses in place of host ones.
inline void translate_host_buffers(const char* op, TransferRequest* request) {
  HostSides host(op, request->names, request->dst_device, request->src_device);
  accept_buffers(&host, *request, [](BufferGroup& group, size_t b, char* dst, const char* src) {
    group.dst_base[b] = dst;
    group.src_base[b] = src;
  });
}

// The same for the sources of all layers; destinations are on the GPU. Throws on host memory that is not page-locked,
// or of which a stacked buffer's layers lie in several registrations.
inline void translate_host_layers(const char* op, LoadLayersRequest* request) {
  if (request->layer.src_device != DeviceKind::kCpu) return;
  HostSide host(op, "src", DeviceKind::kCpu);
  auto& listed = request->src_listed;
  for (BufferGroup& group : request->layer.groups) {
    if (group.dst.row_bytes() == 0) continue;
    for (size_t i = 0; i < group.position.size(); ++i) {
      const int64_t b = group.position[i];
      const int64_t later = (request->num_layers - 1) * request->src_step[static_cast<size_t>(b)];
      group.src_base[i] = host.accept(b, group.src_base[i], group.src_extent + later);
      for (int64_t at = b; at < static_cast<int64_t>(listed.size()); at += request->num_buffers) {
        const char*& base = listed[static_cast<size_t>(at)];
        base = host.accept(at, base, group.src_extent);
      }
    }
  }
}

}  // namespace kvio::gpu
