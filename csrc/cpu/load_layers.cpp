#include "cpu/load_layers.h"

#include "cpu/transfer.h"
#include "error.h"

namespace kvio::cpu {
namespace {

// Another thread may look at flags while layers are copied.
int64_t read_flag(const LayerFlags& flags, int64_t layer) {
  return __atomic_load_n(flags.raised + layer, __ATOMIC_ACQUIRE);
}

int64_t value_of(const Epoch& epoch) { return epoch.at != nullptr ? *epoch.at : epoch.number; }

}  // namespace

void load_layers(const LoadLayersRequest& request) {
  const int64_t epoch = value_of(request.epoch);
  for (int64_t layer = 0; layer < request.num_layers; ++layer) {
    const int64_t raised = read_flag(request.flags, layer);
    if (epoch <= raised) {
      fail("load_layers", "epoch is ", epoch, " but flags[0, ", layer, "] is ", raised,
           " already; it needs a later one for every load");
    }
  }
  for (int64_t layer = 0; layer < request.num_layers; ++layer) {
    if (!request.layer.empty()) transfer(request.layer_at(layer));
    __atomic_store_n(request.flags.raised + layer, epoch, __ATOMIC_RELEASE);
  }
}

void wait_layer(const WaitLayerRequest& request) {
  const int64_t epoch = value_of(request.epoch);
  const int64_t raised = read_flag(request.flags, request.layer);
  if (raised >= epoch) return;
  fail("wait_layer", "flags[0, ", request.layer, "] is ", raised, "; it needs ", epoch, " or more: layer ",
       request.layer, " is not in place (call load_layers with that epoch first)");
}

}  // namespace kvio::cpu
