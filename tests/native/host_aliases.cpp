// csrc/gpu/host_memory.cpp on a platform whose device addresses of host memory are others than its host addresses, as
// on ROCm and WSL2. Nothing is registered or read: addresses are only translated.
//
//   host_aliases CASE      prints what is wrong; exit status 1 then
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>

#include "gpu/driver.h"
#include "gpu/host_memory.h"
#include "gpu/host_sides.h"
#include "gpu/platform.h"
#ifdef KVIO_ROCM
#include "gpu/hip_runtime.h"
#endif

namespace {

constexpr uintptr_t kMiB = 1 << 20;
constexpr uintptr_t kNoAlias = 0;

// What the platform has page-locked: host address -> size and device address.
struct Range {
  uintptr_t nbytes;
  uintptr_t alias;
};
std::map<uintptr_t, Range> page_locked;

// The device address that the next registration gets.
std::function<uintptr_t(uintptr_t host)> next_alias = [](uintptr_t host) { return host + 0x7000'0000'0000; };

const std::pair<const uintptr_t, Range>* range_of(uintptr_t address) {
  for (const auto& range : page_locked) {
    if (address >= range.first && address < range.first + range.second.nbytes) return &range;
  }
  return nullptr;
}

uintptr_t alias_of(uintptr_t host) {
  const auto* range = range_of(host);
  return range != nullptr ? range->second.alias + (host - range->first) : kNoAlias;
}

char* at(uintptr_t address) { return reinterpret_cast<char*>(address); }

}  // namespace

extern "C" {

cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "refused"; }
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}

cudaError_t cudaHostRegister(void* host, size_t nbytes, unsigned) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(host);
  if (range_of(address) != nullptr) return cudaErrorHostMemoryAlreadyRegistered;
  page_locked[address] = {nbytes, next_alias(address)};
  return cudaSuccess;
}

cudaError_t cudaHostUnregister(void* host) {
  return page_locked.erase(reinterpret_cast<uintptr_t>(host)) == 1 ? cudaSuccess : cudaErrorInvalidValue;
}

cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned) {
  *device = at(alias_of(reinterpret_cast<uintptr_t>(host)));
  return *device != nullptr ? cudaSuccess : cudaErrorInvalidValue;
}

#ifdef KVIO_ROCM
hipError_t hipMemGetAddressRange(hipDeviceptr_t* begin, size_t* nbytes, hipDeviceptr_t device) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(device);
  for (const auto& [host, range] : page_locked) {
    if (address < range.alias || address >= range.alias + range.nbytes) continue;
    *begin = at(range.alias);
    *nbytes = range.nbytes;
    return hipSuccess;
  }
  return hipErrorInvalidValue;
}
#endif

}  // extern "C"

namespace kvio::gpu {

#ifdef KVIO_ROCM

size_t batches = 0;
size_t most_entries = 0;
size_t entries = 0;
size_t refused_batch = 0;  // the how manieth, from 1

hipError_t count_batch(void**, void**, size_t* nbytes, size_t count, void*, size_t*, size_t attributes, size_t*,
                       hipStream_t) {
  if (attributes != 0) throw std::runtime_error("a batch has attributes");
  if (++batches == refused_batch) return hipErrorNotSupported;
  for (size_t i = 0; i < count; ++i) {
    if (nbytes[i] != entries + i) throw std::runtime_error("a batch begins at the wrong entry");
  }
  entries += count;
  most_entries = std::max(most_entries, count);
  return hipSuccess;
}

int runtime_version = 70'100'000;
int hip_version() { return runtime_version; }
void* hip_symbol(const char* name) {
  return std::strcmp(name, "hipMemcpyBatchAsync") == 0 ? reinterpret_cast<void*>(&count_batch) : nullptr;
}

#else

bool has_context(int) { return true; }

HostRange query_host_range(const void* address) {
  const auto* range = range_of(reinterpret_cast<uintptr_t>(address));
  if (range == nullptr) return {};
  return {true, range->first, range->first + range->second.nbytes, range->second.alias};
}

#endif

}  // namespace kvio::gpu

namespace {

using kvio::gpu::host_register;
using kvio::gpu::host_unregister;
using kvio::gpu::HostTranslator;

void expect(bool holds, const char* what) {
  if (!holds) throw std::runtime_error(what);
}

// The error text of a call that has to throw one.
std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  throw std::runtime_error("nothing was refused");
}

void expect_in(const std::string& part, const std::string& text) {
  if (text.find(part) == std::string::npos) throw std::runtime_error("'" + part + "' is not in: " + text);
}

constexpr uintptr_t kPool = 64 * kMiB;

void own_registration() {
  host_register(at(kPool), 8 * kMiB, 0, 0);
  HostTranslator translator("transfer");
  for (const uintptr_t offset : {uintptr_t{0}, uintptr_t{4096}, 5 * kMiB + 13}) {
    const char* device = translator.device_address("src", 0, at(kPool + offset), kMiB);
    expect(device == at(alias_of(kPool + offset)), "the address is not that of the device");
  }
}

void sub_range_of_a_foreign_registration() {
  page_locked[kPool] = {8 * kMiB, 0x5000'0000'0000};
  HostTranslator translator("transfer");
  // The first one asked for lies in the middle; what is found serves all of the registration.
  for (const uintptr_t offset : {3 * kMiB + 7, uintptr_t{0}, 7 * kMiB}) {
    const char* device = translator.device_address("src", 0, at(kPool + offset), kMiB);
    expect(device == at(0x5000'0000'0000 + offset), "the address is not that of the device");
    const int64_t room = translator.bytes_in_chunk(at(kPool + offset));
    expect(room == static_cast<int64_t>(8 * kMiB - offset), "the registration ends elsewhere");
  }
}

// Two registrations that touch on the host and are far apart, or swapped, for the device.
void two_registrations(bool ours) {
  next_alias = [](uintptr_t host) { return host == kPool ? 0x6000'0000'0000 : 0x5000'0000'0000; };
  for (const uintptr_t begin : {kPool, kPool + 4 * kMiB}) {
    if (ours) {
      host_register(at(begin), 4 * kMiB, 0, 0);
    } else {
      page_locked[begin] = {4 * kMiB, next_alias(begin)};
    }
  }
  HostTranslator translator("transfer");
  expect_in("src[3] spans 2097152 bytes but only 1048576 of them lie in the page-locked registration",
            refusal([&] { translator.device_address("src", 3, at(kPool + 3 * kMiB), 2 * kMiB); }));
  // Each by itself is served, whichever comes first.
  for (const uintptr_t begin : {kPool + 4 * kMiB, kPool, kPool + 4 * kMiB}) {
    expect(translator.device_address("src", 3, at(begin), 4 * kMiB) == at(next_alias(begin)), "a wrong alias is kept");
  }
}

void chunks_whose_aliases_do_not_follow_each_other() {
  next_alias = [](uintptr_t host) { return 0x6000'0000'0000 - 16 * host; };
  expect_in("the device aliases of the chunks of tensor do not follow each other; it needs chunk_bytes=0",
            refusal([] { host_register(at(kPool), 4 * kMiB, kMiB, 0); }));
  expect(page_locked.empty(), "chunks stay page-locked");
  host_register(at(kPool), 4 * kMiB, 0, 0);
  HostTranslator translator("transfer");
  expect(translator.device_address("src", 0, at(kPool + kMiB), kMiB) == at(0x6000'0000'0000 - 16 * kPool + kMiB),
         "the address is not that of the device");
}

void memory_that_is_not_page_locked() {
  HostTranslator translator("transfer");
  expect_in("src[0] is host memory that is not page-locked",
            refusal([&] { translator.device_address("src", 0, at(kPool), 16); }));
}

void unregistered_again() {
  host_register(at(kPool), 4 * kMiB, kMiB, 0);
  host_unregister(at(kPool), 4 * kMiB, 0);
  memory_that_is_not_page_locked();
}

// Every buffer of a request, and a driver copy keeps host addresses but knows that they are no device addresses.
void a_whole_request() {
  host_register(at(kPool), 8 * kMiB, 2 * kMiB, 0);
  kvio::TransferRequest request;
  request.dst_device = kvio::DeviceKind::kGpu;
  request.src_device = kvio::DeviceKind::kCpu;
  kvio::BufferGroup group;
  group.dst.piece_bytes = group.src.piece_bytes = 16;
  group.dst.num_pieces = group.src.num_pieces = 1;
  group.dst_extent = group.src_extent = kMiB;
  for (uintptr_t b = 0; b < 3; ++b) {
    group.dst_base.push_back(at(0x1000 + b));
    group.src_base.push_back(at(kPool + b * 2 * kMiB + 5));
    group.position.push_back(static_cast<int64_t>(b));
  }
  request.groups.push_back(group);
  expect(kvio::gpu::accept_host_buffers("transfer", request).alias_differs(), "a differing alias goes unnoticed");
  expect(request.groups[0].src_base == group.src_base, "accepting changes addresses");
  kvio::gpu::translate_host_buffers("transfer", &request);
  expect(request.groups[0].dst_base == group.dst_base, "a device address is translated");
  for (uintptr_t b = 0; b < 3; ++b) {
    expect(request.groups[0].src_base[b] == at(alias_of(kPool + b * 2 * kMiB + 5)), "a buffer is not translated");
  }
}

// Three layers of K and V, V without a byte: stacked, then a tensor for every buffer of every layer.
kvio::LoadLayersRequest layers_of_a_load(bool listed) {
  kvio::LoadLayersRequest request;
  request.layer.dst_device = kvio::DeviceKind::kGpu;
  request.layer.src_device = kvio::DeviceKind::kCpu;
  request.num_layers = 3;
  request.num_buffers = 2;
  request.dst_step = {16, 16};
  request.src_step = {listed ? 0 : static_cast<int64_t>(2 * kMiB), 0};
  for (int64_t b = 0; b < 2; ++b) {
    kvio::BufferGroup group;
    group.dst.num_pieces = group.src.num_pieces = 1;
    group.dst.piece_bytes = group.src.piece_bytes = b == 0 ? 16 : 0;
    group.src_extent = kMiB;
    group.dst_base = {at(0x1000)};
    group.src_base = {at(b == 0 ? kPool + 5 : 0x2000)};
    group.position = {b};
    request.layer.groups.push_back(group);
  }
  for (uintptr_t layer = 0; layer < 3 && listed; ++layer) {
    request.dst_listed.insert(request.dst_listed.end(), {at(0x1000), at(0x1000)});
    request.src_listed.insert(request.src_listed.end(), {at(kPool + 5 + layer * 2 * kMiB), at(0x2000)});
  }
  return request;
}

void all_layers_of_a_load() {
  host_register(at(kPool), 6 * kMiB, 2 * kMiB, 0);
  for (const bool listed : {false, true}) {
    kvio::LoadLayersRequest request = layers_of_a_load(listed);
    kvio::gpu::translate_host_layers("load_layers", &request);
    for (int64_t layer = 0; layer < 3; ++layer) {
      const kvio::TransferRequest one = request.layer_at(layer);
      const uintptr_t host = kPool + 5 + static_cast<uintptr_t>(layer) * 2 * kMiB;
      expect(one.groups[0].src_base[0] == at(alias_of(host)), "a layer is not translated");
      expect(one.groups[1].src_base[0] == at(0x2000), "rows without a byte are looked at");
      expect(one.groups[0].dst_base[0] == at(0x1000 + (listed ? 0 : 16 * layer)), "a destination is translated");
    }
  }
  host_unregister(at(kPool), 6 * kMiB, 0);
  host_register(at(kPool), 4 * kMiB, 0, 0);
  kvio::LoadLayersRequest stacked = layers_of_a_load(false);
  expect_in("src[0] spans 5242880 bytes but only 4194299",
            refusal([&] { kvio::gpu::translate_host_layers("load_layers", &stacked); }));
  kvio::LoadLayersRequest listed = layers_of_a_load(true);
  expect_in("src[4] is host memory that is not page-locked",
            refusal([&] { kvio::gpu::translate_host_layers("load_layers", &listed); }));
}

#ifdef KVIO_ROCM

void long_batches() {
  using namespace kvio::gpu;
  constexpr size_t kCount = 20'000;
  std::vector<uint64_t> dst(kCount), src(kCount);
  std::vector<size_t> nbytes(kCount);
  for (size_t i = 0; i < kCount; ++i) nbytes[i] = i;
  expect(has_batch_copy(), "the runtime's batches go unused");
  expect(batch_copy(dst.data(), src.data(), nbytes.data(), kCount, {}, nullptr) == hipSuccess, "a batch fails");
  expect(entries == kCount && batches == 3 && most_entries == 8192, "batches are cut wrongly");
  batches = entries = 0;
  refused_batch = 2;
  expect(batch_copy(dst.data(), src.data(), nbytes.data(), kCount, {}, nullptr) == hipErrorNotSupported,
         "a refusal is lost");
  expect(batches == 2, "it goes on after a refusal");
}

void batches_of_an_unknown_runtime() {
  kvio::gpu::runtime_version = 110'000'000;
  expect(!kvio::gpu::has_batch_copy(), "a call whose prototype is not known is used");
}

#endif

const std::map<std::string, std::function<void()>> kCases = {
    {"own_registration", own_registration},
    {"sub_range_of_a_foreign_registration", sub_range_of_a_foreign_registration},
    {"across_two_of_ours", [] { two_registrations(true); }},
    {"across_two_of_others", [] { two_registrations(false); }},
    {"chunks_whose_aliases_do_not_follow_each_other", chunks_whose_aliases_do_not_follow_each_other},
    {"memory_that_is_not_page_locked", memory_that_is_not_page_locked},
    {"unregistered_again", unregistered_again},
    {"a_whole_request", a_whole_request},
    {"all_layers_of_a_load", all_layers_of_a_load},
#ifdef KVIO_ROCM
    {"long_batches", long_batches},
    {"batches_of_an_unknown_runtime", batches_of_an_unknown_runtime},
#endif
};

}  // namespace

int main(int, char** arguments) {
  try {
    kCases.at(arguments[1])();
  } catch (const std::exception& error) {
    std::printf("%s\n", error.what());
    return 1;
  }
  return 0;
}
