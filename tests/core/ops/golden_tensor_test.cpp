// Golden cases of reductions, order, scans, indexing, layout, creation and contractions.
#include <gtest/gtest.h>

#include <limits>

#include "core/ops/compose.h"
#include "core/ops/contract.h"
#include "core/ops/indexing.h"
#include "core/ops/layout.h"
#include "core/ops/pointwise.h"
#include "core/ops/scan.h"
#include "core/ops/sort.h"
#include "core/ops/views.h"
#include "tests/core/ops/golden.h"

namespace tessera::golden {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
const TensorOptions kDouble{.dtype = kF64};

using C = const Case&;
using List = std::vector<Tensor>;

Call just(Tensor (*f)(C)) {
  return [f](C c) { return List{f(c)}; };
}
List both(const ValuesAndIndices& v) { return {v.values, v.indices}; }
List list(const Tensors& t) { return List(t.begin(), t.end()); }

// All elements, or attribute "dim".
Dims dims_of(C c) {
  return c.entry["attributes"].contains("dim") ? Dims{c.integer("dim")} : Dims{};
}

Tensor norm_of(C c) {
  if (c.variant() == "at_zero") return norm(c["x"]);
  std::string p = c.variant();
  return norm(c["x"], p == "inf" ? kInf : p == "-inf" ? -kInf : std::stod(p), {c.integer("dim")});
}
Tensor variance(C c, bool root) {
  int64_t correction = c.entry["attributes"].contains("correction") ? c.integer("correction") : 1;
  Dims dims = c.variant() == "empty" ? Dims{0} : dims_of(c);
  return root ? stddev(c["x"], dims, correction) : var(c["x"], dims, correction);
}
Tensor index_of(C c) {
  if (c.variant() == "mask") return index(c["x"], List{c["mask"]});
  if (c.variant() == "gap") return index(c["x"], List{c["i"], Tensor(), c["j"]});
  return index(c["x"], List{c["i"], c["j"]});
}
Tensor padded(C c) {
  if (c.variant() == "negative") return pad(c["x"], {1, -1, 2, 0}, PadMode::kConstant, 7.0);
  return pad(c["x"], {2, 1},
             c.variant() == "reflect"     ? PadMode::kReflect
             : c.variant() == "replicate" ? PadMode::kReplicate
                                          : PadMode::kCircular);
}
Tensor range(C c) {
  return c.variant() == "float" ? arange(0.0, 1.0, 0.1, kDouble) : arange(5, -2, -2);
}
Tensor summed(C c, Tensor (*f)(const Tensor&, const Dims&, bool)) {
  if (c.entry["attributes"].contains("dims")) return f(c["x"], c.dims("dims"), c.op() == "sum");
  return f(c["x"], c.variant() == "empty" ? Dims{0} : dims_of(c), false);
}
List extreme(C c, bool largest) {
  if (c.variant() == "all") return {largest ? max(c["x"]) : min(c["x"])};
  return both(largest ? max(c["x"], c.integer("dim")) : min(c["x"], c.integer("dim")));
}
Tensor position(C c, bool largest) {
  if (c.variant() == "all") return largest ? argmax(c["x"]) : argmin(c["x"]);
  return largest ? argmax(c["x"], c.integer("dim")) : argmin(c["x"], c.integer("dim"));
}
List top(C c) {
  if (c.variant() == "nan") return {topk(c["x"], c.integer("k")).values};
  return both(topk(c["x"], c.integer("k"), c.integer("dim"), c.variant() == "largest"));
}
List unique_of(C c) {
  UniqueResult u = unique(c["x"]);
  return {u.values, u.inverse, u.counts};
}
Tensor baddbmm(C c) { return c["c"] * 0.5 + matmul(c["a"], c["b"]) * 2.0; }

}  // namespace

const Table& tensor_table() {
  static const Table table = {
      {"max", [](C c) { return extreme(c, true); }},
      {"min", [](C c) { return extreme(c, false); }},
      {"amax", just([](C c) { return amax(c["x"], dims_of(c)); })},
      {"amin", just([](C c) { return amin(c["x"], dims_of(c)); })},
      {"argmax", just([](C c) { return position(c, true); })},
      {"argmin", just([](C c) { return position(c, false); })},
      {"aminmax",
       [](C c) {
         return List{amin(c["x"], dims_of(c)), amax(c["x"], dims_of(c))};
       }},
      {"sort", [](C c) { return both(sort(c["x"], c.integer("dim"), c.flag("descending"))); }},
      {"argsort",
       just([](C c) { return argsort(c["x"], c.integer("dim"), c.flag("descending")); })},
      {"topk", top},
      {"kthvalue", [](C c) { return both(kthvalue(c["x"], c.integer("k"), c.integer("dim"))); }},
      {"median",
       [](C c) {
         return c.variant() == "nan" ? List{median(c["x"])}
                                     : both(median(c["x"], c.integer("dim")));
       }},
      {"searchsorted",
       just([](C c) { return searchsorted(c["edges"], c["x"], c.variant() == "right"); })},
      {"unique", unique_of},
      {"cumsum",
       just([](C c) { return cumsum(c["x"], c.variant() == "integers" ? 0 : c.integer("dim")); })},
      {"cumprod", just([](C c) { return cumprod(c["x"], c.integer("dim")); })},
      {"cummax", [](C c) { return both(cummax(c["x"], c.integer("dim"))); }},
      {"cummin", [](C c) { return both(cummin(c["x"], c.integer("dim"))); }},
      {"logcumsumexp", just([](C c) { return logcumsumexp(c["x"], c.integer("dim")); })},
      {"prod", just([](C c) { return summed(c, prod); })},
      {"sum", just([](C c) { return summed(c, sum); })},
      {"mean", just([](C c) { return summed(c, mean); })},
      {"any", just([](C c) { return summed(c, any); })},
      {"all", just([](C c) { return c.variant() == "dim" ? all(c["x"], {1}) : summed(c, all); })},
      {"logsumexp", just([](C c) { return summed(c, logsumexp); })},
      {"var", just([](C c) { return variance(c, false); })},
      {"std", just([](C c) { return variance(c, true); })},
      {"var_mean",
       [](C c) {
         return List{var(c["x"], dims_of(c)), mean(c["x"], dims_of(c))};
       }},
      {"nansum", just([](C c) { return nansum(c["x"], {1}); })},
      {"nanmean", just([](C c) { return nanmean(c["x"], {1}); })},
      {"count_nonzero", just([](C c) { return count_nonzero(c["x"], {1}); })},
      {"norm", just(norm_of)},
      {"gather", just([](C c) { return gather(c["x"], c.integer("dim"), c["index"]); })},
      {"scatter", just([](C c) {
         return c.has("src") ? scatter(c["x"], c.integer("dim"), c["index"], c["src"])
                             : scatter(c["x"], c.integer("dim"), c["index"], c.real("value"));
       })},
      {"scatter_reduce", just([](C c) {
         const std::string names[] = {"sum", "prod", "mean", "amax", "amin"};
         auto how = ScatterReduce(std::find(names, names + 5, c.text("reduce")) - names);
         return scatter_reduce(c["x"], c.integer("dim"), c["index"], c["src"], how,
                               c.flag("include_self"));
       })},
      {"scatter_add",
       just([](C c) { return scatter_add(c["x"], c.integer("dim"), c["index"], c["src"]); })},
      {"index_select",
       just([](C c) { return index_select(c["x"], c.integer("dim"), c["index"]); })},
      {"index_add", just([](C c) {
         return index_add(c["x"], c.integer("dim"), c["index"], c["src"], c.real("alpha"));
       })},
      {"index_copy",
       just([](C c) { return index_copy(c["x"], c.integer("dim"), c["index"], c["src"]); })},
      {"index_fill",
       just([](C c) { return index_fill(c["x"], c.integer("dim"), c["index"], c.real("value")); })},
      {"index", just(index_of)},
      {"index_put", just([](C c) { return index_put(c["x"], List{c["i"]}, c["src"], true); })},
      {"slice",
       just([](C c) { return slice(slice(c["x"], 0, 1, 7, 3), 1, 0, c["x"].size(1), 2); })},
      {"masked_fill", just([](C c) { return masked_fill(c["x"], c["mask"], -kInf); })},
      {"masked_select", just([](C c) { return masked_select(c["x"], c["mask"]); })},
      {"where", just([](C c) {
         return c.has("c") ? where(c["c"], c["a"], c["b"])
                           : where(gt(c["x"], 0), sqrt(c["x"]), zeros_like(c["x"]));
       })},
      {"take_along_dim", just([](C c) { return take_along_dim(c["x"], argsort(c["x"], 1), 1); })},
      {"nonzero", just([](C c) { return nonzero(c["x"]); })},
      {"tril", just([](C c) { return tril(c["x"], c.integer("offset")); })},
      {"triu", just([](C c) { return triu(c["x"], c.integer("offset")); })},
      {"diagonal", just([](C c) { return diagonal(c["x"], c.integer("offset"), 1, 2); })},
      {"diag", just([](C c) { return diag(c["x"], c.integer("offset")); })},
      {"one_hot", just([](C c) { return one_hot(c["x"], c.integer("num_classes")); })},
      {"flip", just([](C c) {
         return flip(c["x"], {0, 2});
       })},
      {"roll", just([](C c) {
         return c.variant() == "flat" ? roll(c["x"], {2}) : roll(c["x"], {1, -2}, {0, 1});
       })},
      {"repeat", just([](C c) {
         return repeat(c["x"], {2, 1, 3});
       })},
      {"repeat_interleave", just([](C c) { return repeat_interleave(c["x"], c["counts"], 0); })},
      {"expand", just([](C c) {
         return expand(c["x"], {2, -1, 3});
       })},
      {"unfold", just([](C c) { return unfold(c["x"], 0, 3, 2); })},
      {"split",
       [](C c) {
         return list(split(c["x"], {2, 2, c["x"].size(0) - 4}));
       }},
      {"chunk", [](C c) { return list(chunk(c["x"], 4)); }},
      {"tensor_split", [](C c) { return list(tensor_split(c["x"], 3)); }},
      {"cat", just([](C c) {
         return cat(List{c["a"], c["b"]});
       })},
      {"stack", just([](C c) {
         return stack(List{c["a"], c["b"]}, -1);
       })},
      {"pad", just(padded)},
      {"movedim", just([](C c) {
         return movedim(c["x"], {0, 1}, {2, 0});
       })},
      {"arange", just(range)},
      {"linspace", just([](C c) {
         return c.variant() == "ends" ? linspace(-1, 1, 7, kDouble) : linspace(3, 9, 1, kDouble);
       })},
      {"logspace", just([](C) { return logspace(0, 3, 4, 2, kDouble); })},
      {"eye", just([](C) { return eye(2, 4, kDouble); })},
      {"meshgrid",
       [](C c) {
         return list(meshgrid(List{c["a"], c["b"]}));
       }},
      {"matmul", just([](C c) { return matmul(c["a"], c["b"]); })},
      {"linear", just([](C c) { return linear(c["x"], c["weight"], c["bias"]); })},
      {"baddbmm", just(baddbmm)},
  };
  return table;
}

TEST(Golden, Tensor) { check_all(tensor_table()); }

}  // namespace tessera::golden
