// Pooling on the CPU: rows of channels, window by window (kernels/channels.cpp). Operands that do
// not lie channels-last are copied so; 16-bit floats are widened, but for the largest of bf16, a
// few images at a time, so that what is wide stays in the caches.
#include <algorithm>
#include <vector>

#include "core/backend/cpu/channels_last.h"
#include "core/backend/cpu/isa.h"
#include "core/backend/cpu/register.h"
#include "core/base/boundary.h"
#include "core/ops/pool_attributes.h"
#include "core/primitive/primitive_of.h"

namespace tessera::cpu {
namespace {

constexpr int64_t kGrain = 16384;

template <class T>
const ChannelFns<T>& fns() {
  if constexpr (sizeof(T) == 4)
    return simd<ChannelTable>().f32;
  else
    return simd<ChannelTable>().f64;
}

// The windows of an input of these spatial extents, seen as three dims.
struct Walk3 {
  int64_t in[3] = {1, 1, 1}, out[3] = {1, 1, 1};
  const PoolAttributes::Windows& windows;
  int missing;

  Walk3(const PoolAttributes::Windows& w, std::span<const int64_t> extents)
      : windows(w), missing(3 - w.spatial()) {
    for (int i = missing; i < 3; ++i)
      in[i] = extents[size_t(i - missing)], out[i] = w.windows[i - missing];
  }
  int64_t places() const { return in[0] * in[1] * in[2]; }
  int64_t count() const { return out[0] * out[1] * out[2]; }
  PoolWindow at(int i, int64_t o) const {
    return i < missing ? PoolWindow{0, 1, 1} : windows.at(i - missing, o, in[i]);
  }
  int64_t counted(int i, int64_t o) const {
    return i < missing ? 1 : windows.counted(i - missing, o, in[i]);
  }
  // What the average of window number `o` divides by.
  int64_t divisor(int64_t o) const {
    if (windows.divisor) return windows.divisor;
    return counted(0, o / (out[1] * out[2])) * counted(1, o / out[2] % out[1]) *
           counted(2, o % out[2]);
  }
  // Calls f(place) for every place of window number `o`.
  template <class F>
  void places_of(int64_t o, F f) const {
    PoolWindow a = at(0, o / (out[1] * out[2])), b = at(1, o / out[2] % out[1]),
               c = at(2, o % out[2]);
    for (int64_t i = a.first; i < a.end; i += a.step)
      for (int64_t j = b.first; j < b.end; j += b.step)
        for (int64_t k = c.first; k < c.end; k += c.step) f((i * in[1] + j) * in[2] + k);
  }
};

template <class F>
void in_compute_type(DType t, F run) {
  if (compute_dtype(t) == kF64)
    run(double());
  else
    run(float());
}

void plan_channels_last(const Primitive&, std::span<const Tensor>, std::span<Meta> out, Plan&) {
  for (Meta& m : out) m.strides = channels_last_strides(m.shape);
}

std::span<const int64_t> spatial_of(const Tensor& t) {
  return std::span<const int64_t>(t.shape()).subspan(2);
}

// Calls f(x, places, count, best, at, channels) for every window; elements are E.
template <class E, class F>
void each_window(const Walk3& walk, const Tensor& x, const Tensor& y, int32_t* at, F f) {
  const int64_t channels = x.shape()[1], count = walk.count(), image = walk.places() * channels;
  std::vector<int32_t> places;  // of all windows, which are those of every image
  std::vector<size_t> begins{0};
  for (int64_t o = 0; o < count; ++o) {
    walk.places_of(o, [&](int64_t place) { places.push_back(int32_t(place)); });
    begins.push_back(places.size());
  }
  const E* from = static_cast<const E*>(x.raw_values());
  E* to = static_cast<E*>(y.raw());
  parallel_for("pool.threads", x.shape()[0] * count, std::max<int64_t>(1, kGrain / channels),
               [&](int64_t begin, int64_t end) {
                 for (int64_t row = begin; row < end; ++row) {
                   const size_t o = size_t(row % count);
                   f(from + row / count * image, &places[begins[o]],
                     int64_t(begins[o + 1] - begins[o]), to + row * channels, at + row * channels,
                     channels);
                 }
               });
}

void run_max_pool(const Primitive& prim, std::span<const Tensor> in, std::span<const Tensor> out,
                  Workspace, const Stream&) {
  if (out[0].numel() == 0) return;
  const Walk3 walk(attributes_of<PoolAttributes>(prim).windows, spatial_of(in[0]));
  int32_t* at = out[1].data<int32_t>();
  if (in[0].dtype() == kBF16)
    return each_window<uint16_t>(walk, as_channels_last(in[0]), out[0], at,
                                 simd<ChannelTable>().largest_bf16);
  const Tensor x = channels_last_wide(in[0]);
  const WideResult y(out[0]);
  in_compute_type(in[0].dtype(), [&](auto zero) {
    using T = decltype(zero);
    each_window<T>(walk, x, y.get(), at, fns<T>().largest);
  });
  y.finish();
}

void run_max_pool_grad(const Primitive&, std::span<const Tensor> in, std::span<const Tensor> out,
                       Workspace, const Stream&) {
  if (out[0].numel() == 0) return;
  const Tensor g = channels_last_wide(in[0]), at = as_channels_last(in[1]);
  const WideResult dx(out[0]);
  const int64_t images = g.shape()[0], channels = g.shape()[1];
  const int64_t rows = g.numel() / (images * channels), size = out[0].numel() / images;
  in_compute_type(in[0].dtype(), [&](auto zero) {
    using T = decltype(zero);
    const T* from = g.values<T>();
    const int32_t* place = at.values<int32_t>();
    T* to = dx.get().data<T>();
    parallel_for("pool_grad.images", images, 1, [&](int64_t begin, int64_t end) {
      std::fill(to + begin * size, to + end * size, T(0));
      const int32_t *first = place + begin * rows * channels, *last = place + end * rows * channels;
      for (const int32_t* p = first; p < last; ++p)
        TESSERA_CHECK(*p >= 0 && *p < size / channels,
                      "max_pool_grad: place {} is not one of the {} of x", *p, size / channels);
      for (int64_t n = begin; n < end; ++n)
        for (int64_t r = n * rows; r < (n + 1) * rows; ++r)
          for (int64_t c = 0; c < channels; ++c)
            to[n * size + place[r * channels + c] * channels + c] += from[r * channels + c];
    });
  });
  dx.finish();
}

void run_avg_pool(const Primitive& prim, std::span<const Tensor> in, std::span<const Tensor> out,
                  Workspace, const Stream&) {
  if (out[0].numel() == 0) return;
  const Walk3 walk(attributes_of<PoolAttributes>(prim).windows, spatial_of(in[0]));
  const Tensor x = channels_last_wide(in[0]);
  const WideResult y(out[0]);
  const int64_t channels = x.shape()[1], places = walk.places(), count = walk.count();
  in_compute_type(in[0].dtype(), [&](auto zero) {
    using T = decltype(zero);
    const T* from = x.values<T>();
    T* to = y.get().data<T>();
    parallel_for("average_pool.threads", x.shape()[0] * count,
                 std::max<int64_t>(1, kGrain / channels), [&](int64_t begin, int64_t end) {
                   for (int64_t row = begin; row < end; ++row) {
                     const T* image = from + row / count * places * channels;
                     T* sum = to + row * channels;
                     std::fill_n(sum, channels, T(0));
                     walk.places_of(row % count, [&](int64_t place) {
                       fns<T>().add(image + place * channels, sum, channels);
                     });
                     const T divisor = T(walk.divisor(row % count));
                     for (int64_t c = 0; c < channels; ++c) sum[c] /= divisor;
                   }
                 });
  });
  y.finish();
}

void run_avg_pool_grad(const Primitive& prim, std::span<const Tensor> in,
                       std::span<const Tensor> out, Workspace, const Stream&) {
  if (out[0].numel() == 0) return;
  const Walk3 walk(attributes_of<PoolAttributes>(prim).windows, spatial_of(out[0]));
  const Tensor g = channels_last_wide(in[0]);
  const WideResult dx(out[0]);
  const int64_t channels = g.shape()[1], places = walk.places(), count = walk.count();
  in_compute_type(in[0].dtype(), [&](auto zero) {
    using T = decltype(zero);
    const T* from = g.values<T>();
    T* to = dx.get().data<T>();
    parallel_for("average_pool_grad.images", g.shape()[0], 1, [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n) {
        T* image = to + n * places * channels;
        std::fill_n(image, places * channels, T(0));
        for (int64_t o = 0; o < count; ++o) {
          const T divisor = T(walk.divisor(o));
          walk.places_of(o, [&](int64_t place) {
            fns<T>().add_part(from + (n * count + o) * channels, divisor, image + place * channels,
                              channels);
          });
        }
      }
    });
  });
  dx.finish();
}

// Images [first, first + count) of a batch.
Tensor images_of(const Tensor& t, int64_t first, int64_t count) {
  Meta m = t.meta();
  m.shape[0] = count;
  return Tensor(m, t.storage(), t.offset() + first * m.strides[0]);
}

// `run` on one image for each thread at a time where they have to be widened; all operands and
// results are batches.
template <auto run>
void run_pool(const Primitive& prim, std::span<const Tensor> in, std::span<const Tensor> out,
              Workspace work, const Stream& stream) {
  const DType t = in[0].dtype();
  const bool widened = compute_dtype(t) != t && !(run == run_max_pool && t == kBF16);
  const int64_t images = in[0].shape()[0], each = num_threads();
  if (!widened || images <= each) return run(prim, in, out, work, stream);
  for (int64_t n = 0; n < images; n += each) {
    auto some = [&](std::span<const Tensor> all) {
      SmallVector<Tensor, 2> of;
      for (const Tensor& tensor : all)
        of.push_back(images_of(tensor, n, std::min(each, images - n)));
      return of;
    };
    const auto from = some(in), to = some(out);
    run(prim, from, to, work, stream);
  }
}

}  // namespace

void register_pool(KernelTable& t) {
  t.add(DeviceKind::kCPU, "max_pool", {plan_channels_last, run_pool<run_max_pool>});
  t.add(DeviceKind::kCPU, "max_pool_grad", {plan_channels_last, run_pool<run_max_pool_grad>});
  t.add(DeviceKind::kCPU, "avg_pool", {plan_channels_last, run_pool<run_avg_pool>});
  t.add(DeviceKind::kCPU, "avg_pool_grad", {plan_channels_last, run_pool<run_avg_pool_grad>});
}

}  // namespace tessera::cpu
