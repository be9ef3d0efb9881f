// Barriers and bulk copies of sm_90 and later. A kernel reads as a protocol (arm, load, wait, store, release); every
// instruction of it is here.
//
// An mbarrier counts arrivals and bytes. Its phase ends when all expected arrivals and all expected bytes have come;
// then the next one begins by itself. Waiters name a phase by its parity. Addresses are generic pointers into the CTA's
// own shared memory.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace kvio::gpu {

using Barrier = uint64_t;  // in shared memory, 8-byte aligned

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// One thread, once, before any use; `arrivals` ends a phase. @warning other threads may use the barrier only after
// publish_barriers() by this thread and a __syncthreads().
__device__ __forceinline__ void init_barrier(Barrier* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

// Makes initialized barriers visible to the copy unit too.
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// One arrival. What this thread (and, after a __syncwarp(), its warp) did before is seen by who waits for the phase.
__device__ __forceinline__ void arrive(Barrier* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// One arrival, and `bytes` more that bulk copies have to bring before the phase ends. Copies may be issued after it.
__device__ __forceinline__ void arrive_expecting(Barrier* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

// Returns once the phase of `parity` has ended. @warning the parity of the phase before the first is 1: waiting for it
// returns at once on a fresh barrier. A waiter that is two phases late waits for ever.
__device__ __forceinline__ void wait(Barrier* barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra over;\n"
      "bra again;\n"
      "over:\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// Starts a copy of `bytes` from global (also mapped host) to shared memory; its bytes are counted by `barrier`. Both
// addresses and the size are multiples of 16. @warning orders nothing: the stage must have been released by its
// readers.
__device__ __forceinline__ void bulk_load(void* to, const void* from, uint32_t bytes, Barrier* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}

// As bulk_load, for one box of a tensor map of four dims (element, piece, token, page), starting at token, page. `to`
// is a multiple of 128. @warning the map must lie in a __grid_constant__ parameter, and the box inside its tensor:
// bytes beyond it would arrive as zeros.
__device__ __forceinline__ void box_load(void* to, const CUtensorMap* map, uint32_t token, uint32_t page,
                                         Barrier* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %2, %3, %4}], "
      "[%5];" ::"r"(shared_address(to)),
      "l"(map), "r"(0), "r"(token), "r"(page), "r"(shared_address(barrier))
      : "memory");
}

}  // namespace kvio::gpu
