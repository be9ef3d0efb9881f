#include "cpu/transfer.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstring>

#include "plan/runs.h"

namespace kvio::cpu {
namespace {

constexpr int64_t kGrainBytes = 128 << 10;  // below this a second thread costs more than it saves

// memmove: rows read may be rows written, which leaves their bytes undefined but nothing else.
void copy_run(const BufferGroup& group, size_t buffer, const Run& run) {
  char* dst = group.dst_base[buffer] + group.dst.offset(run.dst_slot);
  const char* src = group.src_base[buffer] + group.src.offset(run.src_slot);
  const size_t piece_bytes = static_cast<size_t>(group.dst.piece_bytes);
  if (group.dst.packed() && group.src.packed()) {
    std::memmove(dst, src, piece_bytes * static_cast<size_t>(run.num_slots));
    return;
  }
  for (int64_t p = 0; p < group.dst.num_pieces; ++p) {
    std::memmove(dst + p * group.dst.piece_stride, src + p * group.src.piece_stride, piece_bytes);
  }
}

}  // namespace

void transfer(const TransferRequest& request) {
  for (const BufferGroup& group : request.groups) {
    const int64_t per_index = std::max<int64_t>(1, group.dst.row_bytes() * request.slots_per_index);
    const int64_t grain = std::max<int64_t>(1, kGrainBytes / per_index);
    const int64_t count = request.num_indices;
    const int64_t buffers = static_cast<int64_t>(group.dst_base.size());
    torch::stable::parallel_for(0, buffers * count, grain, [&](int64_t begin, int64_t end) {
      while (begin < end) {
        const int64_t buffer = begin / count;
        const int64_t stop = std::min(end, (buffer + 1) * count);
        for_each_run(request, group, begin - buffer * count, stop - buffer * count,
                     [&](const Run& run) { copy_run(group, static_cast<size_t>(buffer), run); });
        begin = stop;
      }
    });
  }
}

void memcpy_batch(const MemcpyBatchRequest& request) {
  int64_t total = 0;
  for (const ByteCopy& copy : request.copies) total += copy.nbytes;
  const int64_t count = static_cast<int64_t>(request.copies.size());
  if (count == 0) return;
  const int64_t grain = std::max<int64_t>(1, kGrainBytes / std::max<int64_t>(1, total / count));
  torch::stable::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; ++k) {
      const ByteCopy& copy = request.copies[static_cast<size_t>(k)];
      std::memmove(copy.dst, copy.src, static_cast<size_t>(copy.nbytes));
    }
  });
}

}  // namespace kvio::cpu
