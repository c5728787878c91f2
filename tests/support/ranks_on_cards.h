// For tests of ranks that each have a card of their own, real or virtual.
#pragma once
#include "collectives/loopback/run_ranks.h"
#include "core/dispatch/default_device.h"
#include "tests/support/on_card.h"

namespace tessera::test {

/// The tests of a fixture need two cards, and are skipped where there are fewer.
class RanksWithCards : public OnCard {
 protected:
  void SetUp() override {
    OnCard::SetUp();
    if (!IsSkipped() && cards() < 2) GTEST_SKIP() << "2 cards are needed";
  }
  /// run_ranks, where the card of each rank is its default device.
  void run_on_cards(int ranks, FunctionRef<void(ProcessGroup&)> body,
                    const RunOptions& options = {}) const {
    run_ranks(
        ranks,
        [&](ProcessGroup& group) {
          const DeviceScope scope(card(group.rank()));
          body(group);
        },
        options);
  }
};

}  // namespace tessera::test
