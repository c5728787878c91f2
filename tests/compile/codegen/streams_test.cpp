// Results that are stored past the caches: they have the bits of ordinary stores, wherever they
// begin, and only large results are.
#include "compile/codegen/streams.h"

#include <algorithm>
#include <cstring>
#include <regex>

#include "core/base/boundary.h"
#include "core/core.h"
#include "tests/compile/codegen/compare.h"
#include "tests/support/boundaries.h"

namespace tessera::test {

using namespace compiler;
namespace {

// One nest with results of different widths, each with another position in its line.
Body results_of_many_dtypes(int64_t rows, int64_t n) {
  BodyBuilder b({rows, n});
  InstrId x = b.load(3), y = b.op("mul", {x, b.constant(1.5)});
  b.store(y);
  for (DType t : {kF64, kBF16, kF16, kI64, kI32, kU8}) b.store(b.cast(y, t));
  b.store(b.op("gt", {x, b.constant(0.0)}, true));
  return b.body;
}

// The nest with the sum has a result, beside one of a later nest.
Body residual_norm_body(int64_t rows, int64_t n) {
  BodyBuilder b({rows, n});
  InstrId x = b.op("add", {b.load(3), b.load(3)});
  b.store(x);
  b.store(b.op("mul", {x, b.op("rsqrt", {b.sum(b.op("square", {x}), 2)})}));
  return b.body;
}

// The first nest has no sum, only a pick is between it and the next; y0 is read again.
Body result_before_a_pick(int64_t rows, int64_t n) {
  BodyBuilder b({rows, n});
  InstrId x = b.load(3), t = b.load(1, kI64), e = b.op("sigmoid", {x});
  InstrId hit = b.op("eq", {b.index(1), t}, true);
  b.store(e);
  b.store(b.op("sub", {e, b.sum(b.op("where", {hit, x, b.constant(0.0)}), 2)}));
  return b.body;
}

std::vector<Body> bodies() {
  std::vector<Body> list;
  for (int64_t n : {300, 1000}) list.push_back(result_before_a_pick(70, n));
  for (int64_t n : {64, 100, 300, 5000})
    for (int64_t rows : {1, 70}) {
      list.push_back(layer_norm_body(rows, n));
      list.push_back(layer_norm_grad_body(rows, n));
      list.push_back(residual_norm_body(rows, n));
      list.push_back(bias_gelu_body(rows, n, kBF16));
      list.push_back(results_of_many_dtypes(rows, n));
    }
  for (int64_t n : {300, 1000}) list.push_back(softmax_body(70, n));
  list.push_back(adamw_body(100001));
  list.push_back(cross_entropy_body(3, 20000));  // rows too long for L1
  return list;
}

bool streams(const Body& body) {
  return print_cpp(body, "kernel").find("Streamed<") != std::string::npos;
}

// What `kernel` writes to results that begin `shift` elements behind a line, and what is around it.
Tensors results_at(const Body& body, const KernelCode& code, int64_t shift) {
  Tensors kept, results;
  std::vector<char*> p;
  for (size_t k = 0; k < body.operands.size(); ++k) {
    kept.push_back(operand_of(body, k, 1));
    p.push_back(static_cast<char*>(kept.back().raw()));
  }
  for (const Store& s : body.stores) {
    const int64_t element = int64_t(size_of(s.to.dtype)), reach = numel(meta_of(body, s.to).shape);
    Tensor all = empty({(reach + 256) * element}, kU8);
    std::memset(all.raw(), 0x5a, all.nbytes());
    results.push_back(all);
    p.push_back(static_cast<char*>(all.raw()) + (64 + shift) * element);
  }
  Tensor scratch = empty({int64_t(code.scratch_bytes) + 64}, kU8);
  run_code(code, p.data(), static_cast<char*>(scratch.raw()));
  return results;
}

std::vector<Ref<const LoadedKernel>> compiled(const std::vector<Body>& list) {
  std::vector<Ref<const Fused>> fused;
  std::vector<const Fused*> kernels;
  for (const Body& b : list) {
    fused.push_back(make_ref<const Fused>("test", b, results_of(b)));
    kernels.push_back(fused.back().get());
  }
  return generate(kernels, {.cache_dir = kernel_cache()});
}

TEST(Streams, EqualTheInterpreter) {
  StreamedFrom all(0);
  for (const Body& b : bodies()) EXPECT_TRUE(streams(b)) << to_string(b);
  compare_with_interpreter(bodies());
}

TEST(Streams, RowsAtTheirLimit) {
  StreamedFrom all(0);
  CountBoundaries counting;
  std::vector<Body> list;
  for (int64_t n : {63, 64, 65}) {
    list.push_back(residual_norm_body(70, n));
    EXPECT_EQ(streams(list.back()), n > 63);
  }
  compare_with_interpreter(list);
  EXPECT_EQ(not_met({"streams"}), "");
}

TEST(Streams, SameBitsAsOrdinaryStoresWhereverResultsBegin) {
  const std::vector<Body> list = bodies();
  auto ordinary = compiled(list);
  StreamedFrom all(0);
  auto streamed = compiled(list);
  for (size_t n = 0; n < list.size(); ++n)
    for (int64_t shift : {0, 1, 5, 16, 31}) {
      Tensors expected = results_at(list[n], ordinary[n]->code, shift);
      Tensors got = results_at(list[n], streamed[n]->code, shift);
      for (size_t k = 0; k < got.size(); ++k)
        EXPECT_EQ(std::memcmp(got[k].raw(), expected[k].raw(), got[k].nbytes()), 0)
            << "result " << k << ", shift " << shift << "\n"
            << to_string(list[n]);
    }
}

TEST(Streams, OperandsAreFetchedNoWholePagesFromWhereRowsAreStored) {
  auto ahead = [](const Body& body, int level, int operand = 0) {  // bytes; 0: it is not
    std::smatch found;
    const std::string text = print_cpp(body, "kernel"), n = std::to_string(operand);
    const std::regex sought("h" + n + "_" + std::to_string(level) + R"(\.next = &r)" + n +
                            R"(\[0\] \+ (\d+);)");
    return std::regex_search(text, found, sought) ? 4 * std::stoi(found[1]) : 0;
  };
  EXPECT_EQ(ahead(layer_norm_body(4096, 768), 1), 15 << 9);  // 13.5 KiB from two rows before
  EXPECT_EQ(ahead(layer_norm_body(4096, 640), 1), 15 << 9);  // 12.5 KiB
  EXPECT_EQ(ahead(softmax_body(4096, 1024), 1), 17 << 9);    // not 7.5, which would be 15.5 KiB
  EXPECT_EQ(ahead(softmax_body(4096, 1024), 2), 36 << 9);    // 18 KiB
  EXPECT_EQ(ahead(layer_norm_body(4096, 768), 2), 38 << 9);  // not 18, which would be 24 KiB
  for (int operand : {0, 1}) {  // two share what can be on its way to L1
    EXPECT_EQ(ahead(layer_norm_grad_body(4096, 768), 1, operand), 7 << 9);
    EXPECT_EQ(ahead(layer_norm_grad_body(4096, 768), 2, operand), 0);
  }
}
TEST(Streams, LongRowsAreFetchedOneAhead) {
  auto ahead = [](const Body& body) {  // by a nest of any number of lanes
    return std::regex_search(print_cpp(body, "kernel"),
                             std::regex(R"(Ahead<\w+, \d+, \d> h0_\d\{)"));
  };
  EXPECT_FALSE(ahead(cross_entropy_body(3, 16383)));
  EXPECT_TRUE(ahead(cross_entropy_body(3, 16384)));  // 64 KiB
  EXPECT_TRUE(ahead(cross_entropy_body(3, 65536)));
  EXPECT_FALSE(ahead(cross_entropy_body(3, 65537)));  // three of them are no guests of an L2 cache
  {
    StreamedFrom none(int64_t(1) << 40);
    EXPECT_FALSE(ahead(bias_gelu_body(66, 4000)));  // one nest, which does not stream
  }
  StreamedFrom all(0);
  EXPECT_FALSE(ahead(bias_gelu_body(65, 4000)));
  EXPECT_TRUE(ahead(bias_gelu_body(66, 4000)));  // more than 1 MiB
  EXPECT_TRUE(ahead(bias_gelu_body(132, 4000, kBF16)));
  EXPECT_FALSE(ahead(bias_gelu_body(66, 4000, kF64)));  // no groups, so its steps are short
  EXPECT_FALSE(ahead(bias_gelu_body(31, 8200)));        // rows are taken in three pieces
  EXPECT_TRUE(ahead(bias_gelu_body(32, 8200)));
}

// A row of two loops, and a nest that computes much along one of them.
TEST(Streams, ANestThatSeesAPartOfARowFetchesNothing) {
  BodyBuilder b({3, 300, 80});
  InstrId total = b.reduce(ReduceKind::kSum, b.load(7), 6);
  InstrId part = b.op("exp", {b.op("tanh", {b.op("add", {b.load(4), total})})});
  b.store(part, b.dense(5, kF32));
  compare_with_interpreter({b.body}, 1e-4);
}

TEST(Streams, OnlyLargeResultsWhoseElementsAreNeighbours) {
  EXPECT_GE(streamed_from(), int64_t(1) << 18);  // no last-level cache is smaller
  EXPECT_FALSE(streams(bias_gelu_body(16, 64)));
  const int64_t bytes = 16 * 64 * 4;
  {
    StreamedFrom larger(bytes + 1);
    EXPECT_FALSE(streams(bias_gelu_body(16, 64)));
  }
  StreamedFrom from(bytes);
  EXPECT_TRUE(streams(bias_gelu_body(16, 64)));
  EXPECT_FALSE(streams(bias_gelu_body(32, 33)));  // its rows are short
  BodyBuilder b({32, 64});
  b.store(b.op("exp", {b.load(3)}), {kF32, {128, 2}});
  EXPECT_FALSE(streams(b.body));
  EXPECT_FALSE(streams(softmax_body(16, 64)));   // its rows keep exponentials
  EXPECT_TRUE(streams(softmax_body(16, 256)));   // a row of them beside the next one is no result's
  EXPECT_TRUE(streams(softmax_body(2, 20000)));  // and are too long for L1
}

}  // namespace
}  // namespace tessera::test
