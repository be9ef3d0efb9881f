// GPU side of kvio::transfer_staged: whole pages by driver copies, relayout by a kernel, in two halves of a staging
// buffer that take turns.
#pragma once

#include <string>

#include "request/staged_request.h"

namespace kvio::gpu {

// Enqueues on the caller's current stream, with copies on a side stream that is forked from it and joined to it by
// events; never waits for the GPU. Positions that make no whole host page go through the register kernel.
void transfer_staged(StagedRequest* request);

// What it would do, as text lines.
std::string explain_staged(const StagedRequest& request);

}  // namespace kvio::gpu
