#include "gpu/staged.h"

#include <algorithm>
#include <optional>

#include "gpu/copy_engine.h"
#include "gpu/device_facts.h"
#include "gpu/device_guard.h"
#include "gpu/fault.h"
#include "gpu/host_sides.h"
#include "gpu/index_upload.h"
#include "gpu/side_stream.h"
#include "gpu/stream.h"
#include "gpu/transfer_register.h"
#include "plan/staged_plan.h"

namespace kvio::gpu {
namespace {

// Index lists as kernels need them.
struct Lists {
  IndexList device;  // of the device pool
  IndexList host;    // of the host pool; only where some positions make no whole page
  IndexList count;   // 0, 1, 2, ...: the rows of one half of the staging buffer
  std::optional<torch::stable::Tensor> memory;
};

class StagedCall {
 public:
  StagedCall(const char* op, StagedRequest* staged)
      : op_(op),
        staged_(*staged),
        request_(staged->transfer),
        to_host_(request_.dst_device == DeviceKind::kCpu),
        device_(request_.gpu_index),
        stream_(current_stream(op, device_)),
        gpu_(gpu_facts(op, device_, stream_, is_capturing(stream_))),
        plan_(make_staged_plan(op, *staged)),
        host_(accept_host_buffers(op, request_)) {
    GpuFacts side = gpu_;
    side.legacy_stream = false;  // copies go to a stream of their own
    route_ = copy_engine_route(side, host_.alias_differs());
  }

  void run() {
    // Forked before the lists go over, which copies of pages need not wait for.
    std::optional<SideStream> side;
    if (plan_.work.num_pages > 0) side.emplace(op_, device_, stream_);
    lists_ = upload_lists();
    if (side) move_pages(&*side);
    move_rest();
  }

  std::string describe() const {
    const std::string copies =
        route_.batched ? "copies: batched, on a stream of the library's own" : kvio::describe(route_);
    const char* const device_list = device_list_on_cpu() ? "both lists, which are on the CPU; rows are"
                                                         : "the host pool's list; rows and the other list are";
    return kvio::describe(plan_, staged_) + copies + "\ncapture: the graph keeps " + device_list +
           " read at every replay\n";
  }

 private:
  // Events of the side stream.
  static int relaid(int half) { return half; }
  static int copied(int half) { return 2 + half; }

  bool device_list_on_cpu() const {
    return (to_host_ ? request_.src_index_device : request_.dst_index_device) == DeviceKind::kCpu;
  }

  char* host_base(const BufferGroup& group, size_t buffer) const {
    return to_host_ ? group.dst_base[buffer] : const_cast<char*>(group.src_base[buffer]);
  }

  Lists upload_lists() {
    const IndexList& device = to_host_ ? request_.src_indices : request_.dst_indices;
    const IndexList& host = to_host_ ? request_.dst_indices : request_.src_indices;
    const bool device_on_cpu = device_list_on_cpu();
    const bool wide = device.is_int64;
    const int64_t list_bytes = (request_.num_indices * device.entry_bytes() + 15) / 16 * 16;
    const int64_t counts = std::min(plan_.halves.pages, plan_.work.num_pages) * plan_.work.positions_per_page;
    const int64_t host_at = device_on_cpu ? list_bytes : 0;
    const int64_t count_at = host_at + (plan_.work.rest.empty() ? 0 : list_bytes);
    Lists lists;
    lists.memory =
        upload_bytes(op_, device_, count_at + counts * device.entry_bytes(), stream_, gpu_.capturing, [&](char* out) {
          if (device_on_cpu) pack_indices(device, request_.num_indices, out);
          if (!plan_.work.rest.empty()) pack_indices(host, request_.num_indices, out + host_at);
          fill_counts(wide, counts, out + count_at);
        });
    const char* memory = static_cast<const char*>(lists.memory->data_ptr());
    lists.device = device_on_cpu ? IndexList{memory, 1, wide} : device;
    lists.host = {memory + host_at, 1, wide};
    lists.count = {memory + count_at, 1, wide};
    return lists;
  }

  static void fill_counts(bool wide, int64_t count, char* out) {
    for (int64_t i = 0; i < count; ++i) {
      if (wide) {
        reinterpret_cast<int64_t*>(out)[i] = i;
      } else {
        reinterpret_cast<int32_t*>(out)[i] = static_cast<int32_t>(i);
      }
    }
  }

  char* half_base(int half) const { return staged_.staging + half * plan_.halves.pages * plan_.layout.page_bytes; }

  // Device rows and their places in one half: a transfer inside the GPU, by one launch for all blocks of one geometry.
  TransferRequest relayout_request(int half) const {
    TransferRequest relayout;
    relayout.slots_per_index = request_.slots_per_index;
    relayout.page_size = request_.page_size;
    relayout.num_blocks = request_.num_blocks;
    relayout.dst_device = relayout.src_device = DeviceKind::kGpu;
    relayout.index_device = DeviceKind::kGpu;
    relayout.fault_op = request_.fault_op;
    relayout.gpu_index = device_;
    const PageBlock* before = nullptr;
    for (const PageBlock& block : plan_.layout.blocks) {
      const bool joins =
          before != nullptr && before->group == block.group && before->staged_stride == block.staged_stride;
      if (!joins) relayout.groups.push_back(staged_group(block));
      add_buffers(block, half, &relayout.groups.back());
      before = &block;
    }
    return relayout;
  }

  // The geometry of a block's buffers on the device and in a half.
  BufferGroup staged_group(const PageBlock& block) const {
    const BufferGroup& group = request_.groups[block.group];
    const PoolView staged =
        staged_view(to_host_ ? group.dst : group.src, request_.page_size, block.staged_stride, plan_.halves.pages);
    BufferGroup part;
    part.dst = to_host_ ? staged : group.dst;
    part.src = to_host_ ? group.src : staged;
    return part;
  }

  void add_buffers(const PageBlock& block, int half, BufferGroup* part) const {
    const BufferGroup& group = request_.groups[block.group];
    char* page = half_base(half) + staged_place(block, plan_.halves.pages, 0);
    for (const size_t b : block.buffers) {
      char* place = page + (host_base(group, b) - block.host);
      part->dst_base.push_back(to_host_ ? place : group.dst_base[b]);
      part->src_base.push_back(to_host_ ? group.src_base[b] : place);
      part->position.push_back(group.position[b]);
    }
  }

  void relay(TransferRequest* relayout, int64_t position, int64_t pages) {
    relayout->num_indices = pages * plan_.work.positions_per_page;
    relayout->first_position = position;
    const IndexList device = lists_.device.from(position);
    relayout->dst_indices = to_host_ ? lists_.count : device;
    relayout->src_indices = to_host_ ? device : lists_.count;
    for (const BufferGroup& group : relayout->groups) {
      launch_register(*relayout, group, sm_count(op_, device_), device_, stream_);
    }
  }

  // Driver copies of `count` pages between one half and the host.
  void copy_pages(const int64_t* pages, int64_t count, int half, Stream side) {
    const BatchSides sides = to_host_ ? BatchSides{kHostSide, device_} : BatchSides{device_, kHostSide};
    CopySubmitter submitter(op_, sides, route_, side);
    for (const PageBlock& block : plan_.layout.blocks) {
      for (int64_t k = 0, run = 0; k < count; k += run) {
        run = pages_in_one_piece(block, pages + k, count - k);
        char* host = block.host + pages[k] * block.page_stride;
        char* place = half_base(half) + staged_place(block, plan_.halves.pages, k);
        const CopyEntry entry{to_host_ ? host : place, to_host_ ? place : host, run * block.nbytes};
        host_.split(entry, [&](const CopyEntry& part) { submitter.add(part); });
      }
    }
    submitter.finish();
  }

  void move_pages(SideStream* side) {
    TransferRequest relayouts[2] = {relayout_request(0), relayout_request(plan_.halves.count - 1)};
    int64_t chunk = 0;
    for (const PageStretch& stretch : plan_.work.stretches) {
      const int64_t total = static_cast<int64_t>(stretch.pages.size());
      for (int64_t done = 0, count = 0; done < total; done += count) {
        const bool lone = to_host_ ? chunk == 0 : &stretch == &plan_.work.stretches.back();
        count = next_chunk(plan_.halves, to_host_, lone, total - done);
        const int half = static_cast<int>(chunk % plan_.halves.count);
        const bool used_before = chunk >= plan_.halves.count;
        const int64_t position = stretch.first + done * plan_.work.positions_per_page;
        move_chunk(side, &relayouts[half], half, used_before, position, stretch.pages.data() + done, count);
        ++chunk;
      }
    }
    side->join();
  }

  void move_chunk(SideStream* side, TransferRequest* relayout, int half, bool used_before, int64_t position,
                  const int64_t* pages, int64_t count) {
    if (to_host_) {
      if (used_before) side->wait(copied(half), stream_);
      relay(relayout, position, count);
      side->order(relaid(half), stream_, side->get());
      copy_pages(pages, count, half, side->get());
      side->record(copied(half), side->get());
      return;
    }
    if (used_before) side->wait(relaid(half), side->get());
    copy_pages(pages, count, half, side->get());
    side->order(copied(half), side->get(), stream_);
    relay(relayout, position, count);
    side->record(relaid(half), stream_);
  }

  // Short pages, pages that begin in the middle, permuted tokens.
  void move_rest() {
    if (plan_.work.rest.empty()) return;
    TransferRequest rest = request_;
    translate_host_buffers(op_, &rest);
    for (const PositionRange& range : plan_.work.rest) {
      rest.num_indices = range.end - range.begin;
      rest.first_position = range.begin;
      rest.dst_indices = (to_host_ ? lists_.host : lists_.device).from(range.begin);
      rest.src_indices = (to_host_ ? lists_.device : lists_.host).from(range.begin);
      for (const BufferGroup& group : rest.groups) {
        if (group.dst.row_bytes() == 0) continue;
        launch_register(rest, group, sm_count(op_, device_), device_, stream_);
      }
    }
  }

  const char* op_;
  const StagedRequest& staged_;
  const TransferRequest& request_;
  bool to_host_;
  int device_;
  Stream stream_;
  GpuFacts gpu_;
  StagedPlan plan_;
  HostSides host_;
  CopyEngineRoute route_{};
  Lists lists_;
};

}  // namespace

void transfer_staged(StagedRequest* request) {
  constexpr const char* op = "transfer_staged";
  if (request->transfer.gpu_index < 0) return;
  const DeviceGuard guard(op, request->transfer.gpu_index);
  raise_pending_fault(op, request->transfer.gpu_index);
  StagedCall call(op, request);
  if (!request->transfer.empty()) call.run();
}

std::string explain_staged(const StagedRequest& request) {
  constexpr const char* op = "explain_staged";
  const DeviceGuard guard(op, request.transfer.gpu_index);
  StagedRequest copy = request;
  return StagedCall(op, &copy).describe();
}

}  // namespace kvio::gpu
