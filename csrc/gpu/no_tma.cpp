// transfer_tma.h for GPUs without bulk copies: plan/backend.cpp never chooses them there and says why when asked to.
#include "error.h"
#include "gpu/transfer_tma.h"

namespace kvio::gpu {

bool has_bulk_code(int) { return false; }

TmaPolicy tma_policy(const char*, int) { return TmaPolicy(); }

void launch_tma(const TransferRequest&, const BufferGroup&, int, Stream) {
  fail("transfer", "this build has no bulk copies");
}

}  // namespace kvio::gpu
