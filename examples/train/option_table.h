// Every option of `train`, once: how the command line gives it, what it says as a text, and what
// rests on it. Help, the checks that all ranks have the same options, what checkpoints keep, and
// what a resumed run is told follow from this one table.
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

/// What rests on an option, which decides who must have it alike.
enum class Role {
  kNumbers,   // which numbers come out: alike on all ranks; kept, and told where a resumed run has
              // another
  kData,      // a path to what is read: alike by contents, so hosts may have copies of their own;
              // kept likewise
  kStart,     // a path to what a run starts with, which a resumed one does not read: alike by
              // contents
  kTogether,  // what ranks do together, which may change from run to run: alike on all ranks
  kGiven,     // a path that rank 0 alone writes to: whether there is one is alike on all ranks
  kOwn,       // nothing that another rank relies on
};

/// Options as the command line has them.
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

/// In the order of --help.
std::span<const OptionRow> option_table();

}  // namespace tessera::train
