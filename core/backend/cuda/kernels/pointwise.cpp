// Instances and launches of pointwise.cu; see pointwise.h.
#include "core/backend/cuda/kernels/pointwise.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/ops/pointwise_columns.h"

namespace tessera::cuda {
namespace {

using namespace columns;

constexpr PointwiseOp kOps[] = {
#define TESSERA_OP1(name, kernel, kind, precision, cost, facts, ...) \
  {#name, 1, kind != kFloat, kind != kBits, kind == kTest, (unsigned{facts} & kMayTrap) != 0, cost},
#define TESSERA_OP2(name, kernel, kind, precision, cost, facts, ...) \
  {#name, 2, kind != kFloat, kind != kBits, kind == kTest, (unsigned{facts} & kMayTrap) != 0, cost},
#define TESSERA_OP3(name, kernel, kind, precision, cost, facts, ...) \
  {#name, 3, kind != kFloat, kind != kBits, kind == kTest, (unsigned{facts} & kMayTrap) != 0, cost},
#include "core/ops/pointwise.def"
};

// A thread of a cheap op reads four packs of each operand before it computes, two where elements
// are not of 4 bytes, which hides the memory's latency. Other ops read one pack, since more would
// not fit in registers; so do integers, which are computed in 64 bits.
constexpr int kCheap = 4, kSteps = 4;

PointwiseShape shape(DType t, int bytes, bool cheap) {
  if (is_integral(t)) return {bytes == 1 ? 8 : 16 / bytes, 1};
  return {16 / bytes, !cheap ? 1 : bytes == 4 ? kSteps : kSteps / 2};
}

Instance instance(std::string name, std::string op, PointwiseShape s) {
  return {std::move(name),
          {{"OP", std::move(op)},
           {"WIDTH", std::to_string(s.width)},
           {"STEPS", std::to_string(s.steps)}}};
}

}  // namespace

std::span<const PointwiseOp> pointwise_ops() { return kOps; }

PointwiseShape shape_of(const PointwiseOp& op, DType dtype) {
  return shape(dtype, int(size_of(dtype)), op.cost <= kCheap);
}
PointwiseShape shape_of_cast(DType from, DType to) {
  const int bytes = int(std::max(size_of(from), size_of(to)));
  return shape(is_integral(from) ? from : to, bytes, true);
}
PointwiseShape shape_of_copy(int bytes) {
  return {bytes == 1 ? 8 : 16 / bytes, bytes == 4 ? kSteps : kSteps / 2};
}

Instance pointwise_instance(const PointwiseOp& op, DType dtype) {
  const std::string type(element_type(name_of(dtype)));
  return instance(fmt::format("{}_{}", op.name, name_of(dtype)),
                  fmt::format("Apply{}<tessera::functors::{}, {}, {}, {}>", op.operands, op.name,
                              type, op.to_bool ? "bool" : type, op.traps),
                  shape_of(op, dtype));
}
Instance cast_instance(DType from, DType to) {
  return instance(
      fmt::format("cast_{}_{}", name_of(from), name_of(to)),
      fmt::format("Cast<{}, {}>", element_type(name_of(from)), element_type(name_of(to))),
      shape_of_cast(from, to));
}
Instance copy_instance(int bytes) {
  const std::string_view type = bits_type(bytes);
  return instance(fmt::format("copy_{}", bytes), fmt::format("Cast<{}, {}>", type, type),
                  shape_of_copy(bytes));
}
Instance where_instance(int bytes) {
  return instance(fmt::format("where_{}", bytes), fmt::format("Where<{}>", bits_type(bytes)),
                  shape_of_copy(bytes));
}

PointwiseWalks pointwise_walks(PointwiseShape shape, std::span<const int64_t> extents,
                               std::span<const Strided> operands) {
  SmallVector<Strided, kWalkOperands> anywhere(operands.begin(), operands.end());
  for (Strided& o : anywhere) o.data = nullptr;
  const std::span<const Strided> layouts(anywhere.begin(), anywhere.size());
  PointwiseWalks walks{shape, {}, make_walks(extents, layouts)};
  if (shape.width > 1) walks.packs = make_walks(extents, layouts, shape.width);
  return walks;
}

PointwiseLaunches pointwise_launches(const PointwiseWalks& walks, std::span<const Strided> operands,
                                     std::span<const unsigned long long> values, Report* report) {
  const bool packed =
      !walks.packs.empty() && are_packs(walks.packs[0], operands, walks.shape.width);
  PointwiseLaunches launches;
  for (const WalkPiece& piece : packed ? walks.packs : walks.elements) {
    PointwiseLaunch l{packed, {}, {}};
    auto at = [&](size_t k) {
      return static_cast<const char*>(operands[k].data) + piece.begin[k] * operands[k].bytes;
    };
    l.call.out = const_cast<char*>(at(0));
    for (size_t k = 1; k < operands.size(); ++k)
      if (operands[k].data)
        l.call.in[k - 1].data = at(k);
      else
        l.call.in[k - 1].value = values[k - 1];
    l.call.report = report;
    l.call.walk = piece.walk;
    l.geometry = cover(piece.walk.count, 256, packed ? walks.shape.steps : 1);
    launches.push_back(l);
  }
  return launches;
}

}  // namespace tessera::cuda
