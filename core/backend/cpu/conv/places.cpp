// For each place k of the kernel, dw[:, :, k] = g^T x_k, where row (n, o) of x_k is what output
// place o of sample n sees at k: a row of channels of x, or zeros outside of it. x_k is gathered,
// the product written into dw as [O, K, I], and that transposed at the end. Scratch holds both, and
// then the product's own.
#include "core/backend/cpu/conv/places.h"

#include <algorithm>
#include <cstring>

#include "core/base/boundary.h"
#include "core/base/isa.h"

namespace tessera::cpu {
namespace {

struct Extents {
  int64_t outputs, channels, places, rows;
  Extents(const Meta& w, const Meta& y)
      : outputs(w.shape[0]),
        channels(w.shape[1]),
        places(numel(w.shape) / (outputs * channels)),
        rows(numel(y.shape) / outputs) {}
  size_t gathered_bytes() const { return in_lines(rows * channels); }
  size_t result_bytes() const { return in_lines(outputs * places * channels); }

 private:
  static size_t in_lines(int64_t floats) { return size_t((floats + 15) / 16 * 64); }
};

Gemm product_of(const Extents& e) {
  Gemm g;
  g.m = e.outputs, g.k = e.rows, g.n = e.channels;
  g.a_m = 1, g.a_k = e.outputs, g.b_k = e.channels, g.b_n = 1, g.c_m = e.places * e.channels;
  return g;
}

// x_k of the place (ki, kj) of the kernel.
void gather(const ConvAttributes::Window& window, const Tensor& x, const Tensor& y, int64_t ki,
            int64_t kj, float* to) {
  const int64_t channels = x.shape()[1], height = x.shape()[2], width = x.shape()[3],
                rows = y.shape()[2], columns = y.shape()[3];
  const float* from = x.values<float>();
  const size_t bytes = size_t(channels) * sizeof(float);
  parallel_for(
      "conv_places.gather_threads", x.shape()[0] * rows, 8, [&](int64_t begin, int64_t end) {
        for (int64_t line = begin; line < end; ++line) {
          const int64_t n = line / rows, i = line % rows * window.stride[0] - window.pad_begin[0] +
                                             ki * window.dilation[0];
          float* row = to + line * columns * channels;
          for (int64_t o = 0; o < columns; ++o, row += channels) {
            const int64_t j = o * window.stride[1] - window.pad_begin[1] + kj * window.dilation[1];
            if (i < 0 || i >= height || j < 0 || j >= width)
              std::memset(row, 0, bytes);
            else
              std::memcpy(row, from + ((n * height + i) * width + j) * channels, bytes);
          }
        }
      });
}

// dw [O, I, K] from [O, K, I].
void transpose(const Extents& e, const float* from, float* to) {
  constexpr int64_t kGrain = 16384;  // elements worth a thread
  const int64_t grain = std::max<int64_t>(1, kGrain / (e.places * e.channels));
  parallel_for("conv_places.threads", e.outputs, grain, [&](int64_t begin, int64_t end) {
    for (int64_t o = begin; o < end; ++o) {
      const float* f = from + o * e.places * e.channels;
      float* t = to + o * e.places * e.channels;
      for (int64_t c = 0; c < e.channels; ++c)
        for (int64_t k = 0; k < e.places; ++k) t[c * e.places + k] = f[k * e.channels + c];
    }
  });
}

}  // namespace

bool suits_conv_places(const ConvAttributes::Window& window, const Meta& x, const Meta& w,
                       const Meta& y) {
  constexpr int64_t kLeastChannels = limit("conv_places.least"),
                    kNarrow = limit("conv_places.narrow");
  constexpr size_t kMostBytes = size_t(64) << 20;  // of scratch
  if (x.dtype != kF32 || window.groups != 1 || window.stride.size() != 2) return false;
  if (current_isa() != Isa::kV4 || w.shape[2] * w.shape[3] == 1) return false;
  meet("conv_places.least", std::min(w.shape[0], w.shape[1]));
  if (std::min(w.shape[0], w.shape[1]) < kLeastChannels) return false;
  if (Extents(w, y).gathered_bytes() > kMostBytes) return false;
  if (window.stride[0] > 1 || window.stride[1] > 1) return true;
  meet("conv_places.narrow", y.shape[3]);
  return y.shape[3] <= kNarrow;
}

PlannedGemm plan_conv_places(const Meta& w, const Meta& y) {
  return PlannedGemm(product_of(Extents(w, y)));
}

size_t conv_places_workspace(const PlannedGemm& product, const Meta& w, const Meta& y) {
  const Extents e(w, y);
  return e.gathered_bytes() + e.result_bytes() + product.workspace_bytes();
}

void run_conv_places(const ConvAttributes::Window& window, const PlannedGemm& product,
                     const Tensor& x, const Tensor& dw, const Tensor& y, void* work) {
  const Extents e(dw.meta(), y.meta());
  char* base = static_cast<char*>(work);
  float *gathered = reinterpret_cast<float*>(base),
        *result = reinterpret_cast<float*>(base + e.gathered_bytes());
  void* own = base + e.gathered_bytes() + e.result_bytes();
  const int64_t columns = dw.shape()[3];
  for (int64_t k = 0; k < e.places; ++k) {
    gather(window, x, y, k / columns, k % columns, gathered);
    product.run(y.values<float>(), gathered, result + k * e.channels, own);
  }
  transpose(e, result, dw.data<float>());
}

}  // namespace tessera::cpu
