// Puts kernel texts together. Comments are left out, which would cost the compiler time.
#include "core/backend/cuda/kernels/text.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>

#include "core/base/error.h"

namespace tessera::cuda {
namespace {

constexpr std::string_view kFunctors = "core/ops/functors/",
                           kKernels = "core/backend/cuda/kernels/", kTensor = "core/tensor/";

struct Family {
  std::string_view name;
  std::string_view functors;      // besides prelude.h and convert.h, in order
  std::string_view helpers = {};  // of this folder, after device.h
};
constexpr std::string_view kAllFunctors =
    "math.h math_trig.h pieces.h activations.h special.h arithmetic.h pointwise.h";
constexpr Family kFamilies[] = {
    {"pointwise", kAllFunctors},
    {"transpose", ""},
    {"reduce", ""},
    {"extreme", ""},
    {"bits_hash", "bits_hash.h"},
    {"rows", "math.h", "held_rows.h"},
    {"norm_grad", "math.h", "held_rows.h"},
    {"losses", "math.h", "held_rows.h"},
    {"indexing", ""},
    {"segments", ""},
    {"sparse", ""},
    {"arange", ""},
    {"random", "math.h math_trig.h", "draws.h"},
    {"dropout", "", "draws.h"},
    {"update", ""},
    {"matmul", ""},
    {"attention", "math.h", "draws.h attention_tiles.h"},
    {"attention_units", "math.h", "draws.h attention_tiles.h"},
    {"attention_mask", ""},
    {"scan", "math.h"},
    {"sort", ""},
    {"pool", ""},
    {"batch_norm", ""},
    {"conv", ""},
};

std::string_view embedded(std::string_view folder, std::string_view name) {
  const std::string path = std::string(folder) + std::string(name);
  for (size_t i = 0; i < kNumKernelTexts; ++i)
    if (kKernelTexts[i].path == path) return kKernelTexts[i].text;
  throw BugError("kernels: no text " + path + " is in this binary");
}

void append_code(std::string& text, std::string_view rest) {
  while (!rest.empty()) {
    std::string_view line = rest.substr(0, rest.find('\n'));
    rest.remove_prefix(std::min(rest.size(), line.size() + 1));
    const size_t first = line.find_first_not_of(' ');
    if (first == line.npos || line.substr(first).starts_with("//")) continue;
    if (line == "#pragma once" || line.starts_with("#include")) continue;
    if (line.starts_with("constexpr ") && line.find(") {") != line.npos)
      text += "TESSERA_FN ";  // a function
    text.append(line);
    text += '\n';
  }
}

// `files` are separated by spaces.
void append_files(std::string& text, std::string_view folder, std::string_view files) {
  while (!files.empty()) {
    const size_t end = std::min(files.find(' '), files.size());
    append_code(text, embedded(folder, files.substr(0, end)));
    files.remove_prefix(std::min(end + 1, files.size()));
  }
}

bool in_word(char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_'; }

// An entry point is written KERNEL(entry, Call, bounds) { .. }: a kernel of that name with one
// parameter `c` and these launch bounds.
std::string with_kernels(std::string_view entries) {
  constexpr std::string_view kKernel = "KERNEL(";
  std::string text = "using namespace tessera::device;\n";
  for (;;) {
    const size_t at = entries.find(kKernel);
    text += entries.substr(0, at);
    if (at == entries.npos) return text;
    entries.remove_prefix(at + kKernel.size());
    const size_t first = entries.find(", "), second = entries.find(", ", first + 2),
                 end = entries.find(')');
    TESSERA_ASSERT(second < end && end < entries.size(), "kernels: a KERNEL without its words");
    text += fmt::format(
        "extern \"C\" __global__ void __launch_bounds__({}) NAME_{}(tessera::cuda::{} c)",
        entries.substr(second + 2, end - second - 2), entries.substr(0, first),
        entries.substr(first + 2, second - first - 2));
    entries.remove_prefix(end + 1);
  }
}

// Replaces whole words by their defines, and NAME_ at the beginning of a word by the instance's.
void append_instance(std::string& text, std::string_view entries, const Instance& of) {
  for (size_t i = 0; i < entries.size();) {
    if (!in_word(entries[i])) {
      text += entries[i++];
      continue;
    }
    size_t end = i;
    while (end < entries.size() && in_word(entries[end])) ++end;
    const std::string_view word = entries.substr(i, end - i);
    const auto* define = std::find_if(of.defines.data(), of.defines.data() + of.defines.size(),
                                      [&](const Define& d) { return d.word == word; });
    if (word.starts_with("NAME_"))
      text += of.name, text += word.substr(4);
    else if (define != of.defines.data() + of.defines.size())
      text += define->value;
    else
      text += word;
    i = end;
  }
}

}  // namespace

std::string name_of(const KernelText& text) {
  return fmt::format("{}.cu: {}", text.family, text.instances.at(0).name);
}

std::string compose(const KernelText& of) {
  const Family* family = std::find_if(std::begin(kFamilies), std::end(kFamilies),
                                      [&](const Family& f) { return f.name == of.family; });
  TESSERA_ASSERT(family != std::end(kFamilies), "kernels: no family {}", of.family);
  // A text holds what any kernel of the family may need; what this one does not is no mistake.
  std::string text = "#pragma nv_diag_suppress 177\n";
  append_code(text, embedded(kFunctors, "prelude.h"));
  append_files(text, kFunctors, "convert.h joins.h threads.h");
  append_files(text, kFunctors, family->functors);
  append_files(text, kKernels, "parameters.h instructions.h device.h");
  if (family->helpers.starts_with("draws.h")) {
    text += "namespace tessera {\nusing uint32_t = unsigned;\nusing uint64_t = unsigned long;\n}\n";
    append_files(text, kTensor, "philox.h");
  }
  append_files(text, kKernels, family->helpers);
  const std::string_view source = embedded(kKernels, std::string(of.family) + ".cu");
  constexpr std::string_view kInstances = "\n// instances";
  const size_t split = source.find(kInstances);
  TESSERA_ASSERT(split != source.npos, "kernels: {}.cu has no instances", of.family);
  append_code(text, source.substr(0, split + 1));
  std::string entries;
  append_code(entries, source.substr(split + 1));
  entries = with_kernels(entries);
  for (const Instance& instance : of.instances) append_instance(text, entries, instance);
  return text;
}

std::string_view element_type(std::string_view dtype) {
  constexpr std::string_view kTypes[][2] = {{"bool", "bool"},
                                            {"u8", "unsigned char"},
                                            {"i32", "int"},
                                            {"i64", "long"},
                                            {"f16", "tessera::fn::F16"},
                                            {"bf16", "tessera::fn::BF16"},
                                            {"f8e4m3", "tessera::fn::F8E4M3"},
                                            {"f8e5m2", "tessera::fn::F8E5M2"},
                                            {"f32", "float"},
                                            {"f64", "double"}};
  for (const auto& [name, type] : kTypes)
    if (name == dtype) return type;
  throw BugError("kernels: no element type for dtype " + std::string(dtype));
}

std::string_view bits_type(int bytes) {
  return bytes == 1 ? "unsigned char" : bytes == 2 ? "unsigned short" : bytes == 4 ? "int" : "long";
}

}  // namespace tessera::cuda
