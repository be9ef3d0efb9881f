#include "gpu/index_upload.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <vector>

#include "gpu/device_memory.h"

namespace kvio::gpu {
namespace {

// A page-locked block whose bytes a queued copy may still read. Blocks are reused once their event has passed: the
// driver's own staging of pageable memory would wait for the stream instead.
struct Block {
  char* data = nullptr;
  size_t capacity = 0;
  int device = 0;
  Event copied = nullptr;
};

std::mutex blocks_mutex;
std::vector<std::unique_ptr<Block>>& idle_blocks() {
  static auto* blocks = new std::vector<std::unique_ptr<Block>>();
  return *blocks;
}

constexpr size_t kSmallBlock = 64 << 10;
constexpr int kBlocksAtOnce = 32;

void give_back(std::unique_ptr<Block> block) {
  const std::lock_guard<std::mutex> lock(blocks_mutex);
  idle_blocks().push_back(std::move(block));
}

std::unique_ptr<Block> new_block(const char* op, int device, char* data, size_t capacity) {
  auto block = std::make_unique<Block>();
  block->data = data;
  block->capacity = capacity;
  block->device = device;
  check(op, "creating an event", cudaEventCreateWithFlags(&block->copied, cudaEventDisableTiming));
  return block;
}

// Allocating page-locked memory may wait for the device, so small blocks are made many at a time.
std::unique_ptr<Block> make_block(const char* op, int device, size_t nbytes) {
  size_t capacity = kSmallBlock;
  while (capacity < nbytes) capacity *= 2;
  const int count = capacity == kSmallBlock ? kBlocksAtOnce : 1;
  void* data = nullptr;
  check(op, "allocating page-locked memory for indices",
        cudaHostAlloc(&data, capacity * static_cast<size_t>(count), cudaHostAllocPortable));
  for (int i = 1; i < count; ++i) {
    give_back(new_block(op, device, static_cast<char*>(data) + capacity * static_cast<size_t>(i), capacity));
  }
  return new_block(op, device, static_cast<char*>(data), capacity);
}

// The smallest idle block that is large enough, else a new one.
std::unique_ptr<Block> take_block(const char* op, int device, size_t nbytes) {
  {
    const std::lock_guard<std::mutex> lock(blocks_mutex);
    auto& idle = idle_blocks();
    auto best = idle.end();
    for (auto it = idle.begin(); it != idle.end(); ++it) {
      const Block& block = **it;
      if (block.device != device || block.capacity < nbytes) continue;
      if (best != idle.end() && block.capacity >= (*best)->capacity) continue;
      if (cudaEventQuery(block.copied) != cudaSuccess) {
        (void)cudaGetLastError();  // cudaErrorNotReady must not be left for a later check
        continue;
      }
      best = it;
    }
    if (best != idle.end()) {
      std::unique_ptr<Block> taken = std::move(*best);
      idle.erase(best);
      return taken;
    }
  }
  return make_block(op, device, nbytes);
}

template <class Index>
void pack_as(const IndexList& list, int64_t count, char* out) {
  const Index* values = static_cast<const Index*>(list.data);
  Index* packed = reinterpret_cast<Index*>(out);
  if (list.stride == 1) {
    std::memcpy(packed, values, static_cast<size_t>(count) * sizeof(Index));
    return;
  }
  for (int64_t i = 0; i < count; ++i) packed[i] = values[i * list.stride];
}

}  // namespace

void pack_indices(const IndexList& list, int64_t count, char* out) {
  list.is_int64 ? pack_as<int64_t>(list, count, out) : pack_as<int32_t>(list, count, out);
}

torch::stable::Tensor upload_bytes(const char* op, int device, int64_t nbytes, Stream stream, bool capturing,
                                   const std::function<void(char*)>& fill) {
  // Allocating, here and inside torch, and asking an event are refused, and spoil the graph, while any thread captures
  // in global mode, unless this thread says that it knows better: nothing here touches what is being captured.
  const RelaxedCapture relaxed;
  torch::stable::Tensor memory = device_bytes(nbytes, device);
  std::unique_ptr<Block> block = take_block(op, device, static_cast<size_t>(nbytes));
  fill(block->data);
  const Error copied =
      cudaMemcpyAsync(memory.data_ptr(), block->data, static_cast<size_t>(nbytes), cudaMemcpyHostToDevice, stream);
  check(op, "copying indices to the GPU", copied);
  if (capturing) {
    (void)block.release();
    return memory;
  }
  // Without its event the block could be reused too early: it is given up.
  const Error recorded = cudaEventRecord(block->copied, stream);
  if (recorded != cudaSuccess) (void)block.release();
  check(op, "recording that indices were copied", recorded);
  give_back(std::move(block));
  return memory;
}

torch::stable::Tensor upload_indices(const char* op, TransferRequest* request, Stream stream) {
  const bool wide = request->dst_indices.is_int64;
  const int64_t list_bytes = request->num_indices * request->dst_indices.entry_bytes();
  const int64_t src_at = (list_bytes + 15) / 16 * 16;
  torch::stable::Tensor device =
      upload_bytes(op, request->gpu_index, src_at + list_bytes, stream, false, [&](char* out) {
        pack_indices(request->dst_indices, request->num_indices, out);
        pack_indices(request->src_indices, request->num_indices, out + src_at);
      });
  const char* on_device = static_cast<const char*>(device.data_ptr());
  request->dst_indices = {on_device, 1, wide};
  request->src_indices = {on_device + src_at, 1, wide};
  return device;
}

}  // namespace kvio::gpu
