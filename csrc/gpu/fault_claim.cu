#include "gpu/fault.h"

namespace kvio::gpu {
namespace {

__device__ unsigned long long claimed_generation = 0;

}  // namespace

unsigned long long* fault_claim(const char* op) {
  void* address = nullptr;
  check(op, "finding the fault claim of the device", cudaGetSymbolAddress(&address, claimed_generation));
  return static_cast<unsigned long long*>(address);
}

}  // namespace kvio::gpu
