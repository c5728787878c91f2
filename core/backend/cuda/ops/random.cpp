// Random tensors and dropout: the same bits as on the CPU for the same key.
#include "core/backend/cuda/kernels/random.h"

#include <algorithm>

#include "core/backend/cuda/ops/draws.h"
#include "core/backend/cuda/ops/kernels.h"
#include "core/backend/cuda/ops/register.h"
#include "core/backend/cuda/runtime.h"
#include "core/base/error.h"
#include "core/ops/create_attributes.h"
#include "core/primitive/primitive_of.h"

namespace tessera::cuda {
namespace {

// The walks over the elements of `shape`, which lie at `begin` of a tensor of shape `global`, by
// the strides of that one; without any element there are none.
DrawPlaces places(const Shape& shape, const Dims& begin, const Shape& global, int width, bool open,
                  int64_t* first) {
  const Strides strides = contiguous_strides(global.empty() ? shape : global);
  *first = 0;
  for (int d = 0; d < begin.size(); ++d) *first += begin[d] * strides[d];
  return draw_places(shape, strides, *first, width, open);
}

bool in_packs(const Tensor& t) { return reinterpret_cast<uintptr_t>(t.device_data()) % 16 == 0; }

void run_random(const Primitive& prim, std::span<const Tensor> in, std::span<const Tensor> out,
                Workspace, const Stream& stream) {
  const auto& a = attributes_of<RandomAttributes>(prim);
  RandomCall c{};
  int64_t first = 0, done = 0;
  const DrawPlaces all =
      places(a.shape, a.begin, a.global, in_packs(out[0]) ? draw_width(prim.name(), a.dtype) : 1,
             true, &first);
  for (const WalkPiece& piece : all.pieces) {
    set_key(c, in[0]);
    c.out = static_cast<char*>(out[0].device_data()) + done * int64_t(size_of(a.dtype));
    c.total = unsigned(std::min(int64_t(piece.walk.count) * all.width, out[0].numel() - done));
    done += c.total;
    c.first = first + piece.begin[0];
    c.low = a.low, c.range = uint64_t(a.high - a.low);
    c.place = piece.walk;
    launch(random_instance(prim.name(), a.dtype).name, all.width > 1 ? "packs" : "random",
           draw_geometry(piece.walk.count, all.width), stream, c);
  }
}

void plan_dropout(const Primitive&, std::span<const Tensor>, std::span<Meta>, Plan& plan) {
  plan.all_dense = true;
  plan.in_place = true;
}

void run_dropout(const Primitive& prim, std::span<const Tensor> in, std::span<const Tensor> out,
                 Workspace, const Stream& stream) {
  const auto& a = attributes_of<DropoutAttributes>(prim);
  const Tensor& x = in[0];
  if (x.numel() == 0) return;
  Shape local = x.shape(), global = a.global.empty() ? local : a.global;
  Dims begin = a.begin.empty() ? Dims::filled(local.size(), 0) : a.begin;
  RandomCall c{};
  if (a.by_sample) {  // within a sample, whose number is in[2]'s
    c.samples = static_cast<const long*>(in[2].device_data());
    local[0] /= in[2].numel(), global[0] = local[0], begin[0] = 0;
  }
  int64_t first = 0;
  const bool packs = in_packs(x) && in_packs(out[0]);
  const DrawPlaces all = places(local, begin, global, packs ? draw_width("dropout", x.dtype()) : 1,
                                !a.by_sample, &first);
  TESSERA_CHECK(all.pieces.size() <= 1, "dropout: offsets in {} are more than 31 bits count",
                to_string(global));
  for (const WalkPiece& piece : all.pieces) {
    set_key(c, in[1]);
    c.in = x.device_data(), c.out = out[0].device_data();
    c.first = first + piece.begin[0];
    c.threshold = a.threshold(), c.scale = a.kept();
    c.total = countable(x.numel(), "dropout");
    c.place = piece.walk;
    launch(dropout_instance(x.dtype()).name, all.width > 1 ? "packs" : "dropout",
           draw_geometry((x.numel() + all.width - 1) / all.width, all.width), stream, c);
  }
}

}  // namespace

void register_random(KernelTable& table) {
  const DeviceKind cuda = register_cuda();
  for (const char* op : {"rand", "randn", "randint"}) table.add(cuda, op, {.run = run_random});
  table.add(cuda, "dropout", {.plan = plan_dropout, .run = run_dropout, .host_scalars = true});
}

}  // namespace tessera::cuda
