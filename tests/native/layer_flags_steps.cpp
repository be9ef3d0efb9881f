// What a load's waves and those who wait for it do (gpu/layer_flags.h), on the CPU: one event after the other, each of
// a wave drawn anew. A row counts as there for others only once its wave has published it, and whoever raises a flag
// knows of others' rows only once it has observed them.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <map>
#include <random>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "gpu/layer_flags.h"

namespace py = pybind11;

namespace kvio {
namespace {

using gpu::LayerReport;
using gpu::LayerWalk;

using Item = std::pair<int64_t, uint32_t>;  // layer, number in it

struct Wave {
  LayerWalk walk{0, 0};
  bool at_work = false;
  std::vector<Item> unpublished;
};

// One load after the other over the same flags, and what went wrong.
struct World {
  std::vector<int64_t> raised;
  std::vector<int64_t> finished;
  std::map<Item, int64_t> moved;  // times that an item was moved in this load
  std::set<Item> published;
  std::vector<std::string> wrong;
  std::vector<std::tuple<int64_t, int64_t>> faults;  // value, least that would do
  uint32_t items_per_layer = 0;
  int64_t first_layer = 0;

  void expect(bool right, const char* what) {
    if (!right) wrong.emplace_back(what);
  }
};

// Of one wave, as it finishes a layer.
struct WaveEnv {
  World* world;
  Wave* wave;
  mutable bool published = false;
  mutable bool observed = false;

  void publish() const {
    world->published.insert(wave->unpublished.begin(), wave->unpublished.end());
    wave->unpublished.clear();
    published = true;
  }
  int64_t add(int64_t* at, int64_t value) const {
    world->expect(published, "a wave counted before its rows were published");
    const int64_t before = *at;
    *at += value;
    return before;
  }
  void observe() const { observed = true; }
  void raise(int64_t* flag, int64_t epoch) const {
    world->expect(observed, "a flag was raised before the rows of others were observed");
    const int64_t layer = flag - world->raised.data();
    for (uint32_t item = 0; item < world->items_per_layer; ++item) {
      world->expect(world->published.count({layer, item}) == 1, "a flag was raised before all rows were there");
    }
    *flag = epoch;
  }
  void fault(int64_t value, int64_t limit) const { world->faults.emplace_back(value, limit); }
};

// A launch, an event at a time.
class Load {
 public:
  Load(World* world, uint32_t waves, uint32_t items_per_layer, uint32_t layers, int64_t first_layer, int64_t epoch,
       std::mt19937_64* random)
      : world_(world), waves_(waves), layers_(layers), random_(random) {
    world->items_per_layer = items_per_layer;
    world->first_layer = first_layer;
    report_.flags = {world->raised.data(), world->finished.data(), static_cast<int64_t>(world->raised.size())};
    report_.epoch = epoch;
    report_.first_layer = static_cast<uint32_t>(first_layer);
    report_.items_per_layer = items_per_layer;
    for (uint32_t w = 0; w < waves; ++w) waves_[w].at_work = waves_[w].walk.advance(w, items_per_layer, layers);
  }

  bool at_work() const {
    for (const Wave& wave : waves_) {
      if (wave.at_work) return true;
    }
    return false;
  }

  // Some wave moves its next item, and says so where it was its last of a layer.
  void step() {
    std::vector<Wave*> ready;
    for (Wave& wave : waves_) {
      if (wave.at_work) ready.push_back(&wave);
    }
    if (ready.empty()) return;
    Wave& wave = *ready[(*random_)() % ready.size()];
    const uint32_t num_waves = static_cast<uint32_t>(waves_.size());
    const Item item{world_->first_layer + wave.walk.layer, wave.walk.item};
    ++world_->moved[item];
    wave.unpublished.push_back(item);
    if (wave.walk.is_last(num_waves, report_.items_per_layer)) {
      gpu::finish_layer(WaveEnv{world_, &wave}, report_, wave.walk.layer, num_waves);
    }
    wave.at_work = wave.walk.advance(num_waves, report_.items_per_layer, layers_);
  }

 private:
  World* world_;
  std::vector<Wave> waves_;
  uint32_t layers_;
  LayerReport report_;
  std::mt19937_64* random_;
};

// Of one who waits: the load goes on while it pauses, some steps a time, or not at all.
struct WaiterEnv {
  World* world;
  Load* load;
  std::mt19937_64* random;
  uint64_t* clock;
  uint32_t most_steps;

  int64_t read(const int64_t* flag) const { return *flag; }
  uint64_t now_ns() const { return (*clock)++; }
  void pause() const {
    *clock += 200;
    for (uint64_t n = most_steps == 0 ? 0 : (*random)() % (most_steps + 1); n > 0; --n) load->step();
  }
  void fault(int64_t value, int64_t limit) const { world->faults.emplace_back(value, limit); }
};

}  // namespace

void bind_layer_flags_steps(py::module_& m) {
  m.def(
      "run_loads",
      [](uint32_t waves, uint32_t items_per_layer, uint32_t layers, int64_t columns, int64_t first_layer,
         const std::vector<int64_t>& epochs, uint32_t most_steps, uint64_t timeout_ns, uint64_t seed) {
        std::mt19937_64 random(seed);
        World world;
        world.raised.assign(static_cast<size_t>(columns), 0);
        world.finished.assign(static_cast<size_t>(columns), 0);
        uint64_t clock = 0;
        std::vector<std::map<Item, int64_t>> moved;
        for (const int64_t epoch : epochs) {
          world.moved.clear();
          world.published.clear();
          Load load(&world, waves, items_per_layer, layers, first_layer, epoch, &random);
          const WaiterEnv waiter{&world, &load, &random, &clock, most_steps};
          for (int64_t layer = first_layer; layer < first_layer + layers; ++layer) {
            const size_t faults = world.faults.size();
            gpu::await_layer(waiter, &world.raised[static_cast<size_t>(layer)], epoch, timeout_ns);
            for (uint32_t item = 0; item < items_per_layer && world.faults.size() == faults; ++item) {
              world.expect(world.published.count({layer, item}) == 1, "a wait ended before all rows were there");
            }
          }
          while (load.at_work()) load.step();
          moved.push_back(world.moved);
        }
        return std::make_tuple(world.raised, world.finished, moved, world.faults, world.wrong);
      },
      py::kw_only(), py::arg("waves"), py::arg("items_per_layer"), py::arg("layers"), py::arg("columns"),
      py::arg("first_layer") = 0, py::arg("epochs"), py::arg("most_steps"), py::arg("timeout_ns") = uint64_t{10000000},
      py::arg("seed"), "(flags, counts, for each load {(layer, item): times moved}, faults, what went wrong)");
}

}  // namespace kvio
