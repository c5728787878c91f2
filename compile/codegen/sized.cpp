#include "compile/codegen/sized.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <optional>

#include "compile/codegen/cache.h"
#include "compile/codegen/schedule.h"
#include "compile/codegen/toolchain.h"
#include "core/base/error.h"
#include "core/io/hash.h"

namespace tessera::compiler {
namespace {

constexpr std::string_view kName = "KERNEL";  // of every kernel until it is compiled
constexpr size_t kKernelsPerFile = 4;         // fewer are not worth a compiler process

SizedText text_of(const Fused& f) { return print_sized(f.body, kName); }

std::string replaced(std::string text, std::string_view old, const std::string& now) {
  for (size_t at = text.find(old); at != text.npos; at = text.find(old, at + now.size()))
    text.replace(at, old.size(), now);
  return text;
}

struct Loaded final : LoadedKernel {
  Ref<LoadedObject> object;
  std::vector<int64_t> numbers;
};

}  // namespace

const SizedKernels::Variant* SizedKernels::find(const SizedText& text) const {
  for (const Variant& v : variants_) {
    if (v.text != text.text) continue;
    bool fits = true;
    for (size_t i = 0; i < text.numbers.size() && fits; ++i) {
      const SizedText::Number& number = text.numbers[i];
      fits = v.capacity[i] >= 0 ? number.word <= v.capacity[i]
                                : v.fixed[i].empty() || v.fixed[i] == number.digits;
    }
    if (fits) return &v;
  }
  return nullptr;
}

bool SizedKernels::have(std::span<const Fused* const> kernels) const {
  return std::ranges::all_of(kernels, [&](const Fused* f) { return find(text_of(*f)) != nullptr; });
}

std::vector<Ref<const LoadedKernel>> SizedKernels::code_of(std::span<const Fused* const> kernels,
                                                           std::span<const Sizes> sizes,
                                                           const GenerateOptions& options) {
  std::vector<SizedText> texts;
  std::vector<Sizes> missing;
  for (size_t k = 0; k < kernels.size(); ++k) {
    texts.push_back(text_of(*kernels[k]));
    if (find(texts.back())) continue;
    missing.push_back({kernels[k]});
    if (k < sizes.size())
      missing.back().insert(missing.back().end(), sizes[k].begin(), sizes[k].end());
  }
  if (!missing.empty()) compile(missing, options);
  std::vector<Ref<const LoadedKernel>> result;
  for (size_t k = 0; k < kernels.size(); ++k) {
    const Variant* v = find(texts[k]);
    TESSERA_ASSERT(v, "sized: {} has no code", kernels[k]->name);
    const auto& made = static_cast<const Loaded&>(*v->code);
    auto kernel = make_ref<Loaded>();
    kernel->object = made.object, kernel->code = made.code;
    for (size_t i = 0; i < texts[k].numbers.size(); ++i)
      if (v->fixed[i].empty() && v->capacity[i] < 0)
        kernel->numbers.push_back(texts[k].numbers[i].word);
    Schedule schedule = *make_schedule(kernels[k]->body);
    set_sizes(kernel->code, schedule);
    kernel->code.numbers = kernel->numbers.data();
    result.push_back(kernel);
  }
  return result;
}

namespace {

// Returns the text with names of run-time values in place of the numbers that vary. Both functions
// of a kernel load all of these first. `address`: the index in p that holds the numbers.
std::string source_of(const SizedText& text, const std::vector<std::string>& fixed,
                      const std::vector<int64_t>& capacity, size_t address) {
  std::vector<std::string> names;
  std::string table;
  size_t entry = 0;
  for (size_t i = 0; i < text.numbers.size(); ++i) {
    if (capacity[i] >= 0 || !fixed[i].empty()) {
      names.push_back(capacity[i] >= 0 ? std::to_string(capacity[i]) : fixed[i]);
      continue;
    }
    const auto kind = text.numbers[i].kind;
    const bool integer = kind == SizedText::Number::kInteger;
    const char* type = integer ? "long" : kind == SizedText::Number::kFloat ? "float" : "double";
    table += fmt::format("  const {} n{} = {}(reinterpret_cast<const {}*>(p[{}])[{}]);\n", type,
                         entry, type, integer ? "long" : "double", address, entry);
    names.push_back(fmt::format("n{}", entry++));
  }
  std::string source;
  auto name = names.begin();
  for (char c : text.text) {
    if (c == SizedText::kNumber)
      source += *name++;
    else if (c == SizedText::kTable)
      source += table;
    else
      source += c;
  }
  return source;
}

}  // namespace

// Kernels of one body at several sizes share code where their texts differ in numbers alone.
void SizedKernels::compile(std::span<const Sizes> sizes, const GenerateOptions& options) {
  struct Made {
    Variant variant;
    std::string source, symbol;
    bool has_finish;
  };
  std::vector<Made> made;
  for (const Sizes& of : sizes) {
    std::vector<std::pair<SizedText, const Fused*>> texts;
    for (const Fused* f : of)
      if (make_schedule(f->body)) texts.emplace_back(text_of(*f), f);
    for (size_t i = 0; i < texts.size(); ++i) {
      const SizedText& first = texts[i].first;
      bool done = false;
      for (size_t j = 0; j < i && !done; ++j) done = texts[j].first.text == first.text;
      if (done) continue;
      Variant v{.text = first.text, .fixed = {}, .capacity = {}, .code = {}};
      for (const auto& n : first.numbers) v.fixed.push_back(n.digits), v.capacity.push_back(-1);
      for (auto& [text, f] : texts) {
        if (text.text != first.text) continue;
        for (size_t n = 0; n < text.numbers.size(); ++n) {
          if (text.numbers[n].digits == first.numbers[n].digits && v.fixed[n] != "") continue;
          v.fixed[n].clear();
          if (!text.numbers[n].capacity) continue;
          auto larger = [](int64_t x) { return int64_t(std::bit_ceil(uint64_t(2 * x))); };
          v.capacity[n] = std::max(
              {v.capacity[n], larger(text.numbers[n].word), larger(first.numbers[n].word)});
        }
      }
      bool there = std::ranges::any_of(made, [&](const Made& m) {
        return m.variant.text == v.text && m.variant.fixed == v.fixed &&
               m.variant.capacity == v.capacity;
      });
      if (there) continue;
      const Fused* f = texts[i].second;
      size_t address = f->body.operands.size() + f->body.stores.size();
      std::string source = source_of(first, v.fixed, v.capacity, address);
      std::string symbol = fmt::format("sized{}", made.size());
      bool finish = source.find(std::string(kName) + "_finish(") != source.npos;
      made.push_back({std::move(v), replaced(std::move(source), kName, symbol), symbol, finish});
    }
  }
  Toolchain toolchain = find_toolchain(options.compiler);
  size_t files = std::clamp<size_t>(made.size() / kKernelsPerFile, 1, size_t(available_cores()));
  std::vector<std::string> sources(files, prologue_cpp());
  io::Xxh128 hash;
  auto add = [&](const std::string& text) { hash.update(text.data(), text.size() + 1); };
  add(toolchain.description), add(sources[0]);
  for (size_t k = 0; k < made.size(); ++k)
    add(made[k].source), sources[k % files] += made[k].source;
  bool compiled = false;
  Ref<LoadedObject> object = Cache(options.cache_dir)
                                 .find_or_make(
                                     io::to_string(hash.digest()),
                                     [&](const std::string& work, const std::string& path) {
                                       compile_shared(toolchain, sources, work, path);
                                     },
                                     &compiled);
  ++compilations_;
  for (Made& m : made) {
    auto kernel = make_ref<Loaded>();
    kernel->object = object;
    kernel->code.run = reinterpret_cast<KernelCode::Run>(object->symbol(m.symbol + "_run"));
    if (m.has_finish)
      kernel->code.finish =
          reinterpret_cast<KernelCode::Finish>(object->symbol(m.symbol + "_finish"));
    m.variant.code = kernel;
    variants_.push_back(std::move(m.variant));
  }
}

}  // namespace tessera::compiler
