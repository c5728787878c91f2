// When a kernel reads operands and writes results, and what follows from it: which result may lie
// over which operand, and which value may wait in the row of which result. Whoever decides about
// memory asks here, and the text of kernels keeps to this order. For each row:
//   1. elements are picked,
//   2. nests follow each other, each with the whole row before the next,
//   3. numbers of the row are stored;
// and when all rows are done, sums over rows are stored with what follows from them. A nest reads
// all of an element before it writes anything there. Beside each other nests are on rows of their
// own, each row in this order; but where a softmax comes in pieces, the first nest begins with a
// row before its elements are picked. Rows are in no order: threads share them.
#pragma once
#include "compile/codegen/schedule.h"

namespace tessera::compiler {

class AccessOrder {
 public:
  explicit AccessOrder(const Schedule& s) : s_(s) {}

  /// Whether result `result` may be in the memory of operand `operand`. Only where both have the
  /// dtype and the address of each element in common (anything else, partial overlaps among it,
  /// would be written in one row and read in another), and nothing is read after it is written.
  bool may_overwrite(int operand, int result) const;
  /// Whether value `id`, which several nests need, may wait in the row of result `result`: it is
  /// kept there as it is, alone, and stored over when nobody reads it any more.
  bool may_wait_in(InstrId id, int result) const;

  /// The first nest that computes `id`, and the last that reads it from where it waits; -1: none.
  int computed_in(InstrId id) const;
  int last_reread_in(InstrId id) const;

 private:
  int moment_of_nest(int nest) const;
  int moment_of_picks() const { return s_.pieces.size > 0 ? 1 : 0; }
  int moment_of_row_end() const { return moment_of_nest(int(s_.nests.size())); }
  int moment_of_the_end() const { return moment_of_row_end() + 1; }
  int stored_in(int result) const;
  bool loads(InstrId id, int operand) const;
  bool read_at_the_end(int operand) const;
  int last_read(int operand) const;

  // The moment from which on memory of a result is written, and whether elements are come back to.
  struct Write {
    int moment = 0;
    bool again = false;
  };
  Write first_write(int result) const;

  const Schedule& s_;
};

}  // namespace tessera::compiler
