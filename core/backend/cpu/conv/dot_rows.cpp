// A row of the result, the channels of one place, is the sum over taps of a row of the operand
// times that tap of the weight. Rows go in groups of eight, wherever their places are, so a table
// of pointers says where each finds its operand: in a row of zeros beyond the border. The gradient
// by the input of a convolution with strides is one such product for each class of places that the
// same taps reach. The weight is packed in blocks of columns that stay in the second cache while
// all rows pass. Invariant: an element is summed tap by tap, each from the first channel to the
// last, wherever its row is.
#include "core/backend/cpu/conv/dot_rows.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "core/backend/cpu/isa.h"
#include "core/backend/cpu/kernels/conv_dot_table.h"
#include "core/base/boundary.h"

namespace tessera::cpu {
namespace {

// A block of packed columns has at most so many bytes, but at least one panel.
constexpr int64_t kBlockBytes = 320 * 1024;

int64_t pieces(int64_t n, int64_t size) { return (n + size - 1) / size; }

// Rows of channels: pixel (n, h, w) begins at ((n * height + h) * width + w) * channels.
struct Image {
  int64_t height, width, channels;
  explicit Image(const Meta& m) : height(m.shape[2]), width(m.shape[3]), channels(m.shape[1]) {}
  int64_t at(int64_t n, int64_t h, int64_t w) const {
    return ((n * height + h) * width + w) * channels;
  }
};

// A tap of the weight as a class of places sees it: place (i, j) meets pixel (i * step + h, j *
// step
// + w) of the operand.
struct Tap {
  int64_t number, h, w;
};
// Places (i, j) of the result, which are its pixels (i * every + first); `reach` of the operand.
struct Class {
  int64_t first[2], every[2], extent[2], step[2];
  std::vector<Tap> taps;
};

int64_t taps_of(const Meta& w) { return w.shape[2] * w.shape[3]; }

std::vector<Class> classes_of(ConvRole role, const ConvAttributes::Window& v, const Meta& x,
                              const Meta& w, const Meta& y) {
  const int64_t columns = w.shape[3];
  std::vector<Class> all;
  if (role == ConvRole::kOutput) {
    Class c{{0, 0}, {1, 1}, {y.shape[2], y.shape[3]}, {v.stride[0], v.stride[1]}, {}};
    for (int64_t t = 0; t < taps_of(w); ++t)
      c.taps.push_back({t, t / columns * v.dilation[0] - v.pad_begin[0],
                        t % columns * v.dilation[1] - v.pad_begin[1]});
    return {c};
  }
  for (int64_t a = 0; a < std::min(v.stride[0], x.shape[2]); ++a)
    for (int64_t b = 0; b < std::min(v.stride[1], x.shape[3]); ++b) {
      Class c{{a, b},
              {v.stride[0], v.stride[1]},
              {pieces(x.shape[2] - a, v.stride[0]), pieces(x.shape[3] - b, v.stride[1])},
              {1, 1},
              {}};
      for (int64_t t = 0; t < taps_of(w); ++t) {
        const int64_t h = a + v.pad_begin[0] - t / columns * v.dilation[0],
                      q = b + v.pad_begin[1] - t % columns * v.dilation[1];
        if (h % v.stride[0] == 0 && q % v.stride[1] == 0)
          c.taps.push_back({t, h / v.stride[0], q / v.stride[1]});
      }
      all.push_back(std::move(c));
    }
  return all;
}

struct Work {
  int64_t outer, inner, taps, summed, columns;  // of the weight; of the product
  bool across;                                  // the sum is over rows of the weight
  bool joined;                              // taps of a channel are neighbours: split them first
  int64_t o_step, tap_step, panels, block;  // of the weight as it is packed; panels of a block

  Work(ConvRole role, const Meta& w)
      : outer(w.shape[0]),
        inner(w.shape[1]),
        taps(taps_of(w)),
        summed(role == ConvRole::kOutput ? inner : outer),
        columns(role == ConvRole::kOutput ? outer : inner),
        across(role == ConvRole::kInput),
        joined(taps > 1 && w.strides[1] != 1),
        o_step(joined ? inner : w.strides[0]),
        tap_step(joined     ? outer * inner
                 : taps > 1 ? w.strides[3]
                            : 0),
        panels(columns / kDotPanel) {
    const int64_t most = kBlockBytes / (4 * panel_units());
    meet("conv_dot_rows.block", panels, most);
    block = std::clamp<int64_t>(most, 1, panels);
    block = pieces(panels, pieces(panels, block));
  }
  int64_t tap_units() const { return summed / 2 * kDotPanel; }
  int64_t panel_units() const { return taps * tap_units(); }
  // In bytes, whole cache lines: a block of the weight, zeros, and the weight with its taps apart.
  int64_t packed_bytes() const { return 4 * block * panel_units(); }
  int64_t zero_bytes() const { return pieces(2 * summed, 64) * 64; }
  int64_t split_bytes() const { return joined ? pieces(2 * taps * outer * inner, 64) * 64 : 0; }
  int64_t workspace() const { return packed_bytes() + zero_bytes() + split_bytes(); }
};

// What all of a product's rows share.
struct Operands {
  const uint16_t *from, *zeros;
  uint16_t* to;
  Image source, result;
  int64_t images;
};

// Rows of a class, in groups.
class Rows {
 public:
  Rows(const Work& w, const Class& c, const Operands& o) : w_(w), c_(c), o_(o) {
    for (const Tap& t : c.taps) tap_at_.push_back(t.number * w.tap_units());
    auto later = [](const Tap& a, const Tap& b) {
      return std::pair(a.h, a.w) < std::pair(b.h, b.w);
    };
    last_tap_ = std::max_element(c.taps.begin(), c.taps.end(), later) - c.taps.begin();
  }
  int64_t rows() const { return o_.images * c_.extent[0] * c_.extent[1]; }
  int64_t groups() const { return pieces(rows(), kDotTileRows); }

  // Finds all groups once, where several blocks of columns will ask for them and they are few.
  void find_all() {
    constexpr int64_t kMostPointers = 64 * 1024;
    const int64_t taps = int64_t(c_.taps.size()), all = groups();
    const int64_t most = kMostPointers / (taps * kDotTileRows);
    meet("conv_dot_rows.pointers", all, most);
    if (all > most) return;
    found_.assign(size_t(all), Group(taps));
    parallel_for("conv_dot_rows.find_threads", all, 32, [&](int64_t begin, int64_t end) {
      Place at = place(begin * kDotTileRows);
      for (int64_t g = begin; g < end; ++g) find(g, at, found_[size_t(g)]);
    });
  }
  // Panels [first, first + panels) of groups [begin, end).
  void run(int64_t begin, int64_t end, const uint32_t* packed, int64_t first,
           int64_t panels) const {
    const auto& fns = simd<ConvDotTable>();
    const int64_t taps = int64_t(c_.taps.size());
    std::vector<uint16_t> spare(size_t(panels * kDotPanel));
    Group own[2] = {Group(taps), Group(taps)};
    Place at = place(begin * kDotTileRows);
    auto group = [&](int64_t g) {
      if (!found_.empty()) return &found_[size_t(g)];
      find(g, at, own[g % 2]);
      return static_cast<const Group*>(&own[g % 2]);
    };
    const Group* now = group(begin);
    for (int64_t g = begin; g < end; ++g) {
      const Group* next = g + 1 < end ? group(g + 1) : now;
      uint16_t* c[kDotTileRows];
      for (int64_t r = 0; r < kDotTileRows; ++r)
        c[r] = now->c[r] ? now->c[r] + first * kDotPanel : spare.data();
      // What the next group reads first of all, and alone, is what its last tap meets.
      const uint16_t* fetch = next->a[size_t(last_tap_ * kDotTileRows)];
      fns.rows({taps, w_.summed / 2, panels, w_.panel_units(), tap_at_.data(), now->a.data(),
                packed, c, reinterpret_cast<const char*>(fetch), kDotTileRows * w_.summed / 32});
      now = next;
    }
  }
  void fill_with_zeros() const {
    Place at = place(0);
    for (int64_t row = 0; row < rows(); ++row, advance(at))
      std::memset(result(at), 0, size_t(2 * o_.result.channels));
  }

 private:
  struct Place {
    int64_t n, i, j;
  };
  // Where the rows of a group find their operands, and where they go; null: nowhere.
  struct Group {
    explicit Group(int64_t taps) : a(size_t(taps * kDotTileRows)) {}
    std::vector<const uint16_t*> a;  // [taps][kDotTileRows]
    uint16_t* c[kDotTileRows];
  };
  Place place(int64_t row) const {
    const int64_t line = row / c_.extent[1];
    return {line / c_.extent[0], line % c_.extent[0], row % c_.extent[1]};
  }
  void advance(Place& p) const {
    if (++p.j < c_.extent[1]) return;
    p.j = 0;
    if (++p.i == c_.extent[0]) p.i = 0, ++p.n;
  }
  uint16_t* result(const Place& p) const {
    return o_.to +
           o_.result.at(p.n, p.i * c_.every[0] + c_.first[0], p.j * c_.every[1] + c_.first[1]);
  }
  // Fills a group, whose first place is `at`, and moves that on. Beyond the last row there are
  // zeros, and results that are not read.
  void find(int64_t group, Place& at, Group& to) const {
    if (at.j + kDotTileRows <= c_.extent[1]) return find_in_line(at, to);
    for (int64_t r = 0; r < kDotTileRows; ++r) {
      const bool row = group * kDotTileRows + r < rows();
      const uint16_t** a = &to.a[size_t(r)];
      for (const Tap& t : c_.taps) {
        *a = row ? met(at, t) : o_.zeros;
        a += kDotTileRows;
      }
      to.c[r] = row ? result(at) : nullptr;
      if (row) advance(at);
    }
  }
  // A group within a line of places: taps inside of the border meet pixels one step apart.
  void find_in_line(Place& at, Group& to) const {
    const uint16_t** a = to.a.data();
    const int64_t step = c_.step[1] * o_.source.channels, first = at.j * c_.step[1],
                  last = (at.j + kDotTileRows - 1) * c_.step[1];
    for (const Tap& t : c_.taps) {
      if (first + t.w >= 0 && last + t.w < o_.source.width) {
        const uint16_t* from = met(at, t);
        const int64_t each = from == o_.zeros ? 0 : step;
        for (int64_t r = 0; r < kDotTileRows; ++r) a[r] = from + r * each;
      } else {
        for (int64_t r = 0; r < kDotTileRows; ++r) a[r] = met({at.n, at.i, at.j + r}, t);
      }
      a += kDotTileRows;
    }
    uint16_t* c = result(at);
    for (int64_t r = 0; r < kDotTileRows; ++r) to.c[r] = c + r * c_.every[1] * o_.result.channels;
    for (int64_t r = 0; r < kDotTileRows; ++r) advance(at);
  }
  // The row of channels that a tap meets at a place.
  const uint16_t* met(const Place& p, const Tap& t) const {
    const uint64_t h = uint64_t(p.i * c_.step[0] + t.h), w = uint64_t(p.j * c_.step[1] + t.w);
    const bool inside = h < uint64_t(o_.source.height) && w < uint64_t(o_.source.width);  // not < 0
    return inside ? o_.from + o_.source.at(p.n, int64_t(h), int64_t(w)) : o_.zeros;
  }

  const Work& w_;
  const Class& c_;
  const Operands& o_;
  std::vector<int64_t> tap_at_;
  int64_t last_tap_;
  std::vector<Group> found_;
};

// Panels [first, first + panels) of the weight, of which `w` has its channels as neighbours.
void pack(const Work& work, const uint16_t* w, int64_t first, int64_t panels, uint32_t* to) {
  parallel_for(
      "conv_dot_rows.pack_threads", panels * work.taps, 1, [&](int64_t begin, int64_t end) {
        for (int64_t at = begin; at < end; ++at) {
          const int64_t p = first + at / work.taps, tap = at % work.taps;
          simd<ConvDotTable>().pack_weight(
              w + tap * work.tap_step + p * kDotPanel * (work.across ? 1 : work.o_step),
              work.o_step, work.across, work.summed / 2, kDotPanel, to + at * work.tap_units());
        }
      });
}

}  // namespace

bool suits_conv_dot_rows(ConvRole role, const ConvAttributes::Window& window, const Meta& x,
                         const Meta& w, const Meta& y) {
  constexpr int64_t kLeastRows = limit("conv_dot_rows.least"), kMostBytes = int64_t(64) << 20;
  if (x.dtype != kBF16 || window.groups != 1 || window.stride.size() != 2 || !has_bf16_dot())
    return false;
  meet("conv_dot.channels", std::min(w.shape[0], w.shape[1]));
  if (w.shape[0] % kDotPanel || w.shape[1] % kDotPanel) return false;
  // Channels are neighbours, or the places of a channel are and then the channels.
  const int64_t taps = taps_of(w);
  const bool last = w.strides[1] == 1 && w.strides[0] % 2 == 0 &&
                    (taps == 1 || w.strides[2] == w.shape[3] * w.strides[3]),
             dense = w.strides == contiguous_strides(w.shape);
  if (!last && !dense) return false;
  const Shape& result = role == ConvRole::kOutput ? y.shape : x.shape;
  meet("conv_dot_rows.least", numel(result) / result[1]);
  return numel(result) / result[1] >= kLeastRows && Work(role, w).workspace() <= kMostBytes;
}

size_t conv_dot_rows_workspace(ConvRole role, const ConvAttributes::Window&, const Meta&,
                               const Meta& w, const Meta&) {
  return size_t(Work(role, w).workspace());
}

void run_conv_dot_rows(ConvRole role, const ConvAttributes::Window& window, const Tensor& x,
                       const Tensor& weight, const Tensor& y, void* work) {
  const Work w(role, weight.meta());
  auto* packed = static_cast<uint32_t*>(work);
  auto* zeros = reinterpret_cast<uint16_t*>(static_cast<char*>(work) + w.packed_bytes());
  auto* split = reinterpret_cast<uint16_t*>(reinterpret_cast<char*>(zeros) + w.zero_bytes());
  std::memset(zeros, 0, size_t(w.zero_bytes()));
  const auto* values = static_cast<const uint16_t*>(weight.raw_values());
  if (w.joined) {
    meet("conv_dot.taps", w.taps);
    parallel_for("conv_dot_rows.split_threads", w.outer / kDotPanel, 1,
                 [&](int64_t begin, int64_t end) {
                   for (int64_t o = begin * kDotPanel; o < end * kDotPanel; ++o)
                     simd<ConvDotTable>().split_taps(values + o * w.inner * w.taps, w.taps, w.inner,
                                                     split + o * w.inner, w.tap_step);
                 });
  }
  const bool out = role == ConvRole::kOutput;
  const Tensor &from = out ? x : y, &to = out ? y : x;
  const Operands o{static_cast<const uint16_t*>(from.raw_values()),
                   zeros,
                   static_cast<uint16_t*>(to.raw()),
                   Image(from.meta()),
                   Image(to.meta()),
                   x.shape()[0]};
  const std::vector<Class> classes = classes_of(role, window, x.meta(), weight.meta(), y.meta());
  std::vector<Rows> all;
  for (const Class& c : classes) {
    all.emplace_back(w, c, o);
    meet("conv_dot_rows.tile", c.extent[1]);
    if (c.taps.empty())
      all.back().fill_with_zeros(), all.pop_back();
    else if (w.block < w.panels)
      all.back().find_all();
  }
  for (int64_t first = 0; first < w.panels; first += w.block) {
    const int64_t panels = std::min(w.block, w.panels - first);
    pack(w, w.joined ? split : values, first, panels, packed);
    for (const Rows& rows : all) {
      parallel_for("conv_dot_rows.threads", rows.groups(), 4, [&](int64_t begin, int64_t end) {
        rows.run(begin, end, packed, first, panels);
      });
    }
  }
}

}  // namespace tessera::cpu
