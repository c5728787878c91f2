// Numbers of the host that steps of a device read: copies of them in its memory, which are renewed
// where a value changed since the last run.
// Internal: not part of the public interface.
#pragma once
#include <vector>

#include "compile/run/program.h"

namespace tessera::compiler {

class HostNumbers {
 public:
  /// Allocates the blocks of `program` and binds its memories of kind kNumber.
  void take_memory(Program& program);
  void release_memory() { blocks_.clear(), last_.clear(); }
  /// The next run makes all copies: program.copies has changed.
  void forget_values() { last_.assign(last_.size(), {}); }
  /// Makes the copies number `k` of the program. Runs come one after the other, also where they are
  /// on different streams (Executor), so that nothing waits for a block.
  void copy(const Program& program, size_t k);

 private:
  std::vector<Ref<Storage>> blocks_;     // as in the program
  std::vector<std::vector<char>> last_;  // by copies: the bytes that were copied last
};

}  // namespace tessera::compiler
