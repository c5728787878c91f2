// A thread that is about to overwrite memory waits for its other readers; a thread that reads it
// does not.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>

#include "core/ops/create.h"
#include "core/ops/layout.h"
#include "core/ops/pointwise.h"
#include "core/ops/random.h"
#include "core/ops/update.h"
#include "core/ops/views.h"
#include "tests/support/late_reader.h"

namespace tessera {
namespace {

using test::LateReader, test::read_late;

TEST(Readers, EveryWayToWriteWaitsForThem) {
  Tensor ones_64 = ones({64}), norm = scalar_tensor(1.0, kF64, kCPU);
  struct Case {
    const char* name;
    std::function<void(const Tensor&)> write;
  };
  const Case cases[] = {
      {"assign_", [&](const Tensor& t) { assign_(t, ones_64); }},
      {"assign_ to a view", [&](const Tensor& t) { assign_(slice(t, 0, 5, 6), ones({1})); }},
      {"fill_", [](const Tensor& t) { fill_(t, 3); }},
      {"add_", [&](const Tensor& t) { add_(t, ones_64); }},
      {"an op that reads what it overwrites", [](const Tensor& t) { assign_(t, flip(t, {0})); }},
      {"an optimizer",
       [&](const Tensor& t) {
         Tensor p[] = {ones({64}), t}, g[] = {ones_64, ones_64};
         sgd_update_(p, g, {}, scalar_tensor(0.1, kF64, kCPU), norm, {});
       }},
      {"data()", [](const Tensor& t) { t.data<float>()[3] = 9; }},
      {"raw()", [](const Tensor& t) { static_cast<float*>(t.raw())[3] = 9; }},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.name);
    Tensor t = arange(0, 64);
    t = t.to(kF32);
    std::vector<float> before(t.values<float>(), t.values<float>() + 64);
    Ref<LateReader> first = read_late(t), second = read_late(t[7].detach());
    c.write(t);
    EXPECT_EQ(first->read, before);
    EXPECT_EQ(second->read, std::vector<float>{7});
    EXPECT_TRUE(t.storage()->readers().empty()) << "a second write waits for nobody";
    EXPECT_FALSE(std::equal(before.begin(), before.end(), t.values<float>()));
  }
}

TEST(Readers, ReadingDoesNotWait) {
  Tensor t = ones({64});
  Ref<LateReader> reader = read_late(t);
  Tensor sum = t + t;
  Tensor copy = clone(t), row = t[3];
  EXPECT_EQ(row.item<float>(), 1);
  EXPECT_EQ(t.values<float>()[63], 1);
  EXPECT_NE(t.raw_values(), nullptr);
  Tensor to = zeros({64});
  assign_(to, t);
  EXPECT_FALSE(to_string(t).empty());
  EXPECT_FALSE(reader->done());
  fill_(copy, 2), fill_(sum, 2);  // memory of their own
  EXPECT_FALSE(reader->done());
}

TEST(Readers, OneThatFailedIsDoneReading) {
  Tensor t = ones({4});
  Ref<LateReader> reader = read_late(t);
  reader->fails = true;
  EXPECT_NO_THROW(fill_(t, 2));
  EXPECT_EQ(reader->read, std::vector<float>(4, 1));
  EXPECT_EQ(t.values<float>()[0], 2);
}

TEST(Readers, ThoseThatAreDoneAreForgotten) {
  Tensor t = ones({4});
  for (int i = 0; i < 100; ++i) {
    Ref<LateReader> reader = read_late(t);
    EXPECT_EQ(t.storage()->readers().size(), 1u);
    reader->wait();
  }
}

TEST(Readers, ComeAlongWithMemoryThatIsProvided) {
  Tensor memory = ones({4});
  Ref<LateReader> reader = read_late(memory);
  Ref<Storage> promised(new Storage(4 * sizeof(float), kCPU, Ref<Event>()));
  promised->provide(memory.storage());
  fill_(Tensor(memory.meta(), promised), 2);
  EXPECT_EQ(reader->read, std::vector<float>(4, 1));
}

}  // namespace
}  // namespace tessera
