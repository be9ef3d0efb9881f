#include "gpu/fault.h"

#include <cstring>
#include <mutex>

#include "error.h"
#include "request/fault_subject.h"

namespace kvio::gpu {
namespace {

struct DeviceRecord {
  FaultRecord* host = nullptr;
  FaultRecord* device = nullptr;
};

std::mutex records_mutex;
DeviceRecord records[kMaxDevices];

}  // namespace

FaultRecord* fault_record(const char* op, int device) {
  if (device < 0 || device >= kMaxDevices) fail(op, "device index ", device, " is outside 0 to ", kMaxDevices - 1);
  const std::lock_guard<std::mutex> lock(records_mutex);
  DeviceRecord& record = records[device];
  if (record.device != nullptr) return record.device;
  const RelaxedCapture relaxed;
  unsigned long long* claimed = fault_claim(op);
  void* host = nullptr;
  check(op, "allocating the fault record",
        cudaHostAlloc(&host, sizeof(FaultRecord), cudaHostAllocMapped | cudaHostAllocPortable));
  std::memset(host, 0, sizeof(FaultRecord));
  static_cast<FaultRecord*>(host)->generation = 1;
  static_cast<FaultRecord*>(host)->claimed = claimed;
  void* alias = nullptr;
  const Error mapped = cudaHostGetDevicePointer(&alias, host, 0);
  if (mapped != cudaSuccess) (void)cudaFreeHost(host);
  check(op, "mapping the fault record", mapped);
  record.host = static_cast<FaultRecord*>(host);
  record.device = static_cast<FaultRecord*>(alias);
  return record.device;
}

bool take_fault(int device, Fault* out) {
  if (device < 0 || device >= kMaxDevices) return false;
  const std::lock_guard<std::mutex> lock(records_mutex);
  volatile FaultRecord* record = records[device].host;
  if (record == nullptr || record->recorded != record->generation) return false;
  __sync_synchronize();
  *out = {record->op, record->position, record->value, record->limit};
  record->generation = record->generation + 1;
  return true;
}

void raise_pending_fault(const char* op, int device) {
  Fault fault;
  if (!take_fault(device, &fault)) return;
  const FaultSubject subject = fault_subject(fault.op);
  fail(op, "an earlier kvio::", subject.op, " on cuda:", device, " met ", fault_place(subject, fault.position), " = ",
       fault.value, "; it needs ", fault_need(subject, fault.limit), ". ", subject.consequence);
}

}  // namespace kvio::gpu
