// How long the runs of a request are, without listing them: what a backend choice needs, in one pass over the indices.
#pragma once

#include "request/request.h"

namespace kvio {

// Of all buffers together.
struct RunStats {
  int64_t runs = 0;       // pieces of memory that follow each other on both sides: copies for a driver
  int64_t stretches = 0;  // slots that follow each other on both sides inside a page, whether or not their rows touch
};

// CPU indices, which must have been checked. Counts what for_each_run visits, and joins buffers that follow each other
// on both sides page by page (layers of two page_first_direct pools) or row by row (of two token-major ones).
RunStats count_runs(const TransferRequest& request);

// GPU indices, which nobody has read: a page's slots follow each other, and nothing else does.
RunStats promised_runs(const TransferRequest& request);

}  // namespace kvio
