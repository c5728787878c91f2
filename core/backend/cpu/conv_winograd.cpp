// y = A^T [(G w G^T) (B^T d B)] A for each tile of n x n places of y, where d are the pixels that
// it sees, and the product in the middle is one over channels for each of (n + 2)^2 places. The
// gradient by the input is the same with the weight turned around. Whichever is less is transformed
// before: all of the weight, and then many tiles go in blocks whose transformed values stay in the
// second cache; or few tiles, and then the weight goes in panels of outputs. Invariant: an element
// is summed over channels from the first to the last, wherever its tile is.
#include "core/backend/cpu/conv_winograd.h"

#include <vector>

#include "core/backend/cpu/channels_last.h"
#include "core/backend/cpu/conv_winograd_tiles.h"
#include "core/base/parallel.h"

namespace tessera::cpu {
namespace {

constexpr int64_t kPanel = kWinogradPanel, kGroup = kWinogradGroup;
constexpr int64_t kBlockBytes = 384 * 1024;  // of transformed values of a block

// A result [N, outputs, ..] in tiles, from an operand [N, channels, ..] with `pad` around it.
template <class E>
struct Work {
  static constexpr int64_t kOut = kWinogradTile<E>, kIn = kOut + 2, kPlaces = kWinogradPlaces<E>;
  ConvRole role;
  int64_t channels, outputs, tiles, block;
  TileGrid from, to;
  bool few;

  Work(ConvRole role, const ConvAttributes::Window& window, const Meta& x, const Meta& w,
       const Meta& y)
      : role(role) {
    const bool out = role == ConvRole::kOutput;
    const Shape& result = out ? y.shape : x.shape;
    channels = w.shape[out ? 1 : 0], outputs = w.shape[out ? 0 : 1];
    to = {pieces(result[2], kOut), pieces(result[3], kOut), kOut, {0, 0}};
    from = to;
    for (int i = 0; i < 2; ++i) from.pad[i] = out ? window.pad_begin[i] : 2 - window.pad_begin[i];
    tiles = result[0] * to.rows * to.columns;
    few = tiles <= outputs;
    const int64_t group_bytes = int64_t(sizeof(float)) * kPlaces * channels * kGroup;
    block = few ? pieces(tiles, kGroup) * kGroup
                : std::max<int64_t>(kBlockBytes / group_bytes, 4) * kGroup;
  }
  int64_t panels() const { return outputs / kPanel; }
  int64_t blocks() const { return pieces(tiles, block); }
  int64_t shares() const { return std::min<int64_t>(num_threads(), few ? panels() : blocks()); }
  // In floats. All shares read the weight or the values, whichever is transformed before, and a row
  // of zeros; a share has the other, products of a panel, and a row that nobody reads.
  int64_t panel() const { return kPlaces * channels * kPanel; }
  int64_t values() const { return kPlaces * block * channels; }
  int64_t products() const { return kPlaces * block * kPanel; }
  int64_t spare() const { return std::max(channels, outputs); }
  int64_t before() const { return few ? values() : panels() * panel(); }
  int64_t share() const { return (few ? panel() : values()) + products() + spare(); }
  size_t workspace() const {
    return size_t(before() + spare() + shares() * share()) * sizeof(float);
  }
};

// What a share computes in.
template <class E>
struct Share {
  float *transformed, *products;
  E* spare;
  std::vector<const E*> from;
  std::vector<E*> to;
  Share(const Work<E>& w, float* at)
      : transformed(at),
        products(at + (w.few ? w.panel() : w.values())),
        spare(reinterpret_cast<E*>(products + w.products())),
        from(size_t(w.kIn * w.kIn * w.block)),
        to(size_t(w.kOut * w.kOut * w.block)) {}
};

template <class E>
class Run {
 public:
  Run(const Work<E>& w, const Image<const E>& from, const E* weight, const Image<E>& to,
      float* memory)
      : w_(w),
        from_(from),
        weight_(weight),
        to_(to),
        before_(memory),
        zeros_(memory + w.before()),
        shares_(zeros_ + w.spare()) {
    std::fill_n(zeros_, w.spare(), 0.0f);
  }
  void operator()() const { w_.few ? few() : many(); }

 private:
  void many() const {
    parallel_for(w_.panels(), 1, [&](int64_t begin, int64_t end) {
      for (int64_t p = begin; p < end; ++p) transform_weight(p, before_ + p * w_.panel());
    });
    in_shares(w_.blocks(), [&](Share<E>& s, int64_t block) {
      const int64_t first = block * w_.block, count = std::min(w_.block, w_.tiles - first),
                    rows = pieces(count, kGroup) * kGroup;
      transform_values(first, 0, rows, rows, s.from.data(), s.transformed);
      find_results(first, count, s);
      for (int64_t p = 0; p < w_.panels(); ++p)
        multiply(s.transformed, before_ + p * w_.panel(), p, count, s);
    });
  }
  void few() const {
    std::vector<const E*> pixels(size_t(w_.kIn * w_.kIn * w_.block));
    parallel_for(w_.block, 8, [&](int64_t begin, int64_t end) {
      transform_values(0, begin, end, w_.block, pixels.data(), before_);
    });
    in_shares(w_.panels(), [&](Share<E>& s, int64_t p) {
      transform_weight(p, s.transformed);
      find_results(0, w_.tiles, s);
      multiply(before_, s.transformed, p, w_.tiles, s);
    });
  }

  // Calls f(share, item) for all items.
  template <class F>
  void in_shares(int64_t items, F f) const {
    const int64_t shares = w_.shares();
    parallel_for(shares, 1, [&](int64_t begin, int64_t end) {
      for (int64_t s = begin; s < end; ++s) {
        Share<E> share(w_, shares_ + s * w_.share());
        for (int64_t i = items * s / shares; i < items * (s + 1) / shares; ++i) f(share, i);
      }
    });
  }
  void transform_weight(int64_t p, float* to) const {
    if (w_.role == ConvRole::kOutput)
      winograd<E>().weight(weight_ + p * kPanel * w_.channels * 9, w_.channels, to);
    else
      winograd<E>().turned_weight(weight_ + p * kPanel * 9, w_.channels, w_.outputs, to);
  }
  // Tiles [begin, end) of a block of `rows` tiles, of which the first is number `first`; to[k,
  // tile, channel].
  void transform_values(int64_t first, int64_t begin, int64_t end, int64_t rows, const E** pixels,
                        float* to) const {
    pixels += w_.kIn * w_.kIn * begin;
    find_pixels(from_, w_.from, w_.kIn, first + begin, end - begin, w_.tiles,
                reinterpret_cast<const E*>(zeros_), pixels);
    winograd<E>().input(pixels, end - begin, w_.channels,
                        {to + begin * w_.channels, rows * w_.channels, w_.channels, kPanel});
  }
  void find_results(int64_t first, int64_t count, Share<E>& s) const {
    find_pixels(to_, w_.to, w_.kOut, first, count, w_.tiles, s.spare, s.to.data());
  }
  // Panel p of `count` tiles.
  void multiply(const float* values, const float* weight, int64_t p, int64_t count,
                const Share<E>& s) const {
    const int64_t rows = pieces(count, kGroup) * kGroup;
    for (int64_t k = 0; k < w_.kPlaces; ++k)
      simd<ConvWinogradTable>().product({values + k * rows * w_.channels, kGroup * w_.channels,
                                         w_.channels, 1, weight + k * w_.channels * kPanel,
                                         s.products + k * rows * kPanel, rows / kGroup, w_.channels,
                                         false});
    winograd<E>().output(s.products, rows * kPanel, count, s.to.data(), p * kPanel);
  }

  const Work<E>& w_;
  const Image<const E> from_;
  const E* weight_;
  const Image<E> to_;
  float *before_, *zeros_, *shares_;
};

// Calls f.operator()<E>() for the elements of a dtype.
template <class F>
auto with_elements(DType t, F f) {
  return t == kF32 ? f.template operator()<float>() : f.template operator()<uint16_t>();
}

// Enough for what transforming the weight takes, and mostly filled with results.
template <class E>
bool suits_tiles(const Shape& y) {
  constexpr int64_t kOut = kWinogradTile<E>, kLeast = std::is_same_v<E, float> ? 32 : 96;
  const int64_t tiles = pieces(y[2], kOut) * pieces(y[3], kOut);
  return y[0] * tiles >= kLeast && 4 * y[2] * y[3] >= 3 * kOut * kOut * tiles;
}

}  // namespace

bool suits_conv_winograd(const ConvAttributes::Window& window, const Meta& x, const Meta& w,
                         const Meta& y) {
  constexpr int64_t kMost = 2048;  // channels, which bounds what is transformed
  const bool low = x.dtype == kBF16 && has_bf16_dot();
  if ((x.dtype != kF32 && !low) || window.groups != 1 || window.stride.size() != 2) return false;
  if (current_isa() != Isa::kV4) return false;
  for (int i = 0; i < 2; ++i) {
    if (w.shape[i + 2] != 3 || window.stride[i] != 1 || window.dilation[i] != 1) return false;
    if (window.pad_begin[i] > 2 || w.shape[i] % kPanel || w.shape[i] > kMost) return false;
  }
  return with_elements(x.dtype, [&]<class E>() { return suits_tiles<E>(y.shape); });
}

size_t conv_winograd_workspace(ConvRole role, const ConvAttributes::Window& window, const Meta& x,
                               const Meta& w, const Meta& y) {
  if (role == ConvRole::kWeight) return conv_winograd_weight_workspace(w, y);
  return with_elements(x.dtype,
                       [&]<class E>() { return Work<E>(role, window, x, w, y).workspace(); });
}

void run_conv_winograd(ConvRole role, const ConvAttributes::Window& window, const Tensor& x,
                       const Tensor& w, const Tensor& y, Workspace work) {
  Tensor own;
  if (const size_t bytes = conv_winograd_workspace(role, window, x.meta(), w.meta(), y.meta());
      bytes > work.bytes)  // planned with fewer threads
    own = empty({int64_t(bytes)}, kU8), work = {own.raw(), bytes};
  if (role == ConvRole::kWeight) return run_conv_winograd_weight(window, x, w, y, work.data);
  const Tensor weight = w.is_contiguous() ? w : dense_copy(w);
  const bool out = role == ConvRole::kOutput;
  with_elements(x.dtype(), [&]<class E>() {
    const Work<E> of(role, window, x.meta(), w.meta(), y.meta());
    Run<E>(of, image_to_read<E>(out ? x : y), static_cast<const E*>(weight.raw_values()),
           image_to_write<E>(out ? y : x), static_cast<float*>(work.data))();
  });
}

}  // namespace tessera::cpu
