// Compares tensors bit by bit, and has the small training step that several tests trace.
#pragma once
#include <gtest/gtest.h>

#include <cstring>
#include <span>

#include "core/autograd/autograd.h"
#include "core/ops/views.h"

namespace tessera::test {

inline void expect_same_bits(const Tensor& a, const Tensor& b, const std::string& what) {
  ASSERT_EQ(a.defined(), b.defined()) << what;
  if (!a.defined()) return;
  NoGrad off;
  ASSERT_EQ(describe(a), describe(b)) << what;
  Tensor x = contiguous(a.detach()).cpu(), y = contiguous(b.detach()).cpu();
  EXPECT_EQ(x.nbytes() ? std::memcmp(x.raw(), y.raw(), x.nbytes()) : 0, 0) << what << "\n"
                                                                           << to_string(a) << "\n"
                                                                           << to_string(b);
}

inline void expect_same_bits(std::span<const Tensor> a, std::span<const Tensor> b,
                             const std::string& what) {
  ASSERT_EQ(a.size(), b.size()) << what;
  for (size_t i = 0; i < a.size(); ++i)
    expect_same_bits(a[i], b[i], what + ", tensor " + std::to_string(i));
}

}  // namespace tessera::test
