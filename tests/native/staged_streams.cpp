// csrc/gpu/staged.cpp on a GPU runtime of our own: streams are queues of memcpys on plain memory, drained in whatever
// order their events allow. An edge that the code forgot shows as wrong bytes. Driver calls fail at random, too.
//
//   staged_streams SEEDS      prints the seed and what went wrong; exit status 1 then
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>

#include "gpu/device_facts.h"
#include "gpu/driver.h"
#include "gpu/fault.h"
#include "gpu/host_memory.h"
#include "gpu/index_upload.h"
#include "gpu/platform.h"
#include "gpu/staged.h"
#include "gpu/stream.h"
#include "gpu/transfer_register.h"
#include "request/staged_request.h"

namespace {

using Bytes = std::vector<char>;
using Entries = std::vector<int64_t>;

std::mt19937 rng;
int64_t below(int64_t n) { return std::uniform_int_distribution<int64_t>(0, n - 1)(rng); }

// --- The runtime ----------------------------------------------------------------------------------------------------

using Op = std::function<bool()>;  // false: its turn has not come
using Mark = std::shared_ptr<bool>;

const cudaStream_t caller = reinterpret_cast<cudaStream_t>(16);
std::map<cudaStream_t, std::deque<Op>> queues;
std::map<cudaEvent_t, Mark> recorded;
int64_t copies_waiting = 0;  // of all streams
int64_t streams_made = 0;
int64_t calls_until_failure = 0;  // never when below 0

bool fails() { return calls_until_failure-- == 0; }

void enqueue(cudaStream_t stream, std::function<void()> work) {
  queues[stream].push_back([work] {
    work();
    return true;
  });
}

void enqueue_copy(cudaStream_t stream, void* dst, const void* src, size_t nbytes) {
  ++copies_waiting;
  enqueue(stream, [=] {
    std::memcpy(dst, src, nbytes);
    --copies_waiting;
  });
}

enum class Turn { kRandom, kCallerFirst, kCallerLast };

void drain(Turn turn) {
  while (true) {
    std::vector<std::deque<Op>*> waiting;  // the caller's stream has the lowest handle
    for (auto& [stream, ops] : queues) {
      if (!ops.empty()) waiting.push_back(&ops);
    }
    if (waiting.empty()) return;
    if (turn == Turn::kRandom) std::shuffle(waiting.begin(), waiting.end(), rng);
    if (turn == Turn::kCallerLast) std::reverse(waiting.begin(), waiting.end());
    const auto ran = std::find_if(waiting.begin(), waiting.end(), [](std::deque<Op>* ops) { return ops->front()(); });
    if (ran == waiting.end()) throw std::logic_error("streams wait for each other");
    (*ran)->pop_front();
  }
}

}  // namespace

extern "C" {

cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "made to fail"; }
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = reinterpret_cast<cudaStream_t>(4096 + 16 * ++streams_made);
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  static int64_t made = 0;
  *event = reinterpret_cast<cudaEvent_t>(16 * ++made);
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  const Mark mark = recorded[event] = std::make_shared<bool>(false);
  enqueue(stream, [mark] { *mark = true; });
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  if (const Mark mark = recorded[event]) queues[stream].push_back([mark] { return *mark; });
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  const Mark mark = recorded[event];
  return mark == nullptr || *mark ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaMemcpyAsync(void* dst, const void* src, size_t nbytes, cudaMemcpyKind, cudaStream_t stream) {
  if (fails()) return cudaErrorUnknown;
  enqueue_copy(stream, dst, src, nbytes);
  return cudaSuccess;
}

}  // extern "C"

// --- What staged.cpp uses of the library's GPU room -----------------------------------------------------------------

namespace kvio::gpu {

Stream current_stream(const char*, int) { return caller; }
bool is_capturing(Stream) { return false; }
bool has_batch_copy() { return true; }
int sm_count(const char*, int) { return 132; }
void raise_pending_fault(const char*, int) {}

GpuFacts gpu_facts(const char*, int, Stream, bool) {
  GpuFacts facts;
  facts.has_batch_call = true;
  return facts;
}

Error batch_copy(uint64_t* dst, uint64_t* src, size_t* nbytes, size_t count, BatchSides, Stream stream) {
  if (fails()) return cudaErrorUnknown;
  for (size_t i = 0; i < count; ++i) {
    enqueue_copy(stream, reinterpret_cast<void*>(dst[i]), reinterpret_cast<const void*>(src[i]), nbytes[i]);
  }
  return cudaSuccess;
}

char* HostTranslator::device_address(const char*, int64_t, const char* data, int64_t) {
  return const_cast<char*>(data);
}

int64_t HostTranslator::bytes_in_chunk(const char* data) const {
  constexpr int64_t kChunk = 5000;
  return kChunk - reinterpret_cast<int64_t>(data) % kChunk;
}

void pack_indices(const IndexList& list, int64_t count, char* out) {
  for (int64_t i = 0; i < count; ++i) reinterpret_cast<int64_t*>(out)[i] = list.at(i);
}

// Torch's allocator gives a tensor's memory to later work of its stream only: here it stays until all work is done.
std::vector<torch::stable::Tensor> lists_in_use;

torch::stable::Tensor upload_bytes(const char*, int, int64_t nbytes, Stream stream, bool,
                                   const std::function<void(char*)>& fill) {
  AtenTensorHandle handle = nullptr;
  const int64_t stride = 1;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(1, &nbytes, &stride, aoti_torch_dtype_uint8(),
                                                  aoti_torch_device_type_cpu(), 0, &handle));
  const torch::stable::Tensor memory(handle);
  const auto block = std::make_shared<Bytes>(static_cast<size_t>(nbytes));
  fill(block->data());
  lists_in_use.push_back(memory);
  enqueue(stream, [=] { std::memcpy(memory.data_ptr(), block->data(), block->size()); });
  return memory;
}

void copy_rows(const TransferRequest& request, const BufferGroup& group, int64_t dst_slot, int64_t src_slot) {
  for (size_t b = 0; b < group.dst_base.size(); ++b) {
    std::memcpy(group.dst_base[b] + group.dst.offset(dst_slot), group.src_base[b] + group.src.offset(src_slot),
                static_cast<size_t>(group.dst.piece_bytes));
  }
}

void launch_register(const TransferRequest& request, const BufferGroup& group, int, int, Stream stream) {
  if (fails()) throw std::runtime_error("launching was made to fail");
  enqueue(stream, [request, group] {
    const int64_t slots = request.slots_per_index;
    for (int64_t i = 0; i < request.num_indices; ++i) {
      const int64_t dst = request.dst_indices.at(i) * slots;
      const int64_t src = request.src_indices.at(i) * slots;
      if (dst < 0 || src < 0 || dst + slots > group.dst.slots || src + slots > group.src.slots) {
        throw std::logic_error("a kernel met a bad index");
      }
      for (int64_t token = 0; token < slots; ++token) copy_rows(request, group, dst + token, src + token);
    }
  });
}

}  // namespace kvio::gpu

// --- Calls ----------------------------------------------------------------------------------------------------------

namespace {

using kvio::DeviceKind;
using kvio::TensorView;

// A tensor's shape, strides and memory.
struct Tensor {
  char* data;
  Entries sizes;
  Entries strides;
  DeviceKind device;
  int64_t element_size = 1;

  TensorView view() const {
    TensorView view;
    view.data = data;
    view.sizes = sizes.data();
    view.strides = strides.data();
    view.ndim = static_cast<int64_t>(sizes.size());
    view.element_size = element_size;
    view.storage_bytes = INT64_MAX;
    view.is_int64 = element_size == 8;
    view.device = device;
    view.device_index = device == DeviceKind::kGpu ? 0 : -1;
    return view;
  }
};

// Two pools of [buffer][layer] rows, page-wise on the host and layer-first on the device, and a staging buffer.
struct World {
  int64_t buffers = 1 + below(2), layers = 1 + below(3), page_size = 1 + below(4), pages = 3 + below(12);
  int64_t row = 16 * (1 + below(8));
  bool page_first_direct = below(2) == 1;
  int64_t slots = pages * page_size;
  Bytes host = random_bytes(), card = random_bytes();
  Bytes staging = Bytes(static_cast<size_t>((1 + below(9)) * staged_page() + below(staged_page())));

  Bytes random_bytes() const {
    Bytes bytes(static_cast<size_t>(buffers * layers * slots * row));
    for (char& byte : bytes) byte = static_cast<char>(below(256));
    return bytes;
  }

  int64_t staged_page() const { return buffers * ((page_size * layers * row + 255) / 256 * 256); }
  int64_t page_stride() const { return page_size * layers * row; }
  int64_t layer_stride() const { return page_first_direct ? page_size * row : row; }
  int64_t token_stride() const { return page_first_direct ? row : layers * row; }
  int64_t host_offset(int64_t buffer, int64_t layer) const {
    return buffer * slots * layers * row + layer * layer_stride();
  }
  int64_t card_offset(int64_t buffer, int64_t layer) const { return (buffer * layers + layer) * slots * row; }

  std::vector<Tensor> host_views() {
    std::vector<Tensor> views;
    for (int64_t i = 0; i < layers * buffers; ++i) {
      views.push_back({host.data() + host_offset(i % buffers, i / buffers),
                       {pages, page_size, row},
                       {page_stride(), token_stride(), 1},
                       DeviceKind::kCpu});
    }
    return views;
  }

  std::vector<Tensor> card_views() {
    std::vector<Tensor> views;
    for (int64_t i = 0; i < layers * buffers; ++i) {
      views.push_back({card.data() + card_offset(i % buffers, i / buffers), {slots, row}, {row, 1}, DeviceKind::kGpu});
    }
    return views;
  }
};

// Index lists of one call; those on the GPU live until it has run.
struct Lists {
  bool by_page = below(2) == 1;
  Entries host, card;

  explicit Lists(const World& world) {
    Entries host_pages(static_cast<size_t>(world.pages));
    for (size_t i = 0; i < host_pages.size(); ++i) host_pages[i] = static_cast<int64_t>(i);
    Entries card_pages = host_pages;
    if (below(2)) std::shuffle(host_pages.begin(), host_pages.end(), rng);
    std::shuffle(card_pages.begin(), card_pages.end(), rng);
    const int64_t moved = 1 + below(world.pages);
    const int64_t size = by_page ? 1 : world.page_size;
    for (int64_t i = by_page ? 0 : below(2) * below(size); i < moved * size; ++i) {
      host.push_back(host_pages[static_cast<size_t>(i / size)] * size + i % size);
      card.push_back(card_pages[static_cast<size_t>(i / size)] * size + i % size);
    }
    if (!by_page && host.size() > 1 && below(3) == 0) std::swap(host[0], host[1]);
  }
};

std::string no_name(int32_t) { return "bytes"; }

void call(World& world, Lists& lists, bool write_back, bool list_on_gpu) {
  const auto views = [](const std::vector<Tensor>& tensors) {
    std::vector<TensorView> all;
    for (const Tensor& tensor : tensors) all.push_back(tensor.view());
    return all;
  };
  const auto list = [](Entries& entries, bool on_gpu) {
    return Tensor{reinterpret_cast<char*>(entries.data()),
                  {static_cast<int64_t>(entries.size())},
                  {1},
                  on_gpu ? DeviceKind::kGpu : DeviceKind::kCpu,
                  8};
  };
  const std::vector<Tensor> host = world.host_views(), card = world.card_views();
  const Tensor host_list = list(lists.host, false), card_list = list(lists.card, list_on_gpu);
  const Tensor staging{world.staging.data(), {static_cast<int64_t>(world.staging.size())}, {1}, DeviceKind::kGpu};
  kvio::TransferOptions options;
  options.row_ndim = 1;
  options.page_size = world.page_size;
  options.index_unit = lists.by_page ? "page" : "token";
  kvio::StagedRequest request =
      kvio::make_staged_request("transfer_staged", views(write_back ? host : card), views(write_back ? card : host),
                                (write_back ? host_list : card_list).view(),
                                (write_back ? card_list : host_list).view(), staging.view(), options, no_name);
  kvio::gpu::transfer_staged(&request);
}

// The same on copies of both pools.
void move_expected(const World& world, const Lists& lists, bool write_back, Bytes* host, Bytes* card) {
  const int64_t per_entry = lists.by_page ? world.page_size : 1;
  for (size_t i = 0; i < lists.host.size(); ++i) {
    for (int64_t at = 0; at < per_entry * world.layers * world.buffers; ++at) {
      const int64_t buffer = at % world.buffers, layer = at / world.buffers % world.layers;
      const int64_t token = at / world.buffers / world.layers;
      const int64_t slot = lists.host[i] * per_entry + token;
      char* there = host->data() + world.host_offset(buffer, layer) + slot / world.page_size * world.page_stride() +
                    slot % world.page_size * world.token_stride();
      char* here = card->data() + world.card_offset(buffer, layer) + (lists.card[i] * per_entry + token) * world.row;
      std::memcpy(write_back ? there : here, write_back ? here : there, static_cast<size_t>(world.row));
    }
  }
}

void change(Bytes* bytes, char mask) {
  for (size_t i = 0; i < bytes->size(); i += 3) (*bytes)[i] ^= mask;
}

// Some calls one after the other. Between them the caller's stream writes rows and the staging buffer, and the caller
// overwrites the lists on the CPU. What is wrong, or nothing.
const char* run(int64_t seed) {
  rng.seed(static_cast<uint32_t>(seed));
  World world;
  Bytes want_host = world.host, want_card = world.card;
  std::deque<Lists> all_lists;
  calls_until_failure = below(4) == 0 ? below(12) : -1;
  bool failed = false;
  for (int64_t left = 1 + below(3); left > 0 && !failed; --left) {
    Lists& lists = all_lists.emplace_back(world);
    const bool write_back = below(2) == 1, list_on_gpu = below(2) == 1;
    const char mask = static_cast<char>(below(256));
    Bytes* source = write_back ? &world.card : &world.host;
    enqueue(caller, [=] { change(source, mask); });
    enqueue(caller, [&] { std::fill(world.staging.begin(), world.staging.end(), 'a'); });
    change(write_back ? &want_card : &want_host, mask);
    move_expected(world, lists, write_back, &want_host, &want_card);
    try {
      call(world, lists, write_back, list_on_gpu);
    } catch (const std::runtime_error&) {
      failed = true;
    }
    if (!list_on_gpu) std::fill(lists.card.begin(), lists.card.end(), -1);
    std::fill(lists.host.begin(), lists.host.end(), -1);
    enqueue(caller, [&] { std::fill(world.staging.begin(), world.staging.end(), 'z'); });
  }
  int64_t copies_left = 0;
  enqueue(caller, [&] { copies_left = copies_waiting; });
  constexpr Turn kTurns[] = {Turn::kRandom, Turn::kCallerFirst, Turn::kCallerLast};
  drain(kTurns[below(3)]);
  kvio::gpu::lists_in_use.clear();
  if (copies_left > 0) return "the caller's stream did not wait for copies";
  if (!failed && world.host != want_host) return "wrong bytes on the host";
  if (!failed && world.card != want_card) return "wrong bytes on the device";
  // Calls that follow each other on one stream need one more.
  return streams_made > 1 ? "a stream was made for every call" : nullptr;
}

}  // namespace

int main(int, char** arguments) {
  const int64_t seeds = std::atoll(arguments[1]);
  for (int64_t seed = 0; seed < seeds; ++seed) {
    const char* wrong = run(seed);
    if (wrong == nullptr) continue;
    std::printf("seed %lld: %s\n", static_cast<long long>(seed), wrong);
    return 1;
  }
  return 0;
}
