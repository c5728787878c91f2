// Graphs that are written to files and read again are the same graphs, and run; files that are no
// graphs are refused, whatever is wrong with them.
#include "compile/debug/graph_file.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "collectives/loopback/run_ranks.h"
#include "collectives/ops.h"
#include "compile/run/executor.h"
#include "core/base/deterministic.h"
#include "tests/compile/passes/fuzz.h"
#include "tests/compile/passes/graphs.h"
#include "tests/compile/training.h"
#include "tests/support/temp_folder.h"

namespace tessera::compiler {
namespace {

using test::copies;
using test::expect_same_bits;
using test::graph_of;
using Json = nlohmann::json;

void expect_round_trip(const Graph& g) {
  Graph again = graph_from_json(graph_to_json(g));
  EXPECT_EQ(to_string(again), to_string(g));
  for (size_t k = 0; k < g.nodes.size(); ++k)
    EXPECT_TRUE(same_primitive(*again.nodes[k].prim, *g.nodes[k].prim)) << to_string(g, g.nodes[k]);
}

Graph optimised(Graph g) {
  run_passes(g);
  return g;
}

TEST(GraphFile, SamplesOfEveryOp) {
  test::for_each_sample([](const Sample& s, const std::string&) {
    std::vector<Tensor> in = copies(s.in);
    Graph g = graph_of(in, [&] { return test::defined_only(test::evaluate(s, in)); });
    expect_round_trip(g);
    expect_round_trip(optimised(g));
  });
}

TEST(GraphFile, RandomSteps) {
  for (uint64_t seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE(seed);
    test::RandomStep step(seed);
    Graph g = graph_of(step.inputs, [&] { return step.run(); });
    expect_round_trip(g);
    expect_round_trip(optimised(g));
  }
}

TEST(GraphFile, ViewsWithoutElementsLeaveNoMemory) {
  const Tensor x = zeros({0, 7});
  expect_round_trip(graph_of({x}, [&] { return Tensors{slice(x, 1, 2, 2)}; }));
}

TEST(GraphFile, TensorsOfTheMostDims) {
  const Tensor x = ones({2, 1, 2, 1, 3, 1, 1, 2});
  ASSERT_EQ(x.ndim(), kMaxDims);
  expect_round_trip(graph_of({x}, [&] { return Tensors{transpose(x, 0, -1) * 2.0}; }));
}

// The graph has parameters, moments and the generator, which a run writes.
TEST(GraphFile, AStepRunsFromItsFile) {
  TempFolder folder;
  for (bool passes : {false, true}) {
    test::Training training(0.1);
    auto [ids, targets] = test::batch(0);
    training.step(ids, targets);
    DeterministicScope mode(passes);  // which is written too
    Trace trace({.inputs = {ids, targets}, .names = training.state()});
    Graph g = trace.finish(training.step(ids, targets));
    EXPECT_EQ(g.deterministic, passes);
    if (passes) run_passes(g);
    save_graph(folder / "step", g, {{ids, targets}}, "a note");
    Reproducer again = load_graph(folder / "step");
    EXPECT_EQ(to_string(again.graph), to_string(g));
    EXPECT_EQ(again.failure, "a note");
    expect_same_bits(interpret(again.graph, again.inputs), interpret(g, {{ids, targets}}),
                     "results");
    for (size_t i = 0; i < g.implicit.size(); ++i)
      expect_same_bits(again.graph.implicit[i].tensor, g.implicit[i].tensor, g.implicit[i].name);
    Reproducer once_more = load_graph(folder / "step");
    expect_same_bits(Executor(once_more.graph).run(once_more.inputs),
                     interpret(load_graph(folder / "step").graph, again.inputs), "executor");
  }
}

TEST(GraphFile, WhatTheMinimiserFound) {
  TempFolder folder;
  Tensor x = ones({4});
  Graph graph = graph_of({x}, [&] { return Tensors{sum(exp(x) * 2.0)}; });
  Runner run = [](const Graph& g, std::span<const Tensor> in) {
    for (const Node& n : g.nodes) TESSERA_CHECK(n.prim->name() != "mul", "no product today");
    return interpret(g, in);
  };
  Reproducer found = minimize(graph, {&x, 1}, run);
  save_graph(folder / "found", found);
  Reproducer again = load_graph(folder / "found");
  EXPECT_EQ(to_string(again), to_string(found));
  EXPECT_THROW(run(again.graph, again.inputs), UserError);
}

TEST(GraphFile, CollectivesFindTheirGroups) {
  run_ranks(2, [](ProcessGroup& g) {
    Ref<ProcessGroup> groups[] = {world_group()};
    Tensor x = full({4}, double(g.rank() + 1));
    Graph graph = graph_of({x}, [&] {
      Tensor y = all_reduce(x * 2.0, groups[0], ReduceOp::kMax);
      Tensor z = all_gather_v(broadcast(y, groups[0], 1), groups[0], {8, 4, 1});
      return Tensors{reduce_scatter(z, groups[0]), y};
    });
    std::string text = graph_to_json(graph);
    Graph again = graph_from_json(text, groups);
    EXPECT_EQ(to_string(again), to_string(graph));
    expect_same_bits(interpret(again, {{x}}), interpret(graph, {{x}}), "results");
    expect_contains(error_of([&] { graph_from_json(text); }), "group world, which was not given");
  });
}

// ---- what is no graph

constexpr int64_t kMost = int64_t(1) << 40;  // of one number among dims

Graph some_graph() {
  static const Tensor x = reshape(arange(0, 6, 1, {kF32}), {2, 3}), state = ones({3});
  return graph_of({x}, [] {
    Tensor y = sum(softmax(x) * state, {1}), z = cat(std::vector{y, narrow(y, 0, 0, 1)});
    add_(state, exp(select(x, 0, 1)));
    return Tensors{z, permute(x, {1, 0}) + 1.0};
  });
}

TEST(GraphFile, SaysWhatIsWrong) {
  const Json good = Json::parse(graph_to_json(some_graph()));
  auto wrong = [&](const std::function<void(Json&)>& change) {
    Json j = good;
    change(j);
    return error_of([&] { graph_from_json(j.dump()); });
  };
  auto node = [](Json& j, std::string_view op) -> Json& {
    for (Json& n : j["nodes"])
      if (n["op"] == op) return n;
    throw BugError("no such node");
  };
  expect_contains(error_of([] { graph_from_json("{\"nodes\": [1, 2"); }), "parse error");
  expect_contains(error_of([] { graph_from_json("[]"); }), "no graph");
  const std::string open(400'000, '['), close(400'000, ']');
  expect_contains(error_of([&] { graph_from_json(open + close); }), "nested deeper than");
  expect_contains(
      error_of([&] {
        graph_from_json(R"({"format": "tessera graph", "version": )" + open + close + "}");
      }),
      "nested deeper than");
  expect_contains(wrong([](Json& j) { j["version"] = 9; }), "version 9 is not known");
  expect_contains(wrong([](Json& j) { j.erase("outputs"); }), "outputs");
  expect_contains(wrong([&](Json& j) { node(j, "softmax")["op"] = "harden"; }),
                  "there is no op harden");
  expect_contains(wrong([&](Json& j) { node(j, "mul")["in"] = {0}; }), "mul of 1 operands");
  expect_contains(wrong([&](Json& j) { node(j, "mul")["in"][0] = 1 << 20; }), "is not one of");
  expect_contains(wrong([&](Json& j) { node(j, "sum")["attributes"]["mask"] = 64; }), "mask 64");
  expect_contains(wrong([&](Json& j) { node(j, "cat")["attributes"]["dim"] = 3; }), "dim 3");
  expect_contains(wrong([&](Json& j) { node(j, "sum")["attributes"]["extra"] = 3; }), "extra");
  expect_contains(wrong([&](Json& j) { j["values"][0][0][1] = {8, 1ll << 39}; }), "elements");
  expect_contains(wrong([&](Json& j) { j["values"][0][0][1] = {2, 4}; }), "verify");
  expect_contains(wrong([&](Json& j) { j["values"].back()[2] = 0; }), "");
  expect_contains(wrong([&](Json& j) { node(j, "permute")["role"] = 0; }), "role");
  expect_contains(wrong([](Json& j) {
                    j["values"][0][0] = {"f32", {0, kMost, kMost}, {0, 0, 0}};
                  }),
                  "elements");
  const Json with_fused = Json::parse(graph_to_json(optimised(some_graph())));
  auto wrong_fused = [&](const std::function<void(Json&)>& change) {
    Json j = with_fused;
    change(node(j, "fused")["fused"]);
    return error_of([&] { graph_from_json(j.dump()); });
  };
  expect_contains(
      wrong_fused([](Json& f) { f["extents"][0] = kMost, f["stores"][0][1][1][0] = kMost; }),
      "elements");
  expect_contains(wrong_fused([](Json& f) {
                    f["results"][0] = {"f32", {kMost}, {kMost}};
                  }),
                  "elements");
}

// Replaces values anywhere by others: the result is an error, or a graph that verifies.
struct Tried {
  int read = 0, refused = 0;
};
void try_replaced(const Graph& graph, std::span<const Json> values, Tried& tried) {
  const Json good = Json::parse(graph_to_json(graph)), flat = good.flatten();
  for (auto& [path, old] : flat.items())
    for (const Json& value : values) {
      Json j = good;
      j[Json::json_pointer(path)] = value;
      try {
        verify(graph_from_json(j.dump()));
        ++tried.read;
      } catch (const UserError&) {
        ++tried.refused;
      }
    }
}

TEST(GraphFile, HostileTexts) {
  const Json values[] = {-1,  0,     1,     7,      1ll << 33,    INT64_MAX,
                         0.5, "sum", "f64", Json(), Json::array()};
  for (bool passes : {false, true}) {
    Tried tried;
    try_replaced(passes ? optimised(some_graph()) : some_graph(), values, tried);
    EXPECT_GT(tried.refused, 1000);
    EXPECT_GT(tried.read, 10);
  }
}

TEST(GraphFile, HostileTextsOfEveryOp) {
  const Json values[] = {0, 1, 2, 7};
  test::for_each_sample([&](const Sample& s, const std::string&) {
    std::vector<Tensor> in = copies(s.in);
    Tried tried;
    try_replaced(graph_of(in, [&] { return dispatch(s.prim, in); }), values, tried);
    EXPECT_GT(tried.refused, 0);
  });
}

TEST(GraphFile, HostileFiles) {
  TempFolder folder;
  Tensor x = ones({2, 3});
  save_graph(folder / "good", some_graph(), {{x}});
  std::string bytes = folder.read("good");
  for (size_t n : {size_t(0), size_t(7), size_t(100), bytes.size() / 2, bytes.size() - 1})
    EXPECT_THROW(load_graph(folder.write("cut", bytes.substr(0, n))), UserError) << n;
  size_t at = bytes.find("input_offsets");
  std::string moved = bytes;
  moved.replace(bytes.find("[0]", at), 3, "[9]");
  expect_contains(error_of([&] { load_graph(folder.write("moved", moved)); }), "too small");
  EXPECT_THROW(load_graph(folder / "absent"), UserError);
}

}  // namespace
}  // namespace tessera::compiler
