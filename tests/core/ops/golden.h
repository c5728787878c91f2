// Golden cases: PyTorch's results and gradients of single operations, compared with ours. A family
// of cases is a table from the name of an operation to the call of ours that answers it; the
// harness reads the case, runs the call, checks dtype, shape and values of each result, and the
// gradients.
#pragma once
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "core/tensor/tensor.h"

namespace tessera::golden {

/// One stored case, as a call sees it.
struct Case {
  std::string name;  // "op/variant"
  nlohmann::json entry;
  std::map<std::string, Tensor> in;

  std::string op() const { return name.substr(0, name.find('/')); }
  std::string variant() const { return name.substr(name.find('/') + 1); }
  const Tensor& operator[](const std::string& input) const { return in.at(input); }
  bool has(const std::string& input) const { return in.contains(input); }
  int64_t integer(const char* attribute) const { return entry["attributes"].at(attribute); }
  double real(const char* attribute) const { return entry["attributes"].at(attribute); }
  bool flag(const char* attribute) const { return entry["attributes"].at(attribute); }
  std::string text(const char* attribute) const { return entry["attributes"].at(attribute); }
  Dims dims(const char* attribute) const;
};

using Call = std::function<std::vector<Tensor>(const Case&)>;
using Table = std::map<std::string, Call>;

/// Names of all cases, in the file's order.
const std::vector<std::string>& case_names();
/// Runs `call` on the case and records a failure of the test for everything that differs.
void check(const std::string& name, const Call& call);
/// check() of every case whose operation is in `table`; fails for entries without a case.
void check_all(const Table& table);

/// The tables, by file.
const Table& elementwise_table();
const Table& tensor_table();
const Table& fused_table();
const Table& conv_table();
const Table& linalg_table();
const Table& sparse_table();

}  // namespace tessera::golden
