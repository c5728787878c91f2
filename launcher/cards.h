// Asks the driver which cards a worker would see, and the machine which NUMA node each one is
// attached to.
#pragma once
#include <string>
#include <vector>

namespace tessera::launcher {

/// The NUMA node of each card that the driver shows a program which this process starts, in the
/// driver's order; -1 where the machine does not say. `why` gets the reason where there is no card.
std::vector<int> nodes_of_cards(std::string& why);

}  // namespace tessera::launcher
