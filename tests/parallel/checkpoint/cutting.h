// Random cuttings of random tensors: all that a mesh and a strategy could do to them, and worse.
#pragma once
#include <cstring>
#include <map>
#include <random>

#include "parallel/checkpoint/piece.h"

namespace tessera::checkpoint {

using Random = std::mt19937_64;
inline int64_t draw(Random& r, int64_t low, int64_t high) {  // both included
  return low + int64_t(r() % uint64_t(high - low + 1));
}

/// name -> whole tensor.
using Model = std::map<std::string, Tensor>;

inline Tensor random_tensor(Random& r, DType dtype, const Shape& shape) {
  Tensor t = empty(shape, dtype);
  auto* bytes = static_cast<unsigned char*>(t.raw());
  for (size_t i = 0; i < t.nbytes(); ++i)
    bytes[i] = dtype == kBool ? r() & 1 : static_cast<unsigned char>(r());
  return t;
}

inline Model random_model(Random& r, int tensors, int64_t largest) {
  Model m;
  for (int i = 0; i < tensors; ++i) {
    Shape shape;
    for (int64_t d = draw(r, 0, 4); d > 0; --d)
      shape.push_back(draw(r, 0, 20) ? draw(r, 1, largest) : 0);
    m["t" + std::to_string(i) + ".weight"] =
        random_tensor(r, kAllDTypes[draw(r, 0, kNumDTypes - 1)], shape);
  }
  return m;
}

/// The values of a box, dense.
inline Tensor copy_box(const Tensor& whole, const Box& box) {
  Tensor out = empty(box.shape, whole.dtype());
  size_t element = size_of(whole.dtype());
  Strides from = contiguous_strides(whole.shape());
  Dims index = Dims::filled(box.shape.size(), 0);
  for (int64_t i = 0; i < out.numel(); ++i) {
    int64_t at = 0;
    for (int d = 0; d < index.size(); ++d) at += (box.begin[d] + index[d]) * from[d];
    std::memcpy(static_cast<char*>(out.raw()) + size_t(i) * element,
                static_cast<char*>(whole.raw()) + size_t(at) * element, element);
    for (int d = index.size() - 1; d >= 0 && ++index[d] == box.shape[d]; --d) index[d] = 0;
  }
  return out;
}

/// Boxes that partition `shape`, cut at random places in random dims.
inline std::vector<Box> random_cut(Random& r, const Shape& shape, int64_t cuts) {
  std::vector<Box> boxes{{Dims::filled(shape.size(), 0), shape}};
  for (; cuts > 0 && shape.size() > 0; --cuts) {
    size_t i = size_t(draw(r, 0, int64_t(boxes.size()) - 1));
    int d = int(draw(r, 0, shape.size() - 1));
    if (boxes[i].shape[d] < 2) continue;
    int64_t at = draw(r, 1, boxes[i].shape[d] - 1);
    Box rest = boxes[i];
    boxes[i].shape[d] = at;
    rest.begin[d] += at;
    rest.shape[d] -= at;
    boxes.push_back(rest);
  }
  return boxes;
}

/// [rank] -> pieces: each box on at least one rank, some on several, some ranks with empty boxes.
/// `values` false: destinations filled with a pattern.
inline std::vector<std::vector<Piece>> random_layout(Random& r, const Model& model, int ranks,
                                                     bool values) {
  std::vector<std::vector<Piece>> out{size_t(ranks)};
  for (const auto& [name, tensor] : model) {
    for (const Box& box : random_cut(r, tensor.shape(), draw(r, 0, 2 * ranks))) {
      uint64_t holders = draw(r, 0, 3) ? uint64_t(1) << draw(r, 0, ranks - 1) : r() | 1;
      for (int rank = 0; rank < ranks; ++rank) {
        if (!(holders >> rank & 1)) continue;
        Tensor t = values ? copy_box(tensor, box) : empty(box.shape, tensor.dtype());
        if (!values) std::memset(t.raw(), 1, t.nbytes());
        out[size_t(rank)].push_back({name, tensor.shape(), box.begin, t});
      }
    }
    if (tensor.ndim() > 0 && draw(r, 0, 2) == 0) {
      Shape none = tensor.shape();
      none[0] = 0;
      out[size_t(draw(r, 0, ranks - 1))].push_back(
          {name, tensor.shape(), Dims::filled(none.size(), 0), empty(none, tensor.dtype())});
    }
  }
  return out;
}

inline bool same_bytes(const Tensor& a, const Tensor& b) {
  return a.dtype() == b.dtype() && a.shape() == b.shape() &&
         (a.nbytes() == 0 || std::memcmp(a.raw(), b.raw(), a.nbytes()) == 0);
}

}  // namespace tessera::checkpoint
