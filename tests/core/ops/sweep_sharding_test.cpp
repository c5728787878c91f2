// Every legal split of every op against the whole: for each loop that may be split, operands are
// cut in two uneven parts, each part runs the op that localize returns, and the parts are put
// together: along the dim that the loop leads in a result, or by + or max where it was reduced.
// This is what a rank of a mesh axis does, without a mesh.
#include <algorithm>

#include "core/dispatch/dispatch.h"
#include "core/ops/pointwise.h"
#include "core/ops/views.h"
#include "tests/core/ops/sweep.h"
#include "tests/support/loops.h"

namespace tessera::sweep {
namespace {

using test::leads_everywhere;
using test::loops_with;
using test::part_of;
using test::Place;
using test::place_of;

List run_part(const Sample& s, const AxisMap& map, int f, const Range& part) {
  PrimRef local = s.prim->localize(map, loops_with(map, f, part));
  List in;
  for (size_t i = 0; i < s.in.size(); ++i)
    in.push_back(clone(part_of(s.in[i], place_of(map, map.in[i], f), part)));
  return run(local ? local : s.prim, in);
}

// Exact contractions refuse a part of their sum that is no subtree of it.
bool may_cut(const Sample& s, const AxisMap& map, int f, int64_t cut) {
  const int64_t extent = map.factors[size_t(f)].extent;
  try {
    for (const Range& part : {Range{0, cut, extent}, Range{cut, extent - cut, extent}})
      s.prim->localize(map, loops_with(map, f, part));
    return true;
  } catch (const ShapeError&) {
    return false;
  }
}

void check_split(const Sample& s, const AxisMap& map, int f, int64_t cut) {
  const Factor& loop = map.factors[size_t(f)];
  SCOPED_TRACE(fmt::format("loop {} of extent {} cut at {}", f, loop.extent, cut));
  List want = run(s.prim, s.in), a = run_part(s, map, f, {0, cut, loop.extent}),
       b = run_part(s, map, f, {cut, loop.extent - cut, loop.extent});
  ASSERT_EQ(a.size(), want.size());
  ASSERT_EQ(b.size(), want.size());
  for (size_t k = 0; k < want.size(); ++k) {
    Place p = place_of(map, map.out[k], f);
    Tensor joined;
    if (p.dim >= 0) {
      Tensor parts[] = {a[k], b[k]};
      joined = cat(parts, p.dim);
    } else {
      joined = loop.kind == Factor::kMax ? maximum(a[k], b[k]) : a[k] + b[k];
    }
    double tolerance = want[k].dtype() == kF64 ? 1e-12 : want[k].dtype() == kF32 ? 1e-5 : 0.02;
    expect_close(joined, want[k], is_float(want[k]) ? tolerance : 0, fmt::format("result {}", k));
  }
}

TEST(Sweep, EveryLegalShardingEqualsTheWhole) {
  int splits = 0, refused = 0;
  for_each_sample([&](const Sample& s) {
    AxisMap map = axes(*s.prim, s.in);
    for (int f = 0; f < int(map.factors.size()); ++f) {
      const Factor& loop = map.factors[size_t(f)];
      if (loop.kind == Factor::kWhole || loop.extent < 2 || !leads_everywhere(map, f)) continue;
      int64_t cut = std::max<int64_t>(1, loop.extent / 3);
      if (!may_cut(s, map, f, cut)) cut = loop.extent / 2;
      if (!may_cut(s, map, f, cut)) {
        ++refused;
        continue;
      }
      check_split(s, map, f, cut);
      ++splits;
    }
  });
  EXPECT_GT(splits, 200);
  EXPECT_LE(refused, 1);  // the inner of two summed loops
}

// Shards are ceil-sized, so the last ones of a short dim are empty: an op on nothing is legal,
// except where it must choose an element.
TEST(Sweep, EmptyShardsAreHarmless) {
  for_each_sample([](const Sample& s) {
    AxisMap map = axes(*s.prim, s.in);
    for (int f = 0; f < int(map.factors.size()); ++f) {
      const Factor& loop = map.factors[size_t(f)];
      if (loop.kind == Factor::kWhole || loop.kind == Factor::kMax || loop.extent < 2 ||
          !leads_everywhere(map, f))
        continue;
      check_split(s, map, f, loop.extent);
    }
  });
}

}  // namespace
}  // namespace tessera::sweep
