// The table of all options of `train`: how the command line sets each, its value as text, and its
// role. --help, the check that all ranks have the same options, what checkpoints store, and what a
// resumed run is told all follow from this table.
#pragma once
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "examples/train/options.h"

namespace CLI {
class App;
}

namespace tessera::train {

/// The role of an option, which decides on which ranks it must be equal.
enum class Role {
  // It affects the numbers of a run: equal on all ranks, and saved, so that a resumed run is told
  // where it has another.
  kNumbers,
  // A path to what is read: its contents are equal on all ranks, so hosts may have copies of their
  // own. It is saved in the same way.
  kData,
  // A path to what a run starts with and a resumed one does not read: contents equal on all ranks.
  kStart,
  // What ranks do together, which may change from run to run: equal on all ranks.
  kTogether,
  // A path that only rank 0 writes to: whether it is given is equal on all ranks.
  kGiven,
  // No other rank depends on it.
  kOwn,
};

/// The options as the command line sets them.
struct RawOptions : Options {
  std::string betas = "0.9,0.99";
  std::vector<std::string> set_texts;
};

struct OptionRow {
  const char* flag;  // without --
  Role role;
  std::function<void(CLI::App&, RawOptions&)> declare;
  std::function<std::string(const Options&)> text;  // of the value

  bool kept() const { return role == Role::kNumbers || role == Role::kData; }
};

/// The options in the order of --help.
std::span<const OptionRow> option_table();

}  // namespace tessera::train
