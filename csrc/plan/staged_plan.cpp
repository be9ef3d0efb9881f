#include "plan/staged_plan.h"

#include <algorithm>
#include <cstdint>
#include <exception>
#include <numeric>
#include <sstream>

#include "error.h"

namespace kvio {
namespace {

// The host pool's side of a request.
struct HostSide {
  const TransferRequest& request;
  bool is_dst;

  const char* argument() const { return is_dst ? "dst" : "src"; }
  const PoolView& view(const BufferGroup& group) const { return is_dst ? group.dst : group.src; }
  const IndexList& indices() const { return is_dst ? request.dst_indices : request.src_indices; }
  char* base(const BufferGroup& group, size_t buffer) const {
    return is_dst ? group.dst_base[buffer] : const_cast<char*>(group.src_base[buffer]);
  }
};

// Bytes from one page of the host view to the next; 0 when its pages are not those of the call.
int64_t page_stride(const PoolView& view, int64_t page_size) {
  if (view.is_flat()) return page_size * view.token_stride;
  return view.page_slots == page_size ? view.page_stride : 0;
}

struct Level {
  int64_t count;
  int64_t stride;
};

// Whether `levels` of equal steps over `unit` contiguous bytes touch every byte of a range once.
bool fills_a_range(int64_t unit, std::vector<Level> levels) {
  std::sort(levels.begin(), levels.end(), [](const Level& a, const Level& b) { return a.stride < b.stride; });
  int64_t filled = unit;
  for (const Level& level : levels) {
    if (level.count == 1) continue;
    if (level.stride != filled) return false;
    filled *= level.count;
  }
  return true;
}

// Distance of neighbours when all are equally far apart, -1 when they are not.
int64_t even_step(const HostSide& host, const BufferGroup& group, const std::vector<size_t>& buffers) {
  if (buffers.size() == 1) return 0;
  const auto at = [&](size_t i) { return host.base(group, buffers[i]); };
  const int64_t step = at(1) - at(0);
  for (size_t i = 2; i < buffers.size(); ++i) {
    if (at(i) - at(i - 1) != step) return -1;
  }
  return step;
}

// Cuts a group's buffers, by address, where one does not begin inside the page of the first.
std::vector<std::vector<size_t>> share_pages(const HostSide& host, const BufferGroup& group, int64_t stride) {
  std::vector<size_t> order(group.position.size());
  std::iota(order.begin(), order.end(), size_t{0});
  const auto at = [&](size_t buffer) { return host.base(group, buffer); };
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return at(a) < at(b); });
  std::vector<std::vector<size_t>> shares;
  for (const size_t buffer : order) {
    if (shares.empty() || at(buffer) - at(shares.back()[0]) >= stride) shares.emplace_back();
    shares.back().push_back(buffer);
  }
  return shares;
}

PageBlock make_block(const char* op, const HostSide& host, size_t g, std::vector<size_t> buffers) {
  const BufferGroup& group = host.request.groups[g];
  const PoolView& view = host.view(group);
  const int64_t page_size = host.request.page_size;
  const int64_t step = even_step(host, group, buffers);
  const std::vector<Level> levels = {{static_cast<int64_t>(buffers.size()), step},
                                     {page_size, view.token_stride},
                                     {view.num_pieces, view.piece_stride}};
  if (step < 0 || !fills_a_range(view.piece_bytes, levels)) {
    fail(op, host.argument(), "[", group.position[buffers[0]],
         "] and its neighbours do not fill their pages; it needs page_first or page_first_direct host rows, all layers "
         "of a page in one call");
  }
  PageBlock block;
  block.group = g;
  block.host = host.base(group, buffers[0]);
  block.page_stride = page_stride(view, page_size);
  block.nbytes = view.row_bytes() * page_size * static_cast<int64_t>(buffers.size());
  block.buffers = std::move(buffers);
  return block;
}

int64_t rounded(int64_t bytes) { return (bytes + kStagedAlignment - 1) / kStagedAlignment * kStagedAlignment; }

// Counts positions from `first` on that name consecutive slots of one whole page.
bool is_whole_page(const IndexList& list, int64_t first, int64_t count, int64_t page_size) {
  if (first + page_size > count) return false;
  const int64_t slot = list.at(first);
  if (slot % page_size != 0) return false;
  for (int64_t i = 1; i < page_size; ++i) {
    if (list.at(first + i) != slot + i) return false;
  }
  return true;
}

void add_rest(StagedWork* work, int64_t position) {
  if (work->rest.empty() || work->rest.back().end != position) work->rest.push_back({position, position});
  work->rest.back().end = position + 1;
}

}  // namespace

StagedLayout make_staged_layout(const char* op, const TransferRequest& request, bool host_is_dst) {
  const HostSide host{request, host_is_dst};
  StagedLayout layout;
  for (size_t g = 0; g < request.groups.size(); ++g) {
    const BufferGroup& group = request.groups[g];
    if (group.dst.row_bytes() == 0) continue;
    const int64_t stride = page_stride(host.view(group), request.page_size);
    if (stride <= 0) {
      fail(op, host.argument(), "[", group.position[0], "] has pages of ", host.view(group).page_slots,
           " slots; it needs pages of page_size=", request.page_size);
    }
    for (std::vector<size_t>& buffers : share_pages(host, group, stride)) {
      layout.blocks.push_back(make_block(op, host, g, std::move(buffers)));
      PageBlock& block = layout.blocks.back();
      block.staged_offset = layout.page_bytes;
      block.staged_stride = rounded(block.nbytes);
      layout.page_bytes += block.staged_stride;
    }
  }
  return layout;
}

namespace {

// Ranges that a page of one side consists of; none when they are not contiguous.
size_t num_ranges(const TransferRequest& request, bool host_is_dst) {
  try {
    return make_staged_layout("", request, host_is_dst).blocks.size();
  } catch (const std::exception&) {
    return SIZE_MAX;
  }
}

// Between CPU pools the host pool is the one whose pages lie together best.
bool find_host_side(const TransferRequest& request) {
  if (request.gpu_index >= 0) return request.dst_device == DeviceKind::kCpu;
  return num_ranges(request, true) <= num_ranges(request, false);
}

}  // namespace

PoolView staged_view(const PoolView& host, int64_t page_size, int64_t staged_stride, int64_t pages) {
  PoolView view = host;
  view.slots = pages * page_size;
  view.page_slots = page_size;
  view.page_stride = staged_stride;
  if (page_size == 1) view.token_stride = staged_stride;
  return view;
}

int64_t pages_in_one_piece(const PageBlock& block, const int64_t* pages, int64_t count) {
  if (block.page_stride != block.nbytes || block.staged_stride != block.nbytes) return 1;
  int64_t run = 1;
  while (run < count && pages[run] == pages[0] + run) ++run;
  return run;
}

StagedWork find_pages(const TransferRequest& request, bool host_is_dst) {
  const IndexList& list = HostSide{request, host_is_dst}.indices();
  const int64_t size = request.page_size;
  const bool by_page = request.slots_per_index == size;
  StagedWork work;
  work.positions_per_page = by_page ? 1 : size;
  int64_t next = -1;  // position that would go on with the last stretch
  for (int64_t i = 0; i < request.num_indices;) {
    if (!by_page && !is_whole_page(list, i, request.num_indices, size)) {
      add_rest(&work, i++);
      continue;
    }
    if (i != next) work.stretches.push_back({i, {}});
    work.stretches.back().pages.push_back(by_page ? list.at(i) : list.at(i) / size);
    ++work.num_pages;
    i += work.positions_per_page;
    next = i;
  }
  return work;
}

StagedHalves halves_of(int64_t staging_bytes, const StagedLayout& layout) {
  const int64_t pages = layout.page_bytes > 0 ? staging_bytes / layout.page_bytes : 0;
  if (pages < 2) return {pages, pages, pages, pages};
  const int64_t half = pages / 2;
  const int64_t lone = std::clamp<int64_t>(kLoneChunkBytes / layout.page_bytes, 1, half);
  return {half, 2, lone, std::max<int64_t>(1, 2 * kLoneChunkBytes / layout.page_bytes)};
}

int64_t next_chunk(const StagedHalves& halves, bool host_is_dst, bool lone, int64_t left) {
  const int64_t most = std::min(halves.pages, left);
  if (!lone || left <= halves.uncut_pages) return most;
  return host_is_dst ? halves.lone_pages : std::min(most, left - halves.lone_pages);
}

StagedPlan make_staged_plan(const char* op, const StagedRequest& request) {
  StagedPlan plan;
  plan.host_is_dst = find_host_side(request.transfer);
  plan.layout = make_staged_layout(op, request.transfer, plan.host_is_dst);
  plan.halves = halves_of(request.staging_bytes, plan.layout);
  if (plan.halves.pages == 0 && plan.layout.page_bytes > 0) {
    fail(op, "staging has ", request.staging_bytes, " bytes; it needs ", plan.layout.page_bytes,
         " or more, one page of all buffers");
  }
  if (!request.transfer.empty()) plan.work = find_pages(request.transfer, plan.host_is_dst);
  return plan;
}

std::string describe(const StagedPlan& plan, const StagedRequest& request) {
  int64_t rest = 0;
  for (const PositionRange& range : plan.work.rest) rest += range.end - range.begin;
  std::ostringstream text;
  text << "pages: " << plan.work.num_pages << " whole, in " << plan.work.stretches.size() << " stretches\n"
       << "rest: " << rest << " positions that make no whole page, row by row\n"
       << "staging: " << request.staging_bytes << " bytes, " << plan.halves.count << " halves of " << plan.halves.pages
       << " pages of " << plan.layout.page_bytes << " bytes in " << plan.layout.blocks.size() << " ranges\n";
  return text.str();
}

}  // namespace kvio
