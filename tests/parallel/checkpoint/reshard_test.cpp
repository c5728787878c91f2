// What was saved under one cutting has the same bits when it is loaded under any other.
#include <filesystem>

#include "collectives/loopback/run_ranks.h"
#include "core/ops/create.h"
#include "parallel/checkpoint/checkpointer.h"
#include "parallel/checkpoint/load.h"
#include "parallel/checkpoint/verify.h"
#include "tests/parallel/checkpoint/cutting.h"
#include "tests/support/temp_folder.h"

namespace tessera::checkpoint {
namespace {

State state_of(const Model& m) {
  State s;
  for (const auto& [name, tensor] : m) s.pieces.push_back(whole(name, tensor));
  return s;
}

TEST(Checkpoint, RoundTripOnOneRank) {
  Random r(1);
  Model model = random_model(r, 30, 9);
  TempFolder dir;
  Checkpointer c(dir / "ckpt");
  State state = state_of(model);
  state.extra = {{"cursor", "12"}, {"quoted \"\n", "\x01 é"}};
  c.save(7, state);
  for (Piece& p : state.pieces)
    std::memset(p.values.raw(), 0, p.values.nbytes());  // staged already
  c.wait();
  EXPECT_EQ(c.last().step, 7);
  EXPECT_EQ(read_latest(dir / "ckpt").step, 7);

  Random again(1);
  Model expected = random_model(again, 30, 9);
  uint32_t version = state.pieces[0].values.storage()->version();
  Loaded l = load(dir / "ckpt", state.pieces);
  EXPECT_EQ(l.step, 7);
  EXPECT_EQ(l.extra, state.extra);
  EXPECT_EQ(l.read.read, l.read.wanted);
  for (const Piece& p : state.pieces) EXPECT_TRUE(same_bytes(p.values, expected[p.name])) << p.name;
  // This holds for an empty piece too: other ranks' pieces of the same tensor were written.
  EXPECT_GT(state.pieces[0].values.storage()->version(), version);
  EXPECT_TRUE(verify(dir / "ckpt").findings.empty());
  // The file of a lone rank is a plain safetensors file.
  io::SafetensorsFile file =
      io::SafetensorsFile::open(dir / "ckpt/step-000000007/rank-0000-of-0001.safetensors");
  for (const io::TensorInfo& t : file.tensors())
    EXPECT_TRUE(same_bytes(file.load(t.name), expected[t.name])) << t.name;
}

TEST(Checkpoint, ReshardBetweenRandomCuttings) {
  for (uint64_t seed = 0; seed < 40; ++seed) {
    Random r(seed);
    Model model = random_model(r, 6, 12);
    int before = int(draw(r, 1, 8)), after = int(draw(r, 1, 8));
    // Small blocks, so that boxes have several; a small buffer, so that copying waits for writing.
    SaveOptions options{.staging_bytes = seed % 3 ? 0u : size_t(1) << 21,
                        .block_bytes = uint64_t(draw(r, 1, 300))};
    TempFolder dir;
    auto pieces = random_layout(r, model, before, true);
    run_ranks(before, [&](ProcessGroup& g) {
      Checkpointer c(dir.str(), &g, options);
      c.save(1, {pieces[size_t(g.rank())], {{"seed", std::to_string(seed)}}});
      c.wait();
    });
    ASSERT_TRUE(verify(dir.str()).findings.empty());
    auto wanted = random_layout(r, model, after, false);
    run_ranks(after, [&](ProcessGroup& g) {
      Loaded l = load(dir.str(), wanted[size_t(g.rank())], &g);
      EXPECT_EQ(l.extra.at("seed"), std::to_string(seed));
      EXPECT_GE(l.read.read, l.read.wanted);
    });
    for (auto& of_rank : wanted)
      for (Piece& p : of_rank)
        EXPECT_TRUE(same_bytes(p.values, copy_box(model[p.name], p.box())))
            << "seed " << seed << " " << p.name << to_string(p.box());
  }
}

TEST(Checkpoint, ReplicasAreWrittenOnceAndEvenly) {
  TempFolder dir;
  std::vector<uint64_t> written(4);
  run_ranks(4, [&](ProcessGroup& g) {
    State s;
    for (int i = 0; i < 16; ++i)
      s.pieces.push_back(whole("w" + std::to_string(i), empty({64, 1 + i % 4})));
    Checkpointer c(dir.str(), &g);
    c.save(0, s);
    c.wait();
    written[size_t(g.rank())] = c.last().bytes;
  });
  for (uint64_t w : written) EXPECT_EQ(w, 64u * 4 * (1 + 2 + 3 + 4));
}

TEST(Checkpoint, ReadsTheBlocksThatWhatIsAskedForLiesIn) {
  TempFolder dir;
  Random r(3);
  Model model{{"rows", random_tensor(r, kF32, {1024, 1000})},
              {"columns", random_tensor(r, kF32, {256, 8192})}};
  Checkpointer(dir.str()).save(0, state_of(model));
  // Rows of a cut by rows are one range; columns of 8 KiB are in every block.
  Piece rows{"rows", {1024, 1000}, {300, 0}, empty({100, 1000})};
  Piece columns{"columns", {256, 8192}, {0, 2048}, empty({256, 2048})};
  std::vector<Piece> pieces{rows, columns};
  Loaded l = load(dir.str(), pieces);
  EXPECT_EQ(l.read.wanted, 100u * 4000 + 256u * 8192);
  EXPECT_EQ(l.read.read, kBlockBytes + model["columns"].nbytes());
  for (Piece& p : pieces) EXPECT_TRUE(same_bytes(p.values, copy_box(model[p.name], p.box())));
  std::vector<Piece> narrow{{"rows", {1024, 1000}, {0, 10}, empty({1024, 4})}};
  l = load(dir.str(), narrow, nullptr, {.only = "rows"});
  EXPECT_EQ(l.read.read, model["rows"].nbytes());
  EXPECT_TRUE(same_bytes(narrow[0].values, copy_box(model["rows"], narrow[0].box())));
}

TEST(Checkpoint, PiecesThatDoNotFitAreRefusedOnAllRanks) {
  struct Case {
    std::vector<std::vector<Piece>> pieces;  // of each rank
    std::string expected;
  };
  auto f = [](Shape s) { return empty(s); };
  const Case cases[] = {
      {{{{"a", {4}, {0}, f({2})}}, {{"a", {4}, {3}, f({1})}}},
       "tensor 'a' [4]: no box holds [2:3]"},
      {{{{"a", {4}, {0}, f({3})}}, {{"a", {4}, {2}, f({2})}}}, "overlap in [2:3]"},
      {{{{"a", {4}, {0}, f({3})}}, {}}, "no box holds [3:4]"},
      {{{{"a", {4}, {0}, f({4})}}, {{"a", {5}, {0}, f({5})}}},
       "is f32[4] on rank 0 and f32[5] on rank 1"},
      {{{{"a", {4}, {0}, f({4})}}, {{"a", {4}, {0}, empty({4}, kF64)}}}, "f64[4] on rank 1"},
      {{{{"a", {4}, {1}, f({4})}}, {}}, "not inside [4]"},
      {{{}, {{"a", {4, 4}, {0}, f({4})}}}, "not inside [4, 4]"},
      {{{{"a", {2}, {0}, f({2})}, {"a", {2}, {0}, f({2})}}, {}}, "twice"},
      {{{{"", {2}, {0}, f({2})}}, {}}, "must have 1 to"},
      {{{}, {{"a", {2}, {0}, {}}}}, "has no values"},
      {{{{"a\xff", {2}, {0}, f({2})}}, {}}, "not UTF-8"},
      {{{{"x", {2, 2}, {0, 0}, f({1, 1})}, {"x", {2, 2}, {1, 1}, f({1, 1})}},
        {{"x", {2, 2}, {0, 1}, f({1, 1})}}},
       "no box holds"},
  };
  for (const Case& c : cases) {
    TempFolder dir;
    std::vector<std::string> texts(2);
    run_ranks(2, [&](ProcessGroup& g) {
      Checkpointer saver(dir.str(), &g);
      texts[size_t(g.rank())] = error_of([&] {
        saver.save(1, {c.pieces[size_t(g.rank())], {}});
        saver.wait();
      });
      saver.save(2, {{whole("fine", empty({3}))}, {}});  // the group still works
      saver.wait();
    });
    for (const std::string& text : texts) expect_contains(text, c.expected);
    EXPECT_EQ(saved_steps(dir.str()), std::vector<int64_t>{2});
  }
}

TEST(Checkpoint, NoGroupIsTheWorldAndSoloOneRank) {
  TempFolder dir;
  auto piece = [](int rank, double value) {  // a half of [4]
    return std::vector<Piece>{{"a", {4}, {2 * rank}, full({2}, value)}};
  };
  run_ranks(2, [&](ProcessGroup& g) {
    Checkpointer c(dir / "all");
    c.save(1, {piece(g.rank(), 1.0 + g.rank()), {}});
    c.wait();
    std::vector<Piece> back = piece(g.rank(), 0);
    load(dir / "all", back);
    EXPECT_EQ(back[0].values.data<float>()[1], 1.0f + float(g.rank()));
    if (g.rank() != 0) return;
    Checkpointer alone(dir / "one", solo_group().get());
    alone.save(1, {{whole("a", full({4}, 5.0))}, {}});
    alone.wait();
    std::vector<Piece> whole_of_it{whole("a", zeros({4}))};
    load(dir / "one", whole_of_it, solo_group().get());
    EXPECT_EQ(whole_of_it[0].values.data<float>()[3], 5.0f);
  });
  EXPECT_TRUE(verify(dir / "all").findings.empty());
}

TEST(Checkpoint, PartitionsThatInterlockAreUnderstood) {
  // A pinwheel: no straight cut separates its five boxes.
  std::vector<Box> pinwheel{
      {{0, 0}, {1, 2}}, {{0, 2}, {2, 1}}, {{2, 1}, {1, 2}}, {{1, 0}, {2, 1}}, {{1, 1}, {1, 1}}};
  EXPECT_EQ(partition_error({3, 3}, pinwheel), std::nullopt);
  auto hole = pinwheel;
  hole.pop_back();
  EXPECT_NE(partition_error({3, 3}, hole), std::nullopt);
  auto overlap = pinwheel;
  overlap[4].shape = {2, 1};
  EXPECT_NE(partition_error({3, 3}, overlap), std::nullopt);
  EXPECT_EQ(partition_error({}, {{{}, {}}}), std::nullopt);
  EXPECT_NE(partition_error({}, {}), std::nullopt);
  EXPECT_EQ(partition_error({0, 3}, {}), std::nullopt);
}

TEST(Checkpoint, LoadNamesWhatDoesNotFit) {
  TempFolder dir;
  Checkpointer(dir.str()).save(
      3, {{whole("model.a", empty({2, 3})), whole("optimizer.a", empty({2, 3}))}, {}});
  auto attempt = [&](std::vector<Piece> pieces, LoadOptions o = {}) {
    return load(dir.str(), pieces, nullptr, o);
  };
  Piece a = whole("model.a", empty({2, 3})), other = whole("model.b", empty({1}));
  expect_contains(error_of([&] { attempt({a}); }), "nobody asked for its 'optimizer.a'");
  expect_contains(error_of([&] { attempt({a, other}); }), "it lacks 'model.b'");
  Loaded l = attempt({a, other}, {.strict = false});
  EXPECT_EQ(l.missing, std::vector<std::string>{"model.b"});
  EXPECT_EQ(l.unexpected, std::vector<std::string>{"optimizer.a"});
  l = attempt({a}, {.only = "model.*"});
  EXPECT_TRUE(l.missing.empty() && l.unexpected.empty());
  expect_contains(error_of([&] {
                    attempt({whole("model.a", empty({3, 2}))}, {.strict = false});
                  }),
                  "is f32[2, 3], but f32[3, 2] is asked for");
  expect_contains(error_of([&] {
                    attempt({whole("model.a", empty({2, 3}, kBF16))}, {.strict = false});
                  }),
                  "bf16[2, 3] is asked for");
  expect_contains(error_of([&] { load(dir / "absent", {}); }), "is no folder");
  std::filesystem::create_directories(dir / "empty");
  expect_contains(error_of([&] { load(dir / "empty", {}); }), "holds no saved step");
  // On two ranks, one with a wrong piece: both are told.
  run_ranks(2, [&](ProcessGroup& g) {
    std::vector<Piece> pieces{whole("model.a", empty({2, 3}, g.rank() ? kF64 : kF32))};
    expect_contains(error_of([&] { load(dir.str(), pieces, &g, {.only = "model.*"}); }),
                    "on rank 1");
  });
}

TEST(Checkpoint, StridedPiecesAreSavedAndFilled) {
  TempFolder dir;
  Tensor t = from_values<float>({1, 2, 3, 4, 5, 6}, {2, 3});
  Checkpointer(dir.str()).save(0, {{whole("t", t.transpose(0, 1))}, {}});
  Tensor to = from_values<float>({0, 0, 0, 0, 0, 0}, {2, 3});
  std::vector<Piece> pieces{whole("t", to.transpose(0, 1))};
  load(dir.str(), pieces);
  EXPECT_TRUE(same_bytes(to, t));
}

TEST(Checkpoint, Patterns) {
  EXPECT_TRUE(matches("*", ""));
  EXPECT_TRUE(matches("model.*", "model.h.0"));
  EXPECT_TRUE(matches("*.weight", "a.weight.weight"));
  EXPECT_TRUE(matches("a*b*c", "a-b-b-c"));
  EXPECT_FALSE(matches("a*b", "a-b-c"));
  EXPECT_FALSE(matches("model.*", "optimizer.model."));
  EXPECT_FALSE(matches("", "a"));
}

}  // namespace
}  // namespace tessera::checkpoint
