// Plans that are kept: equal calls share one, calls that differ in anything a plan depends on do
// not, nor do threads; and the state of a plan reaches the run.
#include "core/dispatch/plan_cache.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <new>
#include <thread>

#include "core/base/boundary.h"
#include "core/ops/contract.h"
#include "core/ops/conv.h"
#include "core/ops/create.h"
#include "core/ops/pointwise.h"
#include "core/ops/random.h"
#include "core/ops/views.h"
#include "tests/support/counted_plan.h"

namespace {

thread_local int64_t allocations = 0;  // of the calling thread

void* counted(void* p) {
  ++allocations;
  return p ? p : throw std::bad_alloc();
}

}  // namespace

// All of the heap that C++ asks for in this program.
void* operator new(size_t bytes) { return counted(std::malloc(bytes ? bytes : 1)); }
void* operator new(size_t bytes, std::align_val_t align) {
  const size_t unit = size_t(align);
  return counted(std::aligned_alloc(unit, (bytes + unit - 1) / unit * unit));
}
void operator delete(void* p) noexcept { std::free(p); }
void operator delete(void* p, size_t) noexcept { std::free(p); }
void operator delete(void* p, std::align_val_t) noexcept { std::free(p); }
void operator delete(void* p, size_t, std::align_val_t) noexcept { std::free(p); }

namespace tessera {
namespace {

using test::counted_plan, test::plans_made;

// The number of the plan that computes `prim` of `x`.
int64_t plan_of(const PrimRef& prim, const Tensor& x) {
  Tensor in[] = {x};
  return dispatch1(prim, in).item<int64_t>();
}

class Threads {
 public:
  explicit Threads(int n) : before_(num_threads()) { set_num_threads(n); }
  ~Threads() { set_num_threads(before_); }

 private:
  int before_;
};

TEST(PlanCache, OnePlanForEqualCalls) {
  const PrimRef prim = counted_plan(1);
  const int64_t first = plan_of(prim, ones({2, 3}));
  EXPECT_EQ(first, plans_made);
  EXPECT_EQ(plan_of(prim, zeros({2, 3})), first) << "values are no part of a plan";
  EXPECT_EQ(plan_of(counted_plan(1), ones({2, 3})), first) << "another op of equal attributes";
  EXPECT_EQ(plan_of(prim, slice(ones({4, 3}), 0, 2, 4)), first) << "an offset is none either";
  EXPECT_EQ(plans_made, first);
}

TEST(PlanCache, AnotherPlanWhereTheCallDiffers) {
  const PrimRef prim = counted_plan(2);
  const Tensor x = ones({2, 3});
  const int64_t first = plan_of(prim, x);
  EXPECT_EQ(plan_of(counted_plan(3), x), first + 1) << "attributes";
  EXPECT_EQ(plan_of(prim, ones({3, 2})), first + 2) << "shape";
  EXPECT_EQ(plan_of(prim, transpose(ones({3, 2}), 0, 1)), first + 3) << "strides";
  EXPECT_EQ(plan_of(prim, ones({2, 3}, {kF64})), first + 4) << "dtype";
  {
    Threads more(num_threads() + 1);
    EXPECT_EQ(plan_of(prim, x), first + 5) << "threads";
    EXPECT_EQ(plan_of(prim, x), first + 5);
  }
  {
    DeterministicScope on(!deterministic_algorithms());
    EXPECT_EQ(plan_of(prim, x), first + 6) << "deterministic mode";
    EXPECT_EQ(plan_of(prim, x), first + 6);
  }
  EXPECT_EQ(plan_of(prim, x), first) << "all of them are kept";
  EXPECT_EQ(plan_of(counted_plan(3), x), first + 1);
}

TEST(PlanCache, KernelsThatDoNotAskForItArePlannedEachTime) {
  const PrimRef prim = counted_plan(1, false);
  const size_t kept = PlanCache::of_thread().size();
  const int64_t first = plan_of(prim, ones({2, 3}));
  EXPECT_EQ(plan_of(prim, ones({2, 3})), first + 1) << "and its state reaches the run";
  EXPECT_EQ(PlanCache::of_thread().size(), kept);
}

TEST(PlanCache, AssignmentsRunKeptPlans) {
  const PrimRef prim = counted_plan(4);
  Tensor x[] = {ones({2, 3})};
  const Tensor to = zeros({}, {kI64});
  const int64_t first = plan_of(prim, x[0]);
  assign({&to, 1}, prim, x);
  EXPECT_EQ(to.item<int64_t>(), first);
}

TEST(PlanCache, WhatFailsIsNotKept) {
  const size_t kept = PlanCache::of_thread().size();
  EXPECT_THROW(plan_of(counted_plan(-1), ones({2, 3})), UserError);
  EXPECT_THROW(plan_of(counted_plan(-1), ones({2, 3})), UserError);
  EXPECT_EQ(PlanCache::of_thread().size(), kept);
}

TEST(PlanCache, LimitsOfPlanningAreMetWhereATestCounts) {
  const PrimRef prim = counted_plan(5);
  const int64_t first = plan_of(prim, ones({2, 3}));
  {
    CountBoundaries counting;
    EXPECT_EQ(plan_of(prim, ones({2, 3})), first + 1);
  }
  EXPECT_EQ(plan_of(prim, ones({2, 3})), first);
}

TEST(PlanCache, StartsOverWhenItIsFull) {
  const PrimRef prim = counted_plan(6);
  const Kernel& kernel = *prim->own_kernel(DeviceKind::kCPU);
  PlanCache cache;
  for (size_t n = 0; n < PlanCache::kCapacity + 10; ++n) {
    const Tensor x = empty({int64_t(n)});
    (void)cache.plan(prim, kernel, {&x, 1});
    EXPECT_LE(cache.size(), PlanCache::kCapacity);
  }
  EXPECT_EQ(cache.size(), 10u);
}

TEST(PlanCache, FindsWithoutTheHeap) {
  const PrimRef prim = counted_plan(7);
  const Kernel& kernel = *prim->own_kernel(DeviceKind::kCPU);
  const Tensor x = ones({2, 3});
  PlanCache cache;
  const KernelCall first = cache.plan(prim, kernel, {&x, 1});
  EXPECT_GT(allocations, 0) << "they are counted";
  const PrimRef equal = counted_plan(7);
  for (const PrimRef& p : {prim, equal}) {
    const int64_t before = allocations;
    const KernelCall again = cache.plan(p, kernel, {&x, 1});
    EXPECT_EQ(allocations, before);
    EXPECT_EQ(again.plan.state, first.plan.state);
  }
}

// What ops compute that keep the plans of libraries and of kernels of ours.
std::vector<Tensor> products_and_convolutions(const std::vector<Tensor>& in) {
  return {contract("ij,jk->ik", in[0], in[1]),
          contract("ji,jk->ik", in[0], in[0]),
          contract("ij,kj->ik", cast(in[0], kBF16), cast(in[2], kBF16)),
          contract("bij,bkj->ikb", in[3], in[3]),
          conv2d(in[4], in[5]),
          conv2d(cast(in[4], kF16), cast(in[5], kF16))};
}

std::vector<Tensor> operands() {
  return {randn({16, 12}),  randn({12, 20}),     randn({20, 12}),
          randn({3, 8, 6}), randn({2, 3, 9, 7}), randn({5, 3, 3, 3})};
}

bool equal_bits(const Tensor& a, const Tensor& b) {
  const Tensor x = a.contiguous(), y = b.contiguous();
  return std::memcmp(x.raw_values(), y.raw_values(), x.nbytes()) == 0;
}

TEST(PlanCache, ProductsAndConvolutionsArePlannedOnce) {
  const std::vector<Tensor> in = operands();
  std::thread([&] {  // which has kept nothing yet
    const std::vector<Tensor> first = products_and_convolutions(in);
    EXPECT_EQ(PlanCache::of_thread().size(), first.size());
    const std::vector<Tensor> second = products_and_convolutions(in);
    EXPECT_EQ(PlanCache::of_thread().size(), first.size());
    for (size_t i = 0; i < first.size(); ++i)
      EXPECT_TRUE(equal_bits(first[i], second[i])) << "case " << i;
  })
      .join();
}

TEST(PlanCache, ThreadsShareNoState) {
  Threads one(1);
  const std::vector<Tensor> in = operands(), want = products_and_convolutions(in);
  const PrimRef prim = counted_plan(8);
  constexpr int kThreads = 3;
  Ref<const RefCounted> states[kThreads];
  int64_t differing[kThreads] = {};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t)
    threads.emplace_back([&, t] {
      set_num_threads(1);
      const Kernel& kernel = *prim->own_kernel(DeviceKind::kCPU);
      states[t] = PlanCache::of_thread().plan(prim, kernel, {&in[0], 1}).plan.state;
      for (int repeat = 0; repeat < 20; ++repeat) {
        const std::vector<Tensor> got = products_and_convolutions(in);
        for (size_t i = 0; i < got.size(); ++i) differing[t] += !equal_bits(got[i], want[i]);
      }
    });
  for (std::thread& t : threads) t.join();
  for (int t = 0; t < kThreads; ++t) {
    EXPECT_EQ(differing[t], 0);
    for (int other = 0; other < t; ++other) EXPECT_FALSE(states[t] == states[other]);
  }
}

}  // namespace
}  // namespace tessera
