// Changes from any layout to any other over one and two axes, uneven and empty shards included:
// values are those of the dense tensor, and the collectives are those that the change needs.
#include "dtensor/redistribute.h"

#include <gtest/gtest.h>

#include <cstdlib>

#include "collectives/decorators/counting.h"
#include "collectives/loopback/run_ranks.h"
#include "core/autograd/autograd.h"
#include "core/autograd/transforms.h"
#include "core/nn/nn.h"
#include "core/ops/create.h"
#include "core/ops/pointwise.h"
#include "core/ops/random.h"
#include "core/ops/reduce.h"
#include "core/ops/samples.h"
#include "core/ops/update.h"
#include "core/ops/views.h"
#include "core/optim/optim.h"
#include "dtensor/dtensor.h"
#include "tests/dtensor/cases.h"
#include "tests/support/temp_folder.h"

namespace tessera::test {
namespace {

const Shape kShape{6, 5, 4};

std::vector<Layout> all_layouts(const DeviceMesh& mesh, bool partial) {
  std::vector<Placement> choices{Replicate(), Shard(0), Shard(0, 2), Shard(1), Shard(2, 2)};
  if (partial) choices.push_back(Partial());
  std::vector<Layout> all;
  auto add = [&](const Layout& l) {
    if (fits(kShape, l, mesh.sizes())) all.push_back(l);
  };
  for (const Placement& a : choices) {
    if (mesh.ndim() == 1) add({a});
    for (const Placement& b : choices)
      if (mesh.ndim() == 2) add({a, b});
  }
  return all;
}

TEST(Redistribute, AnyLayoutToAnyOther) {
  const std::vector<MeshAxis> meshes[] = {{{"a", 2}},           {{"a", 4}},
                                          {{"a", 7}},           {{"a", 2}, {"b", 2}},
                                          {{"a", 3}, {"b", 2}}, {{"a", 2}, {"b", 4}}};
  int64_t pairs = 0;
  for (const auto& axes : meshes) {
    int ranks = 1;
    for (const MeshAxis& a : axes) ranks *= a.size;
    run_ranks(ranks, [&](ProcessGroup& group) {
      DeviceMesh mesh = init_device_mesh(axes);
      Tensor value = sample_values(kShape, -1, 1, 1);
      std::vector<Layout> from = all_layouts(mesh, true), to = all_layouts(mesh, false);
      for (const Layout& f : from) {
        Tensor t = place(value, mesh, f);
        for (const Layout& l : to) {
          Tensor moved = redistribute(t, l);
          Tensor want = to_local(distribute(value, mesh, l));
          check_close(to_local(moved), want, 1e-12, to_string(f) + " -> " + to_string(l));
        }
      }
      if (group.rank() == 0) pairs += int64_t(from.size() * to.size());
    });
  }
  EXPECT_GT(pairs, 2500);
}

// The collectives of a change on one axis of four ranks.
struct Change {
  Layout from, to;
  std::vector<CollKind> collectives;
};

TEST(Redistribute, TakesTheCollectivesItNeedsAndNoOthers) {
  const Change changes[] = {
      {{Shard(0)}, {Replicate()}, {CollKind::kAllGather}},
      {{Shard(0)}, {Shard(1)}, {CollKind::kAllToAll}},
      {{Partial()}, {Replicate()}, {CollKind::kAllReduce}},
      {{Partial()}, {Shard(1)}, {CollKind::kReduceScatter}},
      {{Replicate()}, {Shard(2)}, {}},
      {{Replicate()}, {Partial()}, {}},
      {{Shard(2, 2)}, {Shard(2, 2)}, {}},
  };
  run_ranks(4, [&](ProcessGroup& group) {
    auto counting = make_ref<CountingGroup>(Ref<ProcessGroup>(&group));
    DeviceMesh mesh = init_device_mesh({{"a", 4}}, counting);
    Tensor value = sample_values(kShape, -1, 1, 1);
    for (const Change& c : changes) {
      Tensor t = place(value, mesh, c.from);
      int64_t before[kNumCollKinds], total = counting->counts().total_calls();
      for (int k = 0; k < kNumCollKinds; ++k) before[k] = counting->counts().calls(CollKind(k));
      redistribute(t, c.to);
      for (CollKind k : c.collectives)
        TESSERA_ASSERT(counting->counts().calls(k) == before[int(k)] + 1, "{} -> {}: {} {}",
                       to_string(c.from), to_string(c.to), counting->counts().calls(k), name_of(k));
      TESSERA_ASSERT(counting->counts().total_calls() == total + int64_t(c.collectives.size()),
                     "{} -> {}: {} collectives", to_string(c.from), to_string(c.to),
                     counting->counts().total_calls() - total);
    }
  });
}

// Over two axes the cheapest order is taken: reduce where pieces are small, gather late.
TEST(Redistribute, TakesTheCheapestRoute) {
  Coordinates sizes{2, 4};
  Shape shape{64, 64};
  auto route = [&](const Layout& from, const Layout& to) {
    std::string text;
    for (const Step& s : plan_route(shape, from, to, sizes))
      text += fmt::format("{}{}: {} -> {}", text.empty() ? "" : "; ", s.axis, to_string(s.from),
                          to_string(s.to));
    return text;
  };
  EXPECT_EQ(route({Partial(), Partial()}, {Replicate(), Shard(0)}),
            "1: Partial(sum) -> Shard(0); 0: Partial(sum) -> Replicate");
  EXPECT_EQ(route({Partial(), Shard(1)}, {Shard(0), Shard(1)}), "0: Partial(sum) -> Shard(0)");
  EXPECT_EQ(route({Shard(0), Shard(0)}, {Replicate(), Shard(0)}), "0: Shard(0) -> Replicate");
}

TEST(DTensor, DrawsTheSameValuesOnAnyMesh) {
  Tensor key = from_values<int64_t>({5, 9}, {2});
  Tensor want = randn({13, 6}, {kF64}, key);
  for (int ranks : {2, 4, 6})
    run_ranks(ranks, [&](ProcessGroup& group) {
      Random random{uint64_t(ranks)};
      for (const DeviceMesh& mesh : make_meshes(group))
        for (int i = 0; i < 10; ++i) {
          Layout layout = random_layout(random, want.shape(), mesh, false);
          Tensor like = distribute(want, mesh, layout);
          TensorOptions o{kF64, kCPU, like};
          check_close(full_tensor(randn(want.shape(), o, key)), want, 0, "randn");
          check_close(full_tensor(zeros_like(like)), want * 0.0, 0, "zeros_like");
        }
    });
}

TEST(DTensor, UpdatesInPlaceReachEveryPiece) {
  run_ranks(3, [&](ProcessGroup&) {
    DeviceMesh mesh = init_device_mesh({{"a", 3}});
    Tensor value = sample_values(kShape, -1, 1, 1), t = distribute(value, mesh, {Shard(1)});
    add_(t, distribute(value, mesh, {Shard(1)}));
    check_close(full_tensor(t), value * 2.0, 1e-15, "add_");
    mul_(t, 0.5);
    check_close(full_tensor(t), value, 1e-15, "mul_");
    fill_(t, 3.0);
    check_close(full_tensor(t), value * 0.0 + 3.0, 0, "fill_");
  });
}

TEST(DTensor, TermsOfEveryOperatorMakeTheWhole) {
  run_ranks(3, [&](ProcessGroup&) {
    DeviceMesh mesh = init_device_mesh({{"a", 3}});
    Tensor value = from_values<int64_t>({-5, 7, 0, 3}, {4}),
           t = distribute(value, mesh, {Replicate()});
    for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct}) {
      Tensor back = redistribute(redistribute(t, {Partial(op)}), {Replicate()});
      check_close(full_tensor(back), value, 0, std::string(name_of(op)));
    }
  });
}

TEST(DTensor, APieceIsNoViewOfTheWhole) {
  run_ranks(2, [&](ProcessGroup&) {
    DeviceMesh mesh = init_device_mesh({{"a", 2}});
    Tensor value = sample_values({4}, -1, 1, 1), whole = distribute(value, mesh, {Replicate()});
    Tensor piece = redistribute(whole, {Shard(0)});
    fill_(piece, 9.0);
    check_close(full_tensor(whole), value, 0, "the whole");
  });
}

TEST(DTensor, BordersAreDifferentiable) {
  run_ranks(4, [&](ProcessGroup& group) {
    DeviceMesh mesh = init_device_mesh({{"a", 4}});
    Tensor value = sample_values(kShape, -1, 1, 1).requires_grad_();
    Tensor t = distribute(value, mesh, {Shard(0)});
    Tensor local = to_local(t * t);
    Tensor back = from_local(local * 3.0, mesh, {Shard(0)}, kShape);
    backward(full_tensor(sum(back)));
    check_close(value.grad(), value.detach() * 6.0, 1e-12, "gradient");
    // A rank's own data meet a weight that all have: the gradient is the sum over ranks.
    Tensor w = distribute(ones_like(value.detach()), mesh, {Replicate()}).requires_grad_();
    Tensor mine = to_local(w, {Partial()}) * double(group.rank());
    backward(sum(mine));
    check_close(full_tensor(w.grad()), value.detach() * 0.0 + 6.0, 1e-12, "sum over ranks");
  });
}

// Assignment is recorded for plain tensors alone, and a sharded one does not miss it silently.
TEST(DTensor, RecordedAssignmentIsRefused) {
  run_ranks(2, [&](ProcessGroup&) {
    const DeviceMesh mesh = init_device_mesh({{"a", 2}});
    const Tensor value = sample_values({4}, -1, 1, 1).requires_grad_();
    const Tensor x = distribute(value, mesh, {Replicate()}), y = x * 2.0, local = to_local(y);
    const std::string why = "to and from sharded tensors it is not recorded";
    expect_contains(error_of([&] { y.assign_(x * 3.0); }), why);
    expect_contains(error_of([&] { zeros({4}).to(value.dtype()).assign_(y); }), why);
    expect_contains(
        error_of([&] { grad([](const Tensor& t) { return (t * 2.0).assign_(t).sum(); })(y); }),
        why);
    local[0] = value[1];
    expect_contains(error_of([&] { y * 2.0; }), "shares memory with a tensor that recorded values");
    backward(local.sum());
    check_close(value.grad(), from_values<double>({0, 3, 2, 2}, {4}).to(value.dtype()), 0,
                "gradient");
  });
}

// Without the global shape, pieces of one size make it.
TEST(DTensor, PiecesOfOneSizeMakeAWhole) {
  run_ranks(4, [&](ProcessGroup& group) {
    const Tensor piece = full({2, 3}, double(group.rank())).to(kF64);
    const DeviceMesh line = init_device_mesh({{"a", 4}});
    TESSERA_ASSERT(from_local(piece, line, {Shard(0)}).shape() == (Shape{8, 3}), "rows");
    TESSERA_ASSERT(from_local(piece, line, {Shard(1)}).shape() == (Shape{2, 12}), "columns");
    const DeviceMesh square = init_device_mesh({{"a", 2}, {"b", 2}});
    const Tensor whole = from_local(piece, square, {Shard(0), Shard(1)});
    TESSERA_ASSERT(whole.shape() == (Shape{4, 6}), "both: {}", describe(whole));
    // Axis "a" varies slowest in ranks: it is here that cuts rows.
    check_close(
        full_tensor(whole),
        reshape(from_values<double>(
                    {0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 2, 2, 2, 3, 3, 3}, {24}),
                {4, 6}),
        0, "values");
    for (int dim : {-1, 2}) {
      const std::string e = error_of([&] { from_local(piece, line, {Shard(dim)}); });
      TESSERA_ASSERT(e.starts_with("from_local: Shard(" + std::to_string(dim) + ") of "), "{}", e);
    }
  });
}

// With 7 elements, one rank of an axis has 4 and the other 3, which is no multiple of units of 2.
TEST(DTensor, ALayoutFitsWhereItFitsEveryRank) {
  EXPECT_FALSE(fits({7}, {Shard(0, 2), Shard(0)}, {2, 2}));
  EXPECT_TRUE(fits({8}, {Shard(0, 2), Shard(0)}, {2, 2}));
  EXPECT_TRUE(fits({7}, {Shard(0), Shard(0)}, {2, 2}));
  EXPECT_FALSE(fits({7}, {Shard(0, 2), Replicate(), Shard(0)}, {2, 3, 2}));
}

TEST(DTensorDeathTest, CommunicationThatIsAllowedIsTold) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // a process of its own, which reads the level
  setenv("TESSERA_LOG", "info", 1);
  auto add = [] {
    run_ranks(2, [](ProcessGroup&) {
      const DeviceMesh mesh = init_device_mesh({{"tp", 2}});
      const Tensor value = ones({4, 6});
      AllowCommunication allowed;
      distribute(value, mesh, {Shard(0)}) + distribute(value, mesh, {Shard(1)});
    });
    std::exit(0);
  };
  EXPECT_EXIT(add(), testing::ExitedWithCode(0), "communication allowed: ");
  unsetenv("TESSERA_LOG");
}

TEST(DTensor, ErrorsSayWhatToDo) {
  run_ranks(2, [&](ProcessGroup&) {
    DeviceMesh mesh = init_device_mesh({{"tp", 2}});
    auto expect = [&](auto f, const std::string& part) {
      std::string e = error_of(f);
      TESSERA_ASSERT(e.find(part) != e.npos, "\"{}\" is not in: {}", part, e);
    };
    Tensor value = sample_values({4, 6}, -1, 1, 1);
    Tensor rows = distribute(value, mesh, {Shard(0)}), term = place(value, mesh, {Partial()});
    expect([&] { rows + value; }, "distribute() it, or say with a ReplicatePlain scope");
    expect([&] { exp(term); }, "Call redistribute(operand 0, (Shard(0))) first");
    expect([&] { exp(term); }, "it is a sum still to be reduced");
    expect([&] { rows + distribute(value, mesh, {Shard(1)}); }, "Call redistribute(operand");
    expect([&] { distribute(value, mesh, {Shard(2)}); }, "Shard(2) of a tensor with 2 dims");
    expect([&] { distribute(value, mesh, {Shard(1, 4)}); }, "cannot cut them in units of 4");
    expect([&] { distribute(value, mesh, {Shard(0), Shard(1)}); }, "a placement for each axis");
    expect([&] { from_local(value, mesh, {Shard(0)}, {4, 6}); }, "give the global shape");
    expect([&] { rows.data<double>(); }, "full_tensor()");
    expect([&] { sum(rows).item<double>(); }, "reading values: a tensor that is (Partial");
    expect([&] { to_string(sum(rows)); }, "take full_tensor() of it on every rank");
    expect([&] { to_string(rows); }, "or redistribute() it to Replicate");
    expect([&] { mesh["dp"]; }, "no axis \"dp\"; this mesh has tp");
    expect([&] { init_device_mesh({{"a", 3}}); }, "is 3 ranks, but group");
    expect([&] { parse_mesh("dp=2,tp"); }, "write axes as dp=2,tp=2");
  });
}

TEST(DTensor, WhatEveryRankHasIsPrinted) {
  run_ranks(2, [&](ProcessGroup&) {
    DeviceMesh mesh = init_device_mesh({{"tp", 2}});
    Tensor value = sample_values({4, 6}, -1, 1, 1);
    Tensor whole = distribute(value, mesh, {Replicate()}).requires_grad_(), loss = sum(whole);
    EXPECT_EQ(to_string(whole), to_string(value));
    EXPECT_EQ(to_string(transpose(whole, 0, 1)), to_string(transpose(value, 0, 1)));
    EXPECT_EQ(to_string(loss), to_string(sum(value)));
    EXPECT_EQ(loss.item<double>(), sum(value).item<double>());
  });
}

// A rank refuses targets of its own rows; if classes are cut, every rank does.
TEST(DTensor, ATargetThatIsNoClassIsRefused) {
  run_ranks(2, [&](ProcessGroup& g) {
    DeviceMesh mesh = init_device_mesh({{"tp", 2}});
    Tensor logits = sample_values({4, 7}, -1, 1, 1);
    LossParallel allowed;
    ReplicatePlain same_targets;
    for (int dim : {0, 1})
      for (int64_t wrong : {int64_t(7), int64_t(-1)}) {
        Tensor targets = from_values<int64_t>({1, wrong, -100, wrong}, {4});
        std::string e =
            error_of([&] { nn::cross_entropy(distribute(logits, mesh, {Shard(dim)}), targets); });
        std::string part =
            fmt::format("index {} at position [1] is outside dim 0 of extent 7", wrong);
        EXPECT_NE(e.find(part), e.npos) << "rank " << g.rank() << ", dim " << dim << ": " << e;
      }
  });
}

TEST(DTensor, APlainGradientAmongSeveralMeshes) {
  run_ranks(2, [&](ProcessGroup&) {
    DeviceMesh a = init_device_mesh({{"a", 2}}), b = init_device_mesh({{"b", 2}});
    Tensor x = distribute(ones({4}), a, {Shard(0)}).requires_grad_(),
           y = distribute(ones({4}), b, {Shard(0)}).requires_grad_();
    optim::SGD opt(std::vector<Tensor>{x, y}, {.lr = 0.1});
    x.set_grad(distribute(ones({4}), a, {Shard(0)}));
    y.set_grad(ones({4}));
    EXPECT_THROW(opt.step(), ShardingError);
  });
}

// The cost is the number of elements received, and 256 more for each collective: of 64 elements cut
// in two on two axes, a quarter is here; another quarter is gathered, and then half.
TEST(Redistribute, ARouteCostsWhatItsStepsReceive) {
  const Shape global{8, 8};
  const Coordinates sizes{2, 2};
  const Layout cut{Shard(0), Shard(1)};
  const Step first{0, Shard(0), Replicate()}, second{1, Shard(1), Replicate()};
  const double one = route_cost(global, cut, {first}, sizes),
               both = route_cost(global, cut, {first, second}, sizes);
  EXPECT_EQ(one, 256 + 16);
  EXPECT_EQ(both, one + 256 + 32);
}

}  // namespace
}  // namespace tessera::test
