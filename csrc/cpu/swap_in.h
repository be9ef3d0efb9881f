// The CPU kernels of HiSparse: they decide everything before they write anything, so a refused call changes nothing.
#pragma once

#include "request/swap_in_request.h"

namespace kvio::cpu {

// Every tensor of the request is on the CPU. Synchronous.
void swap_in(const SwapInRequest& request);

void copy_planned(const CopyPlannedRequest& request);

}  // namespace kvio::cpu
