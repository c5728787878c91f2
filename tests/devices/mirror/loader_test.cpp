// Batches that a loader delivers on the device have the values of those on the CPU, whatever runs
// late, and nobody waits for their copies.
#include <numeric>

#include "core/core.h"
#include "core/tensor/device_runtime.h"
#include "testing.h"

using namespace tessera;

namespace {

// Rows that say their sample's number; inputs lie channels-last, as images do.
class Numbers final : public data::Dataset {
 public:
  int64_t size() const override { return 0; }
  data::Batch allocate(int64_t rows) const override {
    return {.inputs = permute(empty({rows, 4, 4, 3}, kF32), {0, 3, 1, 2}),
            .targets = empty({rows}, kI64)};
  }
  void read(const data::Sample& s, int64_t row, const data::Batch& to) const override {
    float* x = to.inputs.data<float>() + row * 48;
    std::iota(x, x + 48, float(s.number * 48));
    to.targets.data<int64_t>()[row] = s.number % 10;
  }
};

struct Pair final : data::ItemDataset {
  int64_t size() const override { return 64; }
  data::Example get(int64_t i) const override {
    return {full({3, 4, 4}, double(i), {kF32, kCPU}), scalar_tensor(double(i), kF32, kCPU)};
  }
};

// Numbers that depend on all of each batch, read once at the end.
std::vector<float> sums(data::DataLoader& loader, int64_t steps, Device device) {
  std::vector<Tensor> all;
  Tensor carried = zeros({3, 4, 4}, {.dtype = kF32, .device = device});
  for (int64_t s = 0; s < steps; ++s) {
    const std::optional<data::Batch> batch = loader.next();
    EXPECT_EQ(batch->inputs.device(), device);
    EXPECT_EQ(batch->sample_numbers.device(), device);
    carried = carried * 0.5 + sum(batch->inputs, {0}) * 0.01;
    all.push_back(sum(carried * carried) + sum(batch->targets.to(kF32)) +
                  sum(batch->sample_numbers.to(kF32)));
  }
  const Tensor each = stack(Tensors(all.begin(), all.end()), 0).cpu();
  return {each.values<float>(), each.values<float>() + steps};
}

template <class D>
void expect_same() {
  const auto make = [](Device device, int prefetch) {
    return data::DataLoader(
        std::make_shared<D>(),
        data::DataLoaderOptions{
            .batch_size = 4, .repeat = true, .prefetch = prefetch, .workers = 2, .device = device});
  };
  data::DataLoader there = make(kCPU, 2);
  const std::vector<float> want = sums(there, 12, kCPU);
  mirror::for_each_seed([&] {
    for (int prefetch : {0, 1, 3}) {
      data::DataLoader loader = make(mirror::device(1), prefetch);
      EXPECT_EQ(sums(loader, 12, mirror::device(1)), want) << prefetch;
    }
  });
}

TEST(MirrorLoader, BatchesHaveTheValuesOfTheCpu) { expect_same<Numbers>(); }
TEST(MirrorLoader, CollatedBatchesToo) { expect_same<Pair>(); }

TEST(MirrorLoader, NobodyWaitsForCopies) {
  const Device device = mirror::device();
  data::DataLoader loader(
      std::make_shared<Numbers>(),
      data::DataLoaderOptions{.batch_size = 8, .repeat = true, .device = device});
  Tensor total = zeros({}, {.dtype = kF32, .device = device});
  const int64_t waits = mirror::host_waits();
  for (int s = 0; s < 10; ++s) total = total + sum(loader.next()->inputs);
  EXPECT_EQ(mirror::host_waits(), waits);
  EXPECT_EQ(total.item<float>(), 80 * 48 * (80 * 48 - 1) / 2);
}

// Where it was read, an error comes with its batch, not with the one before.
TEST(MirrorLoader, ErrorsComeWhenTheirBatchIsDue) {
  struct Broken final : data::ItemDataset {
    int64_t size() const override { return 8; }
    data::Example get(int64_t i) const override {
      TESSERA_CHECK(i < 4, "sample {} is broken", i);
      return {scalar_tensor(double(i), kF32, kCPU), {}};
    }
  };
  data::DataLoader loader(std::make_shared<Broken>(),
                          data::DataLoaderOptions{.batch_size = 2, .device = mirror::device()});
  EXPECT_EQ(sum(loader.next()->inputs).item<float>(), 1);
  EXPECT_EQ(sum(loader.next()->inputs).item<float>(), 5);
  EXPECT_EQ(loader.cursor(), 4);
  EXPECT_THROW(loader.next(), UserError);
  EXPECT_EQ(loader.cursor(), 4);
}

}  // namespace
