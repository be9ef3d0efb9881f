// gpu/wave_copy.h on memory that does not exist: which bytes the lanes of a wave of 64 would copy.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <numeric>
#include <random>
#include <stdexcept>
#include <vector>

#include "gpu/wave_copy.h"

namespace py = pybind11;

namespace kvio {
namespace {

struct Move {
  int64_t dst;
  int64_t src;
  int64_t bytes;
};

int64_t number_of(const char* address) { return static_cast<int64_t>(reinterpret_cast<uint64_t>(address)); }

template <class Pointer>
Pointer address_of(int64_t number) {
  return reinterpret_cast<Pointer>(static_cast<uint64_t>(number));
}

// A package is the address that it was loaded from.
class NotedMemory {
 public:
  explicit NotedMemory(std::vector<Move>* moves) : moves_(moves) {}

  template <int kBytes>
  using Package = int64_t;

  template <int kBytes>
  int64_t load_once(const char* address) const {
    return number_of(address);
  }
  template <int kBytes>
  int64_t load(const char* address) const {
    return number_of(address);
  }
  template <int kBytes>
  void store(char* address, int64_t package) const {
    moves_->push_back({number_of(address), package, kBytes});
  }
  template <class T>
  void await(T&) const {}

 private:
  std::vector<Move>* moves_;
};

struct NotedWave {
  static constexpr int kLanes = 64;
  const std::vector<int64_t>& dst;
  const std::vector<int64_t>& src;

  char* shuffle(char*, uint32_t lane) const { return address_of<char*>(lane < dst.size() ? dst[lane] : 0); }
  const char* shuffle(const char*, uint32_t lane) const {
    return address_of<const char*>(lane < src.size() ? src[lane] : 0);
  }
};

template <int kAlignment>
std::vector<Move> moves_of(int64_t lanes, const std::vector<int64_t>& dst, const std::vector<int64_t>& src,
                           int64_t row_bytes, uint64_t seed) {
  std::vector<Move> moves;
  std::vector<uint32_t> order(NotedWave::kLanes);
  std::iota(order.begin(), order.end(), 0u);
  std::shuffle(order.begin(), order.end(), std::mt19937_64(seed));
  const NotedWave wave{dst, src};
  for (const uint32_t lane : order) {
    gpu::wave_copy_rows<kAlignment>(static_cast<uint32_t>(lanes), wave, NotedMemory(&moves), lane,
                                    static_cast<uint32_t>(dst.size()), wave.shuffle(static_cast<char*>(nullptr), lane),
                                    wave.shuffle(static_cast<const char*>(nullptr), lane), row_bytes);
  }
  return moves;
}

// Bytes of int64: dst, src and bytes of every move, of a row a lane, all of them at multiples of `alignment`. `dst` is
// 0 for a row that is not to be written.
py::bytes wave_copy_moves(int64_t lanes, int64_t alignment, const std::vector<int64_t>& dst,
                          const std::vector<int64_t>& src, int64_t row_bytes, uint64_t seed) {
  if (dst.size() != src.size() || dst.size() > NotedWave::kLanes) throw py::value_error("a row a lane, in both lists");
  const std::map<int64_t, decltype(&moves_of<1>)> kernels = {
      {1, moves_of<1>}, {2, moves_of<2>}, {4, moves_of<4>}, {8, moves_of<8>}, {16, moves_of<16>}};
  const auto kernel = kernels.find(alignment);
  if (kernel == kernels.end()) throw py::value_error("no kernel is for such rows");
  const std::vector<Move> moves = kernel->second(lanes, dst, src, row_bytes, seed);
  return py::bytes(reinterpret_cast<const char*>(moves.data()), moves.size() * sizeof(Move));
}

}  // namespace

void bind_wave_copy_moves(py::module_& m) {
  m.def("wave_copy_moves", &wave_copy_moves, py::kw_only(), py::arg("lanes"), py::arg("alignment"), py::arg("dst"),
        py::arg("src"), py::arg("row_bytes"), py::arg("seed") = 0);
}

}  // namespace kvio
