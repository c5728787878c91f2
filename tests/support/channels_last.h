// Samples of registered ops in channels-last memory: those with operands [N, C, H, W] or
// [N, C, D, H, W], and pointwise ops of any shape, whose elements are laid out as such.
#pragma once
#include "core/ops/create.h"
#include "core/ops/indexing.h"
#include "core/ops/views.h"
#include "core/primitive/registry.h"

namespace tessera::test {

inline bool has_channels(const Tensor& t) { return t.ndim() == 4 || t.ndim() == 5; }

/// True when every operand has the shape of the only result, element by element, and has more than
/// one element along every dim.
inline bool is_pointwise(const Sample& s) {
  SmallVector<const Meta*, 8> in;
  for (const Tensor& t : s.in) in.push_back(&t.meta());
  const Metas out = s.prim->infer(in);
  const AxisMap map = s.prim->axes(in);
  if (s.in.empty() || out.size() != 1 || map.empty()) return false;
  for (const Factor& f : map.factors)
    if (f.kind != Factor::kPass) return false;
  for (size_t i = 0; i < s.in.size(); ++i) {
    if (s.in[i].shape() != out[0].shape || map.in[i].size() != map.out[0].size()) return false;
    for (size_t d = 0; d < map.in[i].size(); ++d)
      if (map.in[i][d].size() != 1 || map.in[i][d][0] != map.out[0][d][0]) return false;
  }
  return !s.prim->is_view() && s.in[0].numel() > 0;
}

/// `s` on operands with channels, contiguous; no value where there is none.
inline std::optional<Sample> with_channels(const Sample& s) {
  if (std::ranges::any_of(s.in, has_channels)) return s;
  if (!is_pointwise(s)) return std::nullopt;
  const Shape shape{2, 3, 5, 2};
  const int64_t n = s.in[0].numel();
  std::vector<int64_t> from;
  for (int64_t i = 0; i < numel(shape); ++i) from.push_back(i % n);
  Sample out = s;
  for (Tensor& t : out.in)
    t = reshape(index_select(reshape(t, {n}), 0, from_values<int64_t>(from, {numel(shape)})),
                shape);
  return out;
}

/// The operands with a channel dim, or only number `one` of them, in channels-last memory.
inline std::vector<Tensor> channels_last(const std::vector<Tensor>& in, int one = -1) {
  std::vector<Tensor> out = in;
  for (size_t i = 0; i < out.size(); ++i)
    if (has_channels(out[i]) && (one < 0 || size_t(one) == i))
      out[i] = contiguous(out[i], MemoryFormat::kChannelsLast);
  return out;
}

}  // namespace tessera::test
