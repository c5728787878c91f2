#include "core/primitive/axis_map.h"

namespace tessera {

OperandLoops broadcast_loops(const Shape& operand, const Shape& out) {
  OperandLoops loops;
  int lead = out.size() - operand.size();
  for (int d = 0; d < operand.size(); ++d) {
    DimLoops dim;
    if (operand[d] == out[d + lead]) dim.push_back(d + lead);
    loops.push_back(dim);
  }
  return loops;
}

Range range_of(const DimLoops& dim, std::span<const Range> loops) {
  if (dim.empty()) return {0, 1, 1};
  Range r = loops[size_t(dim[0])];
  for (size_t i = 1; i < dim.size(); ++i) {
    int64_t inner = loops[size_t(dim[i])].extent;
    r.begin *= inner, r.size *= inner, r.extent *= inner;
  }
  return r;
}

Shape local_shape(const OperandLoops& operand, std::span<const Range> loops) {
  Shape s;
  for (const DimLoops& dim : operand) s.push_back(range_of(dim, loops).size);
  return s;
}

AxisMap pointwise_axes(MetaSpan in, const Shape& out) {
  AxisMap m;
  for (int64_t e : out) m.add(Factor::kPass, e);
  for (const Meta* x : in) m.in.push_back(broadcast_loops(x->shape, out));
  m.out.push_back(broadcast_loops(out, out));
  return m;
}

namespace {

void verify_operand(std::string_view op, const AxisMap& map, const OperandLoops& loops,
                    const Shape& shape, const char* what, size_t index, std::vector<bool>& seen) {
  TESSERA_ASSERT(int(loops.size()) == shape.size(),
                 "{}: axis map of {} {} has {} dims, shape is {}", op, what, index, loops.size(),
                 to_string(shape));
  for (int d = 0; d < shape.size(); ++d) {
    int64_t extent = 1;
    for (int f : loops[size_t(d)]) {
      TESSERA_ASSERT(f >= 0 && f < int(map.factors.size()), "{}: {} {} names loop {}", op, what,
                     index, f);
      TESSERA_ASSERT(!seen[size_t(f)], "{}: {} {} uses loop {} twice", op, what, index, f);
      seen[size_t(f)] = true;
      extent *= map.factors[size_t(f)].extent;
    }
    TESSERA_ASSERT(extent == shape[d], "{}: loops of {} {} dim {} multiply to {}, shape is {}", op,
                   what, index, d, extent, to_string(shape));
  }
}

}  // namespace

void verify_axes(std::string_view op, const AxisMap& map, MetaSpan in, std::span<const Meta> out) {
  if (map.empty()) return;
  TESSERA_ASSERT(map.in.size() == in.size() && map.out.size() == out.size(),
                 "{}: axis map has {} operands and {} results", op, map.in.size(), map.out.size());
  std::vector<bool> read(map.factors.size()), written(map.factors.size());
  for (size_t i = 0; i < in.size(); ++i) {
    std::vector<bool> seen(map.factors.size());
    verify_operand(op, map, map.in[i], in[i]->shape, "operand", i, seen);
    for (size_t f = 0; f < seen.size(); ++f) read[f] = read[f] || seen[f];
  }
  for (size_t i = 0; i < out.size(); ++i) {
    std::vector<bool> seen(map.factors.size());
    verify_operand(op, map, map.out[i], out[i].shape, "result", i, seen);
    for (size_t f = 0; f < seen.size(); ++f) {
      auto kind = map.factors[f].kind;
      TESSERA_ASSERT(!seen[f] || kind == Factor::kPass || kind == Factor::kWhole,
                     "{}: reduced loop {} appears in result {}", op, f, i);
      TESSERA_ASSERT(seen[f] || kind != Factor::kPass || map.factors[f].extent == 1,
                     "{}: pass loop {} is missing from result {}", op, f, i);
      written[f] = written[f] || seen[f];
    }
  }
  for (size_t f = 0; f < read.size(); ++f)
    TESSERA_ASSERT(read[f] || written[f] || map.factors[f].extent == 1,
                   "{}: loop {} belongs to no dim", op, f);
}

}  // namespace tessera
