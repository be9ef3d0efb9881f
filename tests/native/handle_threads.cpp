// Threads that add, find and remove handles at once: what a call found stays whole until it lets go of it.
//
//   handle_threads          silent when everything held; else says what did not, and ends with 1
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

#include "request/handle_registry.h"

namespace {

constexpr int kThreads = 4;
constexpr int kRounds = 5000;
constexpr int64_t kShared = 7;

std::atomic<int64_t> alive{0};
std::atomic<int64_t> faults{0};

struct Item {
  explicit Item(int64_t v) : value(v), twice(2 * v) { ++alive; }
  ~Item() {
    value = twice = -1;
    --alive;
  }
  int64_t value;
  int64_t twice;
};

void expect(bool held, const char* what) {
  if (held) return;
  ++faults;
  std::printf("%s\n", what);
}

using Registry = kvio::HandleRegistry<Item>;

void look_at_shared(Registry* registry) {
  try {
    const auto item = registry->find("look", kShared);
    expect(item->twice == 2 * item->value, "an item that was found is not whole");
  } catch (const std::runtime_error&) {
    // Closed by another thread, which is fine.
  }
}

// The number that all threads fight for: one has it at a time.
void add_and_remove_shared(Registry* registry, int64_t value) {
  try {
    registry->add("add", std::make_shared<const Item>(value), kShared);
  } catch (const std::runtime_error&) {
    return;
  }
  const auto item = registry->remove("remove", kShared);
  expect(item->value == value, "another thread's item was removed");
}

void run(Registry* registry, int64_t thread) {
  int64_t last = 0;
  for (int64_t round = 0; round < kRounds; ++round) {
    const int64_t value = thread * kRounds + round;
    const int64_t own = registry->add("add", std::make_shared<const Item>(value), 0);
    expect(own > last, "a handle of the registry's own was given out again");
    last = own;
    add_and_remove_shared(registry, value);
    look_at_shared(registry);
    expect(registry->find("find", own)->value == value, "a handle names another item");
    expect(registry->remove("remove", own)->value == value, "a handle removed another item");
  }
}

}  // namespace

int main() {
  {
    Registry registry;
    std::vector<std::thread> threads;
    for (int64_t i = 0; i < kThreads; ++i) threads.emplace_back(run, &registry, i);
    for (std::thread& thread : threads) thread.join();
  }
  expect(alive == 0, "an item outlived its registry");
  return faults == 0 ? 0 : 1;
}
