// Tolerances: f64 results within 1e-11 of the stored value, relative to it or to 1 (functions of
// ours are within a few ulp; sums of a few elements follow), gradients within 1e-9; every other
// dtype exactly.
#include "tests/core/ops/golden.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <fstream>

#include "core/autograd/autograd.h"
#include "core/io/safetensors.h"
#include "core/ops/pointwise.h"
#include "core/ops/reduce.h"
#include "core/ops/views.h"
#include "core/tensor/element.h"

namespace tessera::golden {
namespace {

struct Data {
  io::SafetensorsFile tensors;
  std::vector<std::string> names;
  std::map<std::string, nlohmann::json> cases;
};

const Data& data() {
  static const Data* d = [] {
    const char* source = std::getenv("TESSERA_SOURCE");
    std::string stem = std::string(source ? source : ".") + "/tests/golden/ops";
    auto* read = new Data{io::SafetensorsFile::open(stem + ".safetensors"), {}, {}};
    std::ifstream file(stem + ".json");
    const auto json = nlohmann::json::parse(file);
    for (const auto& entry : json["cases"]) {
      read->names.push_back(entry["name"]);
      read->cases[entry["name"]] = entry;
    }
    return read;
  }();
  return *d;
}

// PyTorch's own kernels hold 1/6 and 1/alpha of these gradients as f32.
double gradient_tolerance(const std::string& name) {
  return name == "hardsigmoid/values" || name == "celu/values" ? 1e-7 : 1e-9;
}

double element(const Tensor& t, int64_t i) {
  return read_real(static_cast<const char*>(t.raw()) + size_t(i) * size_of(t.dtype()), t.dtype());
}

void compare(const std::string& what, const Tensor& got_any_layout, const Tensor& want,
             double tolerance) {
  Tensor got = contiguous(got_any_layout.detach());
  ASSERT_EQ(describe(got), describe(want)) << what;
  bool exact = want.dtype() != kF64;
  int shown = 0;
  for (int64_t i = 0; i < want.numel() && shown < 3; ++i) {
    double a = element(got, i), b = element(want, i);
    bool same = a == b || (std::isnan(a) && std::isnan(b));
    if (!same && !exact && std::isfinite(a) && std::isfinite(b))
      same = std::abs(a - b) <= tolerance * std::max(1.0, std::abs(b));
    if (!same) {
      ADD_FAILURE() << what << " element " << i << ": " << fmt::format("{} instead of {}", a, b);
      ++shown;
    }
  }
}

void check_gradients(const Case& c, const std::vector<Tensor>& out) {
  Tensor total;
  size_t k = 0;
  for (const std::string output : c.entry["outputs"]) {
    std::string name = c.name + "/cotangent/" + output;
    if (data().tensors.contains(name)) {
      Tensor term = sum(out[k] * data().tensors.load(name));
      total = total.defined() ? total + term : term;
    }
    ++k;
  }
  ASSERT_TRUE(total.defined()) << c.name;
  if (total.requires_grad()) backward(total);
  for (const std::string input : c.entry["grads"]) {
    Tensor g = c[input].grad(), want = data().tensors.load(c.name + "/grad/" + input);
    // PyTorch stores zeros for an input that the results do not depend on.
    compare(c.name + " gradient of " + input, g.defined() ? g : want * 0.0, want,
            gradient_tolerance(c.name));
  }
}

}  // namespace

Dims Case::dims(const char* attribute) const {
  Dims d;
  for (int64_t v : entry["attributes"].at(attribute)) d.push_back(v);
  return d;
}

const std::vector<std::string>& case_names() { return data().names; }

void check(const std::string& name, const Call& call) {
  SCOPED_TRACE(name);
  Case c{name, data().cases.at(name), {}};
  for (const std::string input : c.entry["inputs"])
    c.in[input] = data().tensors.load(name + "/in/" + input);
  for (const std::string input : c.entry["grads"]) c.in[input].requires_grad_();
  try {
    std::vector<Tensor> out = call(c);
    ASSERT_EQ(out.size(), c.entry["outputs"].size());
    size_t k = 0;
    for (const std::string output : c.entry["outputs"])
      compare(name + " " + output, out[k++], data().tensors.load(name + "/out/" + output), 1e-11);
    if (!c.entry["grads"].empty()) check_gradients(c, out);
  } catch (const std::exception& e) {
    ADD_FAILURE() << name << ": " << e.what();
  }
}

void check_all(const Table& table) {
  std::map<std::string, int> run;
  for (const std::string& name : case_names()) {
    std::string op = name.substr(0, name.find('/'));
    auto it = table.find(op);
    if (it == table.end()) continue;
    ++run[op];
    check(name, it->second);
  }
  for (auto& [op, call] : table) EXPECT_GT(run[op], 0) << op << " has no case";
}

}  // namespace tessera::golden
