// Whole pages through a staging buffer: which index positions make whole pages of the host pool, where a page's bytes
// lie there, and how they lie in the staging buffer. Pure host code.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "request/staged_request.h"

namespace kvio {

// One contiguous range of every host page: all layers of K, say. A half of the staging buffer holds all pages of the
// first block, then all of the next one, so that host pages which follow each other are one copy.
struct PageBlock {
  size_t group = 0;
  std::vector<size_t> buffers;  // of the group, by address
  char* host = nullptr;         // of page 0
  int64_t page_stride = 0;
  int64_t nbytes = 0;
  int64_t staged_offset = 0;  // of page 0 in a half of one page; grows with the half's pages
  int64_t staged_stride = 0;  // from one staged page to the next
};

struct StagedLayout {
  std::vector<PageBlock> blocks;
  int64_t page_bytes = 0;  // that a page takes in the buffer: its blocks, each rounded up to kStagedAlignment
};

constexpr int64_t kStagedAlignment = 256;

// Throws when the call's host rows do not fill contiguous ranges of their pages.
StagedLayout make_staged_layout(const char* op, const TransferRequest& request, bool host_is_dst);

// The rows of a host view as they lie in a half of `pages` pages that are `staged_stride` apart.
PoolView staged_view(const PoolView& host, int64_t page_size, int64_t staged_stride, int64_t pages);

// Bytes from the start of a half of `pages` pages to a block's page `page`.
inline int64_t staged_place(const PageBlock& block, int64_t pages, int64_t page) {
  return block.staged_offset * pages + page * block.staged_stride;
}

// How many of `pages`, from the first on, follow each other both on the host and in the staging buffer: at least one.
int64_t pages_in_one_piece(const PageBlock& block, const int64_t* pages, int64_t count);

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
  int64_t lone_pages = 0;   // of a chunk whose relayout runs beside no copy
  int64_t uncut_pages = 0;  // up to which a lone chunk is not worth cutting off
};
StagedHalves halves_of(int64_t staging_bytes, const StagedLayout& layout);

// The first relayout of a write-back and the last one of a restore run beside no copy: few bytes then.
constexpr int64_t kLoneChunkBytes = 4 << 20;

// Pages of the next chunk, of `left` pages, where `lone` says that the one relayout without a copy beside it is still
// to come (a write-back) or comes at the end of these pages (a restore).
int64_t next_chunk(const StagedHalves& halves, bool host_is_dst, bool lone, int64_t left);

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
