// For tests above the backends: the first card there is, real or virtual.
#pragma once
#include <gtest/gtest.h>

#include <optional>

#include "core/tensor/device_runtime.h"

namespace tessera::test {

/// The tests of a fixture need a card, and are skipped where there is none.
class OnCard : public testing::Test {
 protected:
  void SetUp() override {
    const std::optional<DeviceKind> kind = find_device_kind("cuda");
    if (!kind) GTEST_SKIP() << "this build knows no cards";
    if (runtime_of(*kind).count() == 0) GTEST_SKIP() << runtime_of(*kind).why_none();
    card_ = {*kind, 0};
  }
  int cards() const { return runtime_of(card_).count(); }
  /// The card of a rank.
  Device card(int rank) const { return {card_.kind, int8_t(rank)}; }
  Device card_;
};

}  // namespace tessera::test
