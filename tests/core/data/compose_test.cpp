// Datasets of tensors, parts of datasets, several in a row, and samples of differing shapes.
#include "core/data/compose.h"

#include <algorithm>
#include <set>

#include "core/data/loader.h"
#include "core/ops/create.h"
#include "core/ops/pointwise.h"
#include "core/ops/reduce.h"
#include "core/ops/update.h"
#include "core/ops/views.h"
#include "tests/support/temp_folder.h"

namespace tessera::data {
namespace {

// Rows [i, i + 0.5] -> 10 * i, weight 100 * i.
std::shared_ptr<TensorDataset> rows(int64_t n, int64_t first = 0) {
  Tensor i = arange(first, first + n, 1, {kF32}), both[] = {i, i + 0.5};
  return std::make_shared<TensorDataset>(stack(both, 1), arange(first, first + n, 1) * 10,
                                         std::vector<NamedTensor>{{"weight", i * 100.0}});
}

std::vector<int64_t> targets_of(std::shared_ptr<const Dataset> data, int64_t batch,
                                bool shuffle = false) {
  DataLoader loader(data, DistributedSampler({.dataset_size = data->size(),
                                              .micro_batch_size = batch,
                                              .shuffle = shuffle,
                                              .repeat = false}));
  std::vector<int64_t> out;
  while (auto b = loader.next())
    for (int64_t r = 0; r < b->rows(); ++r) {
      const int64_t i = b->targets[r].item<int64_t>() / 10;
      EXPECT_EQ(b->inputs[r][0].item<float>(), float(i));
      EXPECT_EQ(b->inputs[r][1].item<float>(), float(i) + 0.5f);
      EXPECT_EQ((*b)["weight"][r].item<float>(), float(100 * i));
      out.push_back(i);
    }
  return out;
}

std::vector<int64_t> range(int64_t begin, int64_t end) {
  std::vector<int64_t> out;
  for (int64_t i = begin; i < end; ++i) out.push_back(i);
  return out;
}

TEST(TensorDataset, RowsOfEveryTensor) {
  EXPECT_EQ(targets_of(rows(7), 3), range(0, 7));
  std::vector<int64_t> shuffled = targets_of(rows(7), 3, true);
  EXPECT_NE(shuffled, range(0, 7));
  std::ranges::sort(shuffled);
  EXPECT_EQ(shuffled, range(0, 7));
  Tensor turned = transpose(arange(0, 6, 1).reshape({2, 3}), 0, 1);  // rows that are not dense
  TensorDataset data(turned, turned);
  Batch b = data.allocate(1);
  data.read({0, 2}, 0, b);
  EXPECT_EQ(b.inputs[0][1].item<int64_t>(), 5);
  expect_contains(error_of([] { TensorDataset(zeros({3}), zeros({4})); }), "targets is");
  expect_contains(error_of([] { TensorDataset(zeros({0}), zeros({0})); }), "inputs is");
  expect_contains(error_of([] { TensorDataset(Tensor(), zeros({4})); }), "undefined");
  expect_contains(error_of([&] { b["mask"]; }), "it has no mask");
}

TEST(Subset, ItemsInTheirOrder) {
  auto part = std::make_shared<Subset>(rows(9), std::vector<int64_t>{8, 2, 2, 5});
  EXPECT_EQ(targets_of(part, 3), (std::vector<int64_t>{8, 2, 2, 5}));
  expect_contains(error_of([] { Subset(rows(9), {9}); }), "item 9 of a dataset that has 9");
  expect_contains(error_of([] { Subset(rows(9), {}); }), "no items");
}

TEST(RandomSplit, EveryItemIsInOnePart) {
  for (const std::vector<double>& sizes :
       {std::vector<double>{70, 20, 11}, std::vector<double>{0.7, 0.2, 0.1}}) {
    auto parts = random_split(rows(101), sizes, 3);
    ASSERT_EQ(parts.size(), 3u);
    std::set<int64_t> all;
    for (auto& p : parts) all.insert(p->items().begin(), p->items().end());
    EXPECT_EQ(all.size(), 101u);
    EXPECT_EQ(parts[0]->size() + parts[1]->size() + parts[2]->size(), 101);
    EXPECT_EQ(parts[0]->items(), random_split(rows(101), sizes, 3)[0]->items());
    EXPECT_NE(parts[0]->items(), random_split(rows(101), sizes, 4)[0]->items());
    EXPECT_EQ(targets_of(parts[1], 8), parts[1]->items());
  }
  // Fractions with a sum that is off 1 by rounding, above and below.
  for (size_t n : {10, 20, 49, 100}) {
    auto parts = random_split(rows(490), std::vector<double>(n, 1 / double(n)), 0);
    int64_t items = 0;
    for (auto& p : parts) items += p->size();
    EXPECT_EQ(items, 490) << n << " parts";
  }
  auto thirds = random_split(rows(11), {1 / 3., 1 / 3., 1 / 3.}, 0);
  EXPECT_EQ(thirds[0]->size(), 4);
  EXPECT_EQ(thirds[1]->size(), 4);
  EXPECT_EQ(thirds[2]->size(), 3);
  expect_contains(error_of([] { random_split(rows(10), {5, 4}, 0); }), "9 items together");
  expect_contains(error_of([] { random_split(rows(10), {0.5, 0.4}, 0); }), "a part of 0.5");
  expect_contains(error_of([] {
                    random_split(rows(10), {0.7, 0.25, 0.1}, 0);
                  }),
                  "parts whose sum is 1.05");
  expect_contains(error_of([] { random_split(rows(10), {11, -1}, 0); }), "a part of -1");
  expect_contains(error_of([] { random_split(rows(2), {0.9, 0.05, 0.05}, 0); }), "no items");
  expect_contains(error_of([] { random_split(rows(2), {}, 0); }), "into 0 parts");
}

TEST(ConcatDataset, OneAfterTheOther) {
  auto all = std::make_shared<ConcatDataset>(
      std::vector<std::shared_ptr<const Dataset>>{rows(3), rows(1, 3), rows(4, 4)});
  EXPECT_EQ(targets_of(all, 3), range(0, 8));
  auto concat = [](std::vector<std::shared_ptr<const Dataset>> parts) {
    return error_of([&] { ConcatDataset{std::move(parts)}; });
  };
  auto other = std::make_shared<TensorDataset>(zeros({2, 3}), zeros({2}));
  auto wide = std::make_shared<TensorDataset>(zeros({2, 3}), zeros({2}),
                                              std::vector<NamedTensor>{{"weight", zeros({2})}});
  auto item = [](const Sample&) { return Item{}; };
  expect_contains(concat({}), "no datasets");
  expect_contains(concat({rows(3), other}), "dataset 1 has other tensors");
  expect_contains(concat({rows(3), wide}), "inputs of a sample of dataset 1 is");
  expect_contains(concat({std::make_shared<CollatedDataset>(0, item)}), "dataset 0 is endless");
  expect_contains(concat({std::make_shared<CollatedDataset>(2, item)}), "dataset 0 is collated");
}

// Item i is the number i, without a target, and twice that when a batch is finished.
struct Doubled : Dataset {
  int64_t size() const override { return 2; }
  Batch allocate(int64_t n) const override { return {empty({n}, kI64), Tensor()}; }
  void read(const Sample& s, int64_t row, const Batch& to) const override {
    to.inputs.data<int64_t>()[row] = s.index;
  }
  Batch finish(Batch read) const override {
    read.inputs = read.inputs * 2;
    return read;
  }
};
TEST(ConcatDataset, PartsMayHaveNoTargetsAndAreFinished) {
  auto one = std::make_shared<Doubled>();
  auto both = std::make_shared<ConcatDataset>(std::vector<std::shared_ptr<const Dataset>>{
      one, std::make_shared<Subset>(one, std::vector<int64_t>{1})});
  DataLoader loader(
      both, DistributedSampler({.dataset_size = 3, .micro_batch_size = 3, .shuffle = false}));
  Batch b = *loader.next();
  EXPECT_FALSE(b.targets.defined());
  for (int64_t r = 0; r < 3; ++r) EXPECT_EQ(b.inputs[r].item<int64_t>(), r == 0 ? 0 : 2);
  auto targets = std::make_shared<TensorDataset>(zeros({2}, {.dtype = kI64}), zeros({2}));
  for (auto& [a, b] :
       {std::pair<std::shared_ptr<const Dataset>, std::shared_ptr<const Dataset>>(one, targets),
        {targets, one}})
    expect_contains(error_of([&] { ConcatDataset({a, b}); }), "targets of a sample of dataset 1");
}

// Sample i is the i + 1 numbers from i on.
Item sentence(const Sample& s) {
  return {{"inputs", arange(s.index, 2 * s.index + 1, 1)}, {"index", scalar_tensor(s.index, kI64)}};
}

// Inputs are padded to the longest with -1; mask: which of them are there.
Batch pad(std::span<const Item> items) {
  int64_t longest = 0;
  for (const Item& i : items) longest = std::max(longest, i[0].tensor.size(0));
  Batch out;
  out.inputs = full({int64_t(items.size()), longest}, -1, {kI64});
  for (size_t r = 0; r < items.size(); ++r)
    assign_(slice(out.inputs[int64_t(r)], 0, 0, items[r][0].tensor.size(0)), items[r][0].tensor);
  out.extra = {{"mask", ge(out.inputs, 0)}};
  return out;
}

TEST(Collate, PadsToTheLongestOfABatch) {
  for (int prefetch : {0, 2})
    for (int workers : {1, 3}) {
      DataLoader loader(
          std::make_shared<CollatedDataset>(7, sentence, pad),
          DistributedSampler(
              {.dataset_size = 7, .micro_batch_size = 3, .shuffle = false, .repeat = false}),
          {.prefetch = prefetch, .workers = workers});
      for (int64_t first : {0, 3, 6}) {
        Batch b = *loader.next();
        const int64_t n = std::min<int64_t>(3, 7 - first);
        ASSERT_EQ(b.inputs.shape(), (Shape{n, first + n}));
        EXPECT_EQ(b.sample_numbers[0].item<int64_t>(), first);
        EXPECT_EQ(loader.cursor(), std::min<int64_t>(first + 3, 7));
        for (int64_t r = 0; r < n; ++r) {
          EXPECT_EQ(sum(b["mask"][r].to(kI64)).item<int64_t>(), first + r + 1);
          EXPECT_EQ(b.inputs[r][0].item<int64_t>(), first + r);
          EXPECT_EQ(b.inputs[r][first + r].item<int64_t>(), 2 * (first + r));
        }
      }
      EXPECT_FALSE(loader.next());
    }
}

// The second of two ranks has a batch of two samples, then one of none.
TEST(Collate, ABatchWithoutSamplesHasNoTensors) {
  for (int prefetch : {0, 2}) {
    auto first_of = [](std::span<const Item> items) {
      Batch b = pad(items);
      b.extra.push_back({"index", stack(std::vector<Tensor>(items.size(), items[0][1].tensor))});
      return b;
    };
    DataLoader loader(std::make_shared<CollatedDataset>(6, sentence, first_of),
                      DistributedSampler({.dataset_size = 6,
                                          .micro_batch_size = 2,
                                          .rank = 1,
                                          .world_size = 2,
                                          .shuffle = false,
                                          .repeat = false}),
                      {.prefetch = prefetch});
    EXPECT_EQ(loader.next()->rows(), 2);
    Batch none = *loader.next();
    EXPECT_EQ(none.rows(), 0);
    EXPECT_FALSE(none.inputs.defined() || none.targets.defined() || !none.extra.empty());
    EXPECT_EQ(loader.cursor(), 6);  // the pass ends in its middle
    EXPECT_FALSE(loader.next());
  }
  expect_contains(error_of([] { stack_items({}); }), "no samples");
}

TEST(Collate, StacksByDefault) {
  auto item = [](const Sample& s) {
    return Item{{"inputs", full({2}, double(s.index))},
                {"targets", scalar_tensor(s.index, kI64)},
                {"length", scalar_tensor(s.index + 5, kI64)}};
  };
  auto data = std::make_shared<CollatedDataset>(4, item);
  auto part = std::make_shared<Subset>(data, std::vector<int64_t>{3, 1});  // collated too
  DataLoader loader(
      part, DistributedSampler({.dataset_size = 2, .micro_batch_size = 2, .shuffle = false}));
  Batch b = *loader.next();
  EXPECT_EQ(b.inputs.shape(), (Shape{2, 2}));
  EXPECT_EQ(b.inputs[0][1].item<float>(), 3);
  EXPECT_EQ(b.targets[1].item<int64_t>(), 1);
  EXPECT_EQ(b["length"][0].item<int64_t>(), 8);
}

// A program defines the number of items, and how one is made.
class Squares final : public ItemDataset {
 public:
  int64_t size() const override { return 5; }
  Example get(int64_t i) const override {
    return {scalar_tensor(double(i)),
            scalar_tensor(i * i),
            {{"parity", scalar_tensor(i % 2 == 1, kBool)}}};
  }
};

TEST(ItemDataset, ExamplesAreStacked) {
  for (int workers : {1, 3}) {
    DataLoader loader(std::make_shared<Squares>(), {.batch_size = 2, .workers = workers});
    int64_t at = 0;
    for (Batch& b : loader) {
      EXPECT_EQ(b.inputs.shape(), Shape{std::min<int64_t>(2, 5 - at)});
      for (int64_t r = 0; r < b.rows(); ++r, ++at) {
        EXPECT_EQ(b.inputs[r].item<float>(), float(at));
        EXPECT_EQ(b.targets[r].item<int64_t>(), at * at);
        EXPECT_EQ(b["parity"][r].item<bool>(), at % 2 == 1);
      }
    }
    EXPECT_EQ(at, 5);
  }
}

TEST(ItemDataset, ExamplesMayLackTargetsAndNeedInputs) {
  class Some final : public ItemDataset {
   public:
    int64_t size() const override { return 2; }
    Example get(int64_t i) const override { return {i == 0 ? ones({2}) : Tensor()}; }
  };
  DataLoader loader(std::make_shared<Some>());
  EXPECT_FALSE(loader.next()->targets.defined());
  expect_contains(error_of([&] { loader.next(); }), "example 1 has no inputs");
}

TEST(Collate, SamplesThatDoNotFitAreNamed) {
  auto load = [](Collate collate) {
    DataLoader loader(
        std::make_shared<CollatedDataset>(7, sentence, std::move(collate)),
        DistributedSampler({.dataset_size = 7, .micro_batch_size = 3, .shuffle = false}));
    const std::string error = error_of([&] { loader.next(); });
    EXPECT_EQ(error_of([&] { loader.next(); }), error) << "it stays";
    EXPECT_EQ(loader.cursor(), 0);
    return error;
  };
  expect_contains(load(stack_items), "inputs of sample 1 of the batch is");
  expect_contains(load([](std::span<const Item> items) {
                    Batch b = pad(items);
                    b.extra[0].tensor = slice(b.extra[0].tensor, 0, 1, 3);
                    return b;
                  }),
                  "for 3 samples; expected a row for each");
  const Item a = sentence({0, 0}), other{{"mask", a[0].tensor}, a[1]}, less{a[0]};
  for (const Item& b : {other, less})
    expect_contains(error_of([&] {
                      stack_items(std::vector<Item>{a, b});
                    }),
                    "sample 1 of the batch has other tensors");
}

}  // namespace
}  // namespace tessera::data
