// How a load says that a layer is in place, and how a wait hears of it. No assembly and no vendor's names: compiled for
// GPUs and, to be tested in drawn orders of events (tests/native/layer_flags_steps.cpp), for the CPU.
//
// Items are numbered layer by layer, and wave w of n takes items w, w + n, ...: nothing holds a wave back between two
// layers. A wave that has moved its last item of a layer counts itself there. Whoever makes the count complete sets it
// back to 0, for the next load, and raises the flag. So a load needs no memset, before or after, and a captured one can
// be replayed.
#pragma once

#include <cstdint>

#include "request/load_layers_request.h"

#if defined(__CUDACC__) || defined(__HIP__)
#define KVIO_FLAG_STEP __device__ __forceinline__
#else
#define KVIO_FLAG_STEP inline
#endif

namespace kvio::gpu {

// Which item a wave is at: `item` of `layer`.
struct LayerWalk {
  uint32_t layer;
  uint32_t item;

  // Moves on by `step` items; false behind the last layer. Steps may span layers.
  KVIO_FLAG_STEP bool advance(uint32_t step, uint32_t items_per_layer, uint32_t num_layers) {
    item += step;
    while (item >= items_per_layer) {
      item -= items_per_layer;
      if (++layer >= num_layers) return false;
    }
    return true;
  }

  // Whether a wave that moves on by `step` items has no more of this layer.
  KVIO_FLAG_STEP bool is_last(uint32_t step, uint32_t items_per_layer) const { return item + step >= items_per_layer; }
};

// What a load tells of its layers, from `first_layer` on.
struct LayerReport {
  LayerFlags flags;
  int64_t epoch;
  uint32_t first_layer;
  uint32_t items_per_layer;
};

// Raises the flag of a layer whose rows are all in place. Flags never go back: an epoch that is not above the flag was
// given to a load before, and waits for it may have passed.
template <class Env>
KVIO_FLAG_STEP void raise_layer(const Env& env, const LayerReport& report, uint32_t layer) {
  int64_t* flag = report.flags.raised + report.first_layer + layer;
  const int64_t before = *flag;
  if (report.epoch <= before) {
    env.fault(report.epoch, before + 1);
    return;
  }
  env.raise(flag, report.epoch);
}

// One lane of a wave calls it, after all lanes have moved the wave's last item of `layer`. Of `num_waves` waves as many
// have an item of a layer as it has items, at most all.
template <class Env>
KVIO_FLAG_STEP void finish_layer(const Env& env, const LayerReport& report, uint32_t layer, uint32_t num_waves) {
  int64_t* finished = report.flags.finished + report.first_layer + layer;
  const uint32_t waves = num_waves < report.items_per_layer ? num_waves : report.items_per_layer;
  env.publish();  // the wave's rows, before its count
  if (env.add(finished, 1) + 1 != waves) return;
  env.observe();  // the rows of every wave that has counted
  *finished = 0;
  raise_layer(env, report, layer);
}

// Returns when the flag is raised for `epoch` or a later one, or after `timeout_ns`, with a fault.
template <class Env>
KVIO_FLAG_STEP void await_layer(const Env& env, const int64_t* flag, int64_t epoch, uint64_t timeout_ns) {
  int64_t raised = env.read(flag);
  if (raised >= epoch) return;
  const uint64_t start = env.now_ns();
  while (true) {
    // The clock first: a flag that is raised while time runs out counts.
    const bool late = env.now_ns() - start > timeout_ns;
    raised = env.read(flag);
    if (raised >= epoch) return;
    if (late) break;
    env.pause();
  }
  env.fault(raised, epoch);
}

}  // namespace kvio::gpu
