// Handles: numbers that stand for something the process keeps, so that a graph can name it without holding it.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <utility>

#include "error.h"

namespace kvio {

constexpr int64_t kFirstOwnHandle = int64_t{1} << 32;  // below are those that callers choose

// Any thread may call anything. An item lives until it is removed and the last call that found it has let go of it.
template <class Item>
class HandleRegistry {
 public:
  HandleRegistry() : first_(kFirstOwnHandle * (1 + std::random_device()() % (1u << 20))), next_(first_) {}

  // `wanted` is a number of the caller's, free now; 0 takes one that was never given out. Those begin somewhere else in
  // each process: a number that a compiled graph carried over from another one finds nothing instead of another pool.
  int64_t add(const char* op, std::shared_ptr<const Item> item, int64_t wanted) {
    if (wanted < 0 || wanted >= kFirstOwnHandle) {
      fail(op, "handle is ", wanted, "; it needs 0 (chosen for you) to ", kFirstOwnHandle - 1);
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    const int64_t handle = wanted == 0 ? next_++ : wanted;
    if (!items_.emplace(handle, std::move(item)).second) {
      fail(op, "handle is ", wanted, ", which an open pool has; it needs a free number, or 0 (chosen for you)");
    }
    return handle;
  }

  // The item goes to the caller, because its end may wait for locks of others.
  std::shared_ptr<const Item> remove(const char* op, int64_t handle) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = find_or_fail(op, handle);
    std::shared_ptr<const Item> item = std::move(found->second);
    items_.erase(found);
    if (handle < kFirstOwnHandle) removed_.insert(handle);
    return item;
  }

  std::shared_ptr<const Item> find(const char* op, int64_t handle) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return find_or_fail(op, handle)->second;
  }

 private:
  using Items = std::map<int64_t, std::shared_ptr<const Item>>;

  typename Items::iterator find_or_fail(const char* op, int64_t handle) {
    const auto found = items_.find(handle);
    if (found != items_.end()) return found;
    if (removed_.count(handle) > 0 || (first_ <= handle && handle < next_)) {
      fail(op, "handle is ", handle, ", whose pool was closed; it needs the handle of an open pool");
    }
    fail(op, "handle is ", handle,
         ", which names no pool of this process; it needs HostKVPool.handle, or what kvio::register_pool returned");
  }

  std::mutex mutex_;
  Items items_;
  std::set<int64_t> removed_;  // of the callers' numbers, for the error text
  const int64_t first_;        // of the registry's own
  int64_t next_;
};

}  // namespace kvio
