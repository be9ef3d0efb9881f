// Whole pages through a staging buffer: which index positions make whole pages of the host pool, where a page's bytes
// lie there, and how they lie in the staging buffer. Pure host code.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "request/staged_request.h"

namespace kvio {

// One contiguous range of every host page: all layers of K, say. `staged_offset` is where it lies in a staged page.
struct PageBlock {
  size_t group = 0;
  std::vector<size_t> buffers;  // of the group, by address
  char* host = nullptr;         // of page 0
  int64_t page_stride = 0;
  int64_t nbytes = 0;
  int64_t staged_offset = 0;
};

struct StagedLayout {
  std::vector<PageBlock> blocks;
  int64_t page_bytes = 0;  // of one staged page: all blocks, each from a multiple of kStagedAlignment on
};

constexpr int64_t kStagedAlignment = 256;

// Throws when the call's host rows do not fill contiguous ranges of their pages.
StagedLayout make_staged_layout(const char* op, const TransferRequest& request, bool host_is_dst);

// The rows of a host view as they lie in a staging buffer of `pages` pages.
PoolView staged_view(const PoolView& host, int64_t page_size, const StagedLayout& layout, int64_t pages);

// Index positions [first, first + count * positions_per_page) that name whole host pages one after the other, and what
// they name.
struct PageStretch {
  int64_t first = 0;
  std::vector<int64_t> pages;
};

struct PositionRange {
  int64_t begin = 0;
  int64_t end = 0;
};

struct StagedWork {
  int64_t positions_per_page = 1;
  std::vector<PageStretch> stretches;
  std::vector<PositionRange> rest;  // what makes no whole page
  int64_t num_pages = 0;
};

// Reads the host pool's index list, which is on the CPU and checked.
StagedWork find_pages(const TransferRequest& request, bool host_is_dst);

// A staging buffer's use: pages of one half, and how many halves there are (one when it holds a single page).
struct StagedHalves {
  int64_t pages = 0;
  int64_t count = 0;
};
StagedHalves halves_of(int64_t staging_bytes, const StagedLayout& layout);

struct StagedPlan {
  bool host_is_dst = true;
  StagedLayout layout;
  StagedHalves halves;
  StagedWork work;
};

// Throws when host pages are no contiguous ranges or the staging buffer holds less than one of them.
StagedPlan make_staged_plan(const char* op, const StagedRequest& request);

// Lines of explain_staged.
std::string describe(const StagedPlan& plan, const StagedRequest& request);

}  // namespace kvio
