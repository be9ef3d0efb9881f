// The request of kvio::transfer_staged: a transfer, and the buffer that whole pages go through.
#pragma once

#include "request/request.h"

namespace kvio {

struct StagedRequest {
  TransferRequest transfer;
  char* staging = nullptr;
  int64_t staging_bytes = 0;
};

// As make_transfer_request. One pool is on the host and one on a GPU, or everything on the CPU. The host pool's index
// list is on the CPU; the other one may be on the GPU too.
StagedRequest make_staged_request(const char* op, const std::vector<TensorView>& dst,
                                  const std::vector<TensorView>& src, const TensorView& dst_indices,
                                  const TensorView& src_indices, const TensorView& staging,
                                  const TransferOptions& options, DtypeName dtype_name);

}  // namespace kvio
