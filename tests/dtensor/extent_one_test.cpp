// A dim of extent 1 is cut like any other: the first rank has it, the others have nothing. Each op
// with such a dim in every position, cut over two ranks, equals the op on one rank, and accepts the
// cuts that it accepts where the dim is longer.
#include <gtest/gtest.h>

#include <atomic>

#include "collectives/loopback/run_ranks.h"
#include "core/ops/batch_norm.h"
#include "core/ops/contract.h"
#include "core/ops/conv.h"
#include "core/ops/create.h"
#include "core/ops/fused.h"
#include "core/ops/indexing.h"
#include "core/ops/interpolate.h"
#include "core/ops/layout.h"
#include "core/ops/linalg.h"
#include "core/ops/pointwise.h"
#include "core/ops/pool.h"
#include "core/ops/quantized.h"
#include "core/ops/random.h"
#include "core/ops/reduce.h"
#include "core/ops/samples.h"
#include "core/ops/scan.h"
#include "core/ops/sort.h"
#include "core/ops/sparse.h"
#include "core/ops/views.h"
#include "tests/dtensor/cases.h"

namespace tessera::test {
namespace {

using Extents = std::vector<int64_t>;

// An op whose operands have these extents, each of which may be replaced by any number from 1 on.
struct Family {
  std::string name;
  Extents extents;
  std::function<List(const Extents&)> operands;
  std::function<List(const List&)> run;
  bool smooth = true;
  // A place where extent 1 may be refused: the maximum over nothing; a reshape next to another dim
  // of extent 1, which does not say which of the two a dim goes on as.
  int refused = -1;
};

Tensor floats(const Shape& s) { return sample_values(s, -1, 1, uint64_t(numel(s)) + 7); }
Tensor ids(const Shape& s, int64_t below) { return sample_integers(s, 0, below, 11); }
// Diagonally dominant, so that it can be factored and solved with.
Tensor matrices(const Shape& batch, int64_t n) {
  Shape s = batch;
  s.push_back(n), s.push_back(n);
  Tensor eye = eq(unsqueeze(arange(0, n), 1), arange(0, n));
  return floats(s) * 0.2 + where(eye, 2.0, 0.0);
}
Tensor bytes(const Shape& s) { return cast(sample_integers(s, 0, 255, 13), kU8); }

std::vector<Family> families() {
  std::vector<Family> all;
  auto add = [&](std::string name, Extents extents, auto operands, auto run, bool smooth = true) {
    all.push_back({std::move(name), std::move(extents), operands, run, smooth, -1});
  };
  auto unary = [&](std::string name, Extents extents, auto op, int refused = -1) {
    add(
        std::move(name), std::move(extents),
        [](const Extents& e) { return List{floats(Shape(e))}; },
        [op](const List& in) { return List{op(in[0])}; });
    all.back().refused = refused;
  };
  using X = const Extents&;
  using In = const List&;

  add(
      "conv1d N C O K", {2, 2, 2, 3},
      [](X e) {
        return List{floats({e[0], e[1], 6}), floats({e[2], e[1], e[3]})};
      },
      [](In in) { return List{conv1d(in[0], in[1])}; });
  add(
      "conv2d N C O L", {2, 2, 2, 3},
      [](X e) {
        return List{floats({e[0], e[1], e[3], 4}), floats({e[2], e[1], 1, 3})};
      },
      [](In in) { return List{conv2d(in[0], in[1])}; });
  add(
      "conv1d in two groups N C O", {2, 2, 2},
      [](X e) {
        return List{floats({e[0], 2 * e[1], 6}), floats({2 * e[2], e[1], 3})};
      },
      [](In in) { return List{conv1d(in[0], in[1], {}, {.groups = 2})}; });
  add(
      "conv_transpose1d N C O", {2, 2, 2},
      [](X e) {
        return List{floats({e[0], e[1], 6}), floats({e[1], e[2], 3})};
      },
      [](In in) { return List{conv_transpose1d(in[0], in[1])}; });
  add(
      "max_pool1d N C L", {2, 2, 6},
      [](X e) {
        return List{floats({e[0], e[1], e[2]})};
      },
      [](In in) { return List{max_pool1d(in[0], 1)}; });
  add(
      "avg_pool1d N C", {2, 2},
      [](X e) {
        return List{floats({e[0], e[1], 6})};
      },
      [](In in) { return List{avg_pool1d(in[0], 2)}; });
  add(
      "adaptive_avg_pool1d N C", {2, 2},
      [](X e) {
        return List{floats({e[0], e[1], 6})};
      },
      [](In in) { return List{adaptive_avg_pool1d(in[0], 4)}; });
  add(
      "interpolate N C L", {2, 2, 3},
      [](X e) {
        return List{floats({e[0], e[1], e[2]})};
      },
      [](In in) {
        return List{interpolate(in[0], {.size = PerDim(5), .mode = Interpolation::kLinear})};
      });

  add(
      "embedding V D A B", {2, 3, 2, 2},
      [](X e) {
        return List{ids({e[2], e[3]}, e[0]), floats({e[0], e[1]})};
      },
      [](In in) { return List{embedding(in[0], in[1])}; });
  add(
      "gather A X I B", {2, 3, 2, 2},
      [](X e) {
        return List{floats({e[0], e[1], e[3]}), ids({e[0], e[2], e[3]}, e[1])};
      },
      [](In in) { return List{gather(in[0], 1, in[1])}; });
  add(
      "scatter_add A X I B", {2, 3, 2, 2},
      [](X e) {
        Shape of_index{e[0], e[2], e[3]};
        return List{floats({e[0], e[1], e[3]}), ids(of_index, e[1]), floats(of_index)};
      },
      [](In in) { return List{scatter_add(in[0], 1, in[1], in[2])}; });
  add(
      "scatter A X B", {2, 3, 2},
      [](X e) {
        Shape s{e[0], e[1], e[2]};
        return List{floats(s), contiguous(expand(unsqueeze(arange(0, e[1]), 1), s)), floats(s)};
      },
      [](In in) { return List{scatter(in[0], 1, in[1], in[2])}; });
  for (auto how : {ScatterReduce::kProd, ScatterReduce::kMean, ScatterReduce::kAmax})
    add(
        "scatter_reduce " + std::to_string(int(how)) + " A X I B", {2, 3, 2, 2},
        [](X e) {
          Shape of_index{e[0], e[2], e[3]};
          return List{floats({e[0], e[1], e[3]}), ids(of_index, e[1]), floats(of_index)};
        },
        [how](In in) { return List{scatter_reduce(in[0], 1, in[1], in[2], how)}; });
  add(
      "index_select A X B", {2, 3, 2},
      [](X e) {
        return List{floats({e[0], e[1], e[2]})};
      },
      [](In in) { return List{index_select(in[0], 1, zeros({2}, {kI64}))}; });
  add(
      "searchsorted A N M", {2, 3, 2},
      [](X e) {
        return List{contiguous(expand(cast(arange(0, e[1]), kF32) * 0.3 - 0.4, {e[0], e[1]})),
                    floats({e[0], e[2]})};
      },
      [](In in) { return List{searchsorted(in[0], in[1])}; }, false);
  add(
      "segment_reduce R D", {3, 2},
      [](X e) {
        return List{floats({e[0], e[1]})};
      },
      [](In in) {
        int64_t rows = in[0].size(0);
        return List{
            segment_reduce(in[0], from_values<int64_t>({0, 1, rows}, {3}), ScatterReduce::kSum)};
      });
  add(
      "segment_reduce amax R D", {3, 2},
      [](X e) {
        return List{floats({e[0], e[1]})};
      },
      [](In in) {
        int64_t rows = in[0].size(0);
        return List{segment_reduce(in[0], from_values<int64_t>({0, 1, rows, rows}, {4}),
                                   ScatterReduce::kAmax)};
      });
  for (auto how : {ScatterReduce::kSum, ScatterReduce::kAmax})
    add(
        "spmm_reduce " + std::to_string(int(how)) + " N K", {3, 2},
        [](X e) {
          return List{floats({4}), floats({e[0], e[1]})};
        },
        [how](In in) {
          int64_t last = in[1].size(0) - 1;
          Csr a{from_values<int64_t>({0, 2, 4}, {3}),
                from_values<int64_t>({0, last, last, 0}, {4})};
          return List{spmm_reduce(a, in[0], in[1], how)};
        });
  add(
      "sddmm N K", {3, 2},
      [](X e) {
        return List{floats({2, e[1]}), floats({e[0], e[1]})};
      },
      [](In in) {
        int64_t last = in[1].size(0) - 1;
        Csr a{from_values<int64_t>({0, 2, 4}, {3}), from_values<int64_t>({0, last, last, 0}, {4})};
        return List{sddmm(a, in[0], in[1])};
      });

  for (bool causal : {false, true})
    add(
        "attention B H T S D E", {2, 2, 3, 3, 2, 2},
        [](X e) {
          return List{floats({e[0], e[1], e[2], e[4]}), floats({e[0], e[1], e[3], e[4]}),
                      floats({e[0], e[1], e[3], e[5]})};
        },
        [causal](In in) {
          return List{scaled_dot_product_attention(
              in[0], in[1], in[2], {.causal = causal, .kernel = AttentionKernel::kFlash})};
        });
  add(
      "plain attention B H T S D E", {2, 2, 3, 3, 2, 2},
      [](X e) {
        return List{floats({e[0], e[1], e[2], e[4]}), floats({e[0], e[1], e[3], e[4]}),
                    floats({e[0], e[1], e[3], e[5]})};
      },
      [](In in) {
        return List{
            scaled_dot_product_attention(in[0], in[1], in[2], {.kernel = AttentionKernel::kPlain})};
      });

  add(
      "cholesky A B N", {2, 2, 2},
      [](X e) {
        return List{matrices({e[0], e[1]}, e[2])};
      },
      [](In in) { return List{linalg::cholesky(in[0])}; });
  for (bool left : {true, false})
    add(
        "solve_triangular A B N K", {2, 2, 2, 3},
        [left](X e) {
          return List{matrices({e[0], e[1]}, e[2]),
                      left ? floats({e[0], e[1], e[2], e[3]}) : floats({e[0], e[1], e[3], e[2]})};
        },
        [left](In in) {
          return List{linalg::solve_triangular(in[0], in[1], {.upper = true, .left = left})};
        });
  add(
      "qr A N", {2, 2}, [](X e) { return List{matrices({e[0]}, e[1])}; },
      [](In in) {
        auto [q, r] = linalg::qr(in[0]);
        return List{r, q};
      });
  add(
      "svdvals A N", {2, 2}, [](X e) { return List{matrices({e[0]}, e[1])}; },
      [](In in) { return List{linalg::svdvals(in[0])}; });

  unary("sort", {2, 3}, [](const Tensor& x) { return sort(x, 1).values; });
  unary("topk", {2, 3}, [](const Tensor& x) { return topk(x, 1, 1).values; });
  unary(
      "amax by index", {2, 3}, [](const Tensor& x) { return max(x, 0).values; }, 1);
  unary("cumsum", {2, 3}, [](const Tensor& x) { return cumsum(x, 1); });
  unary("cumprod", {2, 3}, [](const Tensor& x) { return cumprod(x, 1); });
  unary("cummax", {2, 3}, [](const Tensor& x) { return cummax(x, 1).values; });
  unary("logcumsumexp", {2, 3}, [](const Tensor& x) { return logcumsumexp(x, 1); });
  add(
      "linear_scan A B", {2, 3},
      [](X e) {
        return List{floats({e[0], e[1]}), floats({e[0], e[1]})};
      },
      [](In in) { return List{linear_scan(in[0], in[1], 1)}; });
  add(
      "argmax A B", {2, 3},
      [](X e) {
        return List{floats({e[0], e[1]})};
      },
      [](In in) { return List{argmax(in[0], 1)}; }, false);

  unary("softmax", {2, 3}, [](const Tensor& x) { return softmax(x); });
  unary("log_softmax", {2, 2, 3}, [](const Tensor& x) { return log_softmax(x, 1); });
  add(
      "layer_norm A B D", {2, 2, 3},
      [](X e) {
        return List{floats({e[0], e[1], e[2]}), floats({e[2]}), floats({e[2]})};
      },
      [](In in) { return List{layer_norm(in[0], in[1], in[2])}; });
  add(
      "rms_norm A B D", {2, 2, 3},
      [](X e) {
        return List{floats({e[0], e[1], e[2]}), floats({e[2]})};
      },
      [](In in) { return List{rms_norm(in[0], in[1])}; });
  add(
      "group_norm N C", {2, 2},
      [](X e) {
        return List{floats({e[0], 2 * e[1], 5}), floats({2 * e[1]})};
      },
      [](In in) { return List{group_norm(in[0], 2, in[1])}; });
  add(
      "batch_norm N C", {2, 2},
      [](X e) {
        return List{floats({e[0], e[1], 5}), floats({e[1]}), floats({e[1]})};
      },
      [](In in) {
        BatchMoments m = batch_norm_moments(in[0], in[1], in[2], 1e-5);
        return List{m.y, m.mean, m.var};
      });
  add(
      "cross_entropy R C", {2, 3},
      [](X e) {
        return List{floats({e[0], e[1]}), ids({e[0]}, e[1])};
      },
      [](In in) { return List{cross_entropy(in[0], in[1])}; });
  unary("dropout", {2, 3}, [](const Tensor& x) {
    return dropout(x, 0.4, from_values<int64_t>({5, 3}, {2}));
  });

  add(
      "cat A B", {2, 2},
      [](X e) {
        return List{floats({e[0], e[1]}), floats({e[0], 2})};
      },
      [](In in) {
        Tensor parts[] = {in[0], in[1]};
        return List{cat(parts, 1)};
      });
  add(
      "stack A B", {2, 2},
      [](X e) {
        return List{floats({e[0], e[1]}), floats({e[0], e[1]})};
      },
      [](In in) {
        Tensor parts[] = {in[0], in[1]};
        return List{stack(parts, 1)};
      });
  all.back().refused = 1;
  unary("unbind", {2, 2, 2}, [](const Tensor& x) { return unbind(x, 1)[0]; });
  unary("flip", {2, 3}, [](const Tensor& x) { return flip(x, {1}); });
  unary("pad", {2, 3}, [](const Tensor& x) { return pad(x, {1, 2}); });
  unary("slice", {2, 3}, [](const Tensor& x) { return slice(x, 1, 0, 1); });
  unary("select", {2, 3, 2}, [](const Tensor& x) { return select(x, 1, 0); });
  unary(
      "expand", {2, 3},
      [](const Tensor& x) {
        return expand(unsqueeze(x, 1), {x.size(0), 4, x.size(1)});
      },
      1);
  unary("diagonal", {2, 2, 3}, [](const Tensor& x) { return diagonal(x, 0, 1, 2); });
  unary(
      "reshape", {2, 3, 2},
      [](const Tensor& x) {
        return reshape(x, {x.size(0), x.size(1) * x.size(2)});
      },
      1);
  unary("sum", {2, 3, 2}, [](const Tensor& x) { return sum(x, {1}); });
  unary(
      "amax", {2, 3, 2}, [](const Tensor& x) { return amax(x, {1}); }, 1);
  unary("var", {2, 3, 2},
        [](const Tensor& x) { return mean(square(x - mean(x, {1}, true)), {1}); });
  add(
      "where A B", {2, 3},
      [](X e) {
        return List{floats({e[0], e[1]}), floats({e[0], e[1]})};
      },
      [](In in) { return List{where(gt(in[0], 0), in[0], in[1])}; });
  add(
      "contract B M K N", {2, 3, 2, 2},
      [](X e) {
        return List{floats({e[0], e[1], e[2]}), floats({e[0], e[2], e[3]})};
      },
      [](In in) { return List{contract("bmk,bkn->bmn", in[0], in[1])}; });

  add(
      "quantized_linear A N C O", {2, 2, 4, 3},
      [](X e) {
        return List{bytes({e[0], e[1], e[2]}), bytes({e[3], e[2]}), ones({e[3]}),
                    cast(floats({e[3]}), kF32)};
      },
      [](In in) {
        return List{quantized_linear(in[0], 3, in[1], in[2], in[3], {.quantized = false})};
      },
      false);
  add(
      "quantized_max_pool N C", {2, 2},
      [](X e) {
        return List{bytes({e[0], e[1], 4})};
      },
      [](In in) {
        PoolAttributes::Windows w{{2}, {2}, {2}, {0}, {1}};
        return List{quantized_max_pool(in[0], w)};
      },
      false);
  return all;
}

// Operands with extent `at` in one place of the family.
Case case_of(const Family& f, size_t place, int64_t at) {
  Extents e = f.extents;
  e[place] = at;
  Case c{fmt::format("{} with extent {} in place {}", f.name, at, place), f.operands(e), f.run};
  c.smooth = f.smooth;
  return c;
}

TEST(ExtentOne, IsCutAsLongerOnesAre) {
  std::atomic<int> free{0}, gradients{0};
  run_ranks(2, [&](ProcessGroup& group) {
    DeviceMesh mesh = init_device_mesh({{"a", 2}}, Ref<ProcessGroup>(&group));
    Random random{3};
    ReplicatePlain same;  // positions that compositions make, keys
    for (const Family& f : families())
      for (size_t place = 0; place < f.extents.size(); ++place) {
        const Case one = case_of(f, place, 1), two = case_of(f, place, 2);
        // Every choice, for each operand, of a dim that the place decides on, or of none.
        std::vector<std::vector<Layout>> layouts{{}};
        for (size_t i = 0; i < one.in.size(); ++i) {
          std::vector<std::vector<Layout>> longer;
          for (const auto& l : layouts) {
            longer.push_back(l), longer.back().push_back({Replicate()});
            for (int d = 0; d < one.in[i].ndim(); ++d)
              if (one.in[i].shape()[d] != two.in[i].shape()[d])
                longer.push_back(l), longer.back().push_back({Shard(d)});
          }
          layouts = longer;
        }
        for (const auto& l : layouts) {
          const Outcome of_one = check_placed(one, mesh, l, random),
                        of_two = check_placed(two, mesh, l, random);
          if (group.rank() != 0) continue;
          std::string text;
          for (const Layout& x : l) text += to_string(x);
          EXPECT_TRUE(of_one.free || !of_two.free || int(place) == f.refused)
              << one.name << " " << text << " is refused";
          free += of_one.free, gradients += of_one.gradients > 0;
        }
      }
  });
  EXPECT_GT(free, 200);
  EXPECT_GT(gradients, 300);
}

}  // namespace
}  // namespace tessera::test
