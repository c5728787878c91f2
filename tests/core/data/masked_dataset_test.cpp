// Masked language modelling: which tokens are chosen, what becomes of them, and that a row depends
// on seed and sample alone.
#include "core/data/masked_dataset.h"

#include <map>
#include <numeric>

#include "tests/support/temp_folder.h"

namespace tessera::data {
namespace {

constexpr TokenId kCls = 101, kSep = 102, kMask = 103;

Tokens counting(int n) {
  std::vector<TokenId> ids(static_cast<size_t>(n));
  std::iota(ids.begin(), ids.end(), 200);
  return Tokens::from_ids(ids);
}

MaskingOptions options(bool random = true) {
  return {.length = 22,
          .share = 0.15,
          .vocab_size = 100'000,
          .cls = kCls,
          .sep = kSep,
          .mask = kMask,
          .seed = 7,
          .random_windows = random};
}

struct Row {
  std::vector<int64_t> inputs, targets;
  bool operator==(const Row&) const = default;
};
Row row_of(const MaskedDataset& data, Sample sample) {
  Batch b = data.allocate(2);
  data.read(sample, 1, b);
  int64_t n = b.inputs.size(1);
  const int64_t *in = b.inputs.data<int64_t>() + n, *out = b.targets.data<int64_t>() + n;
  return {{in, in + n}, {out, out + n}};
}

TEST(MaskedDataset, RowsAreAWindowWithItsTargetsHidden) {
  MaskedDataset data(counting(1000), options(), "training split");
  EXPECT_EQ(data.size(), 0);
  EXPECT_EQ(data.num_targets(), 3);
  std::map<std::string, int> fates;
  std::vector<int> chosen(22);
  for (int64_t s = 0; s < 20'000; ++s) {
    Row row = row_of(data, {.number = s, .index = 0});
    ASSERT_EQ(row.inputs.front(), kCls);
    ASSERT_EQ(row.inputs.back(), kSep);
    ASSERT_EQ(row.targets.front(), MaskedDataset::kNoTarget);
    ASSERT_EQ(row.targets.back(), MaskedDataset::kNoTarget);
    int64_t targets = 0, first = -1;
    for (int64_t t = 1; t < 21; ++t) {
      int64_t in = row.inputs[size_t(t)], target = row.targets[size_t(t)];
      int64_t original = target == MaskedDataset::kNoTarget ? in : target;
      if (first < 0) first = original - t;
      ASSERT_EQ(original, first + t) << "tokens of one window";
      if (target == MaskedDataset::kNoTarget) continue;
      ++targets;
      ++chosen[size_t(t)];
      ++fates[in == kMask ? "mask" : in == target ? "stays" : "random"];
    }
    ASSERT_EQ(targets, 3);
  }
  // 60,000 are drawn: within five deviations.
  EXPECT_NEAR(fates["mask"], 48'000, 490);
  EXPECT_NEAR(fates["stays"], 6'000, 370);
  EXPECT_NEAR(fates["random"], 6'000, 370);
  for (size_t t = 1; t < 21; ++t) EXPECT_NEAR(chosen[t], 3'000, 260) << t;
}

TEST(MaskedDataset, DependsOnSeedAndSampleAlone) {
  MaskedDataset a(counting(1000), options(), "data"), b(counting(1000), options(), "data");
  MaskingOptions other = options();
  other.seed = 8;
  MaskedDataset c(counting(1000), other, "data");
  EXPECT_EQ(row_of(a, {.number = 5, .index = 0}), row_of(b, {.number = 5, .index = 9}));
  EXPECT_NE(row_of(a, {.number = 5, .index = 0}), row_of(a, {.number = 6, .index = 0}));
  EXPECT_NE(row_of(a, {.number = 5, .index = 0}), row_of(c, {.number = 5, .index = 0}));
}

// The rows that scripts/reference/masked_draws.py gives, from which PyTorch learns beside us.
TEST(MaskedDataset, RowsAreThoseOfTheReference) {
  using Hidden = std::map<int64_t, int64_t>;  // where a target is, what stands there
  auto expect_row = [](bool random, int64_t number, int64_t first, const Hidden& hidden) {
    Row want{std::vector<int64_t>(22), std::vector<int64_t>(22, MaskedDataset::kNoTarget)};
    std::iota(want.inputs.begin(), want.inputs.end(), first - 1);
    want.inputs.front() = kCls, want.inputs.back() = kSep;
    for (auto [place, id] : hidden) {
      want.targets[size_t(place)] = first + place - 1;
      want.inputs[size_t(place)] = id;
    }
    MaskedDataset data(counting(1000), options(random), "data");
    EXPECT_EQ(row_of(data, {.number = number, .index = number}), want) << number;
  };
  expect_row(true, 30, 779, {{1, kMask}, {10, 788}, {17, 31461}});
  expect_row(true, (int64_t(1) << 33) + 5, 464, {{13, kMask}, {14, 477}, {16, kMask}});
  expect_row(false, 3, 260, {{1, kMask}, {14, 24714}, {15, kMask}});
}

TEST(MaskedDataset, ValidationGoesThroughItsWindowsInOrder) {
  MaskedDataset data(counting(50), options(false), "validation split");
  EXPECT_EQ(data.size(), 2);
  Row second = row_of(data, {.number = 77, .index = 1});
  EXPECT_EQ(second, row_of(data, {.number = 78, .index = 1}));
  int64_t original =
      second.targets[1] == MaskedDataset::kNoTarget ? second.inputs[1] : second.targets[1];
  EXPECT_EQ(original, 220);
}

TEST(MaskedDataset, RefusesWhatDoesNotFit) {
  auto refused = [](MaskingOptions o, int tokens, const char* part) {
    expect_contains(error_of([&] { MaskedDataset(counting(tokens), o, "training split"); }), part);
  };
  MaskingOptions o = options();
  refused(o, 19, "the training split has 19 tokens, a sequence of length 22 needs 20");
  o.share = 0;
  refused(o, 100, "mask share 0");
  o = options();
  o.length = 2;
  refused(o, 100, "length 2");
  o.length = INT64_MIN;
  refused(o, 100, "length -9223372036854775808");
  o = options();
  o.vocab_size = 210;
  MaskedDataset data(counting(100), o, "training split");
  expect_contains(error_of([&] {
                    for (int64_t s = 0; s < 50; ++s) row_of(data, {.number = s, .index = 0});
                  }),
                  "the vocabulary has 210");
}

}  // namespace
}  // namespace tessera::data
