// The order in which a kernel reads operands and writes results. It decides which result may lie
// over which operand, and which value may be kept in the row of which result. Decisions about
// memory ask this class, and the printed kernels keep to this order. For each row:
//   1. elements are picked,
//   2. nests follow each other, each with the whole row before the next,
//   3. values of the row are stored;
// and when all rows are done, sums over rows are stored with what follows from them. A nest reads
// all of an element before it writes anything there. Nests that run beside each other are on rows
// of their own, each row in this order; but where a softmax works in pieces, the first nest begins
// with a row before its elements are picked. Rows are in no order: threads share them.
#pragma once
#include "compile/codegen/schedule.h"

namespace tessera::compiler {

class AccessOrder {
 public:
  explicit AccessOrder(const Schedule& s) : s_(s) {}

  /// Whether result `result` may be in the memory of operand `operand`. It may if both have the
  /// dtype and the address of each element in common and the operand is not read after the result
  /// is written. (With any other overlap, an element would be written in one row and read in
  /// another.)
  bool may_overwrite(int operand, int result) const;
  /// Whether value `id`, which several nests need, may be kept in the row of result `result`:
  /// nothing else is stored there until the last nest has read the value.
  bool may_wait_in(InstrId id, int result) const;

  /// The first nest that computes `id`, and the last nest that reads it from where it is kept; -1:
  /// none.
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

  // `moment`: from when on the result's memory is written. `again`: elements are written more than
  // once.
  struct Write {
    int moment = 0;
    bool again = false;
  };
  Write first_write(int result) const;

  const Schedule& s_;
};

}  // namespace tessera::compiler
