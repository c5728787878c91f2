#include "compile/codegen/sized.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cctype>
#include <charconv>
#include <optional>

#include "compile/codegen/cache.h"
#include "compile/codegen/schedule.h"
#include "compile/codegen/toolchain.h"
#include "core/base/error.h"
#include "core/io/hash.h"

namespace tessera::compiler {
namespace {

constexpr std::string_view kName = "KERNEL";  // of every kernel until it is compiled
constexpr size_t kKernelsPerFile = 4;         // that are worth a compiler of their own

bool is_word(char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_'; }
bool is_digit(char c) { return std::isdigit(static_cast<unsigned char>(c)); }

std::string text_of(const Fused& f) { return print_cpp(f.body, kName); }

std::string replaced(std::string text, std::string_view old, const std::string& now) {
  for (size_t at = text.find(old); at != text.npos; at = text.find(old, at + now.size()))
    text.replace(at, old.size(), now);
  return text;
}

// What a number is as a run-time value.
enum class Kind : uint8_t { kInteger, kFloat, kDouble };
Kind kind_of(const std::string& digits) {
  if (digits.back() == 'f') return Kind::kFloat;
  return digits.find_first_of(".e") == digits.npos ? Kind::kInteger : Kind::kDouble;
}
int64_t word_of(const std::string& digits) {
  if (kind_of(digits) != Kind::kInteger) return std::bit_cast<int64_t>(std::stod(digits));
  int64_t v = 0;
  std::from_chars(digits.data(), digits.data() + digits.size(), v);
  return v;
}

struct Loaded final : LoadedKernel {
  Ref<LoadedObject> object;
  std::vector<int64_t> numbers;
  bool has_finish = false;
};

}  // namespace

NumberedText split_numbers(const std::string& text) {
  NumberedText result;
  bool array = false;  // in a line that declares an array
  for (size_t i = 0; i < text.size();) {
    if (text[i] == '\n') array = false;
    if (text.compare(i, 8, "alignas(") == 0) array = true;
    if (!is_digit(text[i]) || (i > 0 && (is_word(text[i - 1]) || text[i - 1] == '.'))) {
      result.rest += text[i++];
      continue;
    }
    size_t end = i;
    while (end < text.size() && (is_word(text[end]) || text[end] == '.' ||
                                 ((text[end] == '-' || text[end] == '+') && text[end - 1] == 'e')))
      ++end;
    std::string digits = text.substr(i, end - i);
    bool plain = digits.find_first_not_of("0123456789.eLf+-") == digits.npos;
    if (!plain || (end < text.size() && text[end] == '>')) {
      result.rest += digits;  // a template's, or no number that a table could hold
    } else {
      result.rest += '\1';
      result.numbers.push_back({digits, array && i > 0 && text[i - 1] == '['});
    }
    i = end;
  }
  return result;
}

const SizedKernels::Variant* SizedKernels::find(const NumberedText& text) const {
  for (const Variant& v : variants_) {
    if (v.rest != text.rest) continue;
    bool fits = true;
    for (size_t i = 0; i < text.numbers.size() && fits; ++i) {
      const std::string& digits = text.numbers[i].digits;
      fits = v.capacity[i] >= 0 ? word_of(digits) <= v.capacity[i]
                                : v.fixed[i].empty() || v.fixed[i] == digits;
    }
    if (fits) return &v;
  }
  return nullptr;
}

bool SizedKernels::have(std::span<const Fused* const> kernels) const {
  return std::ranges::all_of(
      kernels, [&](const Fused* f) { return find(split_numbers(text_of(*f))) != nullptr; });
}

std::vector<Ref<const LoadedKernel>> SizedKernels::code_of(std::span<const Fused* const> kernels,
                                                           std::span<const Sizes> sizes,
                                                           const GenerateOptions& options) {
  std::vector<NumberedText> texts;
  std::vector<Sizes> missing;
  for (size_t k = 0; k < kernels.size(); ++k) {
    texts.push_back(split_numbers(text_of(*kernels[k])));
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
        kernel->numbers.push_back(word_of(texts[k].numbers[i].digits));
    Schedule schedule = *make_schedule(kernels[k]->body);
    set_sizes(kernel->code, schedule);
    kernel->code.numbers = kernel->numbers.data();
    result.push_back(kernel);
  }
  return result;
}

namespace {

// The text with names in the place of numbers that vary, which are read at its beginning.
// `address`: of p that holds the numbers.
std::string sized_text(const NumberedText& text, const std::vector<std::string>& fixed,
                       const std::vector<int64_t>& capacity, size_t address) {
  std::string body, table;
  size_t number = 0, entry = 0;
  for (char c : text.rest) {
    if (c != '\1') {
      body += c;
      continue;
    }
    const std::string& digits = text.numbers[number].digits;
    if (capacity[number] >= 0) {
      body += std::to_string(capacity[number]);
    } else if (!fixed[number].empty()) {
      body += fixed[number];
    } else {
      const char* type = kind_of(digits) == Kind::kInteger ? "long"
                         : kind_of(digits) == Kind::kFloat ? "float"
                                                           : "double";
      table +=
          fmt::format("  const {} n{} = {}(reinterpret_cast<const {}*>(p[{}])[{}]);\n", type, entry,
                      type, kind_of(digits) == Kind::kInteger ? "long" : "double", address, entry);
      body += fmt::format("n{}", entry++);
    }
    ++number;
  }
  // Both functions of a kernel read the whole table.
  std::string result;
  for (size_t at = 0; at < body.size();) {
    size_t head = body.find("extern \"C\" void", at);
    if (head == body.npos) {
      result += body.substr(at);
      break;
    }
    size_t brace = body.find("{\n", head) + 2;
    result += body.substr(at, brace - at) + table;
    at = brace;
  }
  return result;
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
    std::vector<std::pair<NumberedText, const Fused*>> texts;
    for (const Fused* f : of)
      if (make_schedule(f->body)) texts.emplace_back(split_numbers(text_of(*f)), f);
    for (size_t i = 0; i < texts.size(); ++i) {
      const NumberedText& first = texts[i].first;
      bool done = false;
      for (size_t j = 0; j < i && !done; ++j) done = texts[j].first.rest == first.rest;
      if (done) continue;
      Variant v{.rest = first.rest, .fixed = {}, .capacity = {}, .code = {}};
      for (const auto& n : first.numbers) v.fixed.push_back(n.digits), v.capacity.push_back(-1);
      for (auto& [text, f] : texts) {
        if (text.rest != first.rest) continue;
        for (size_t n = 0; n < text.numbers.size(); ++n) {
          if (text.numbers[n].digits == first.numbers[n].digits && v.fixed[n] != "") continue;
          v.fixed[n].clear();
          if (!text.numbers[n].capacity) continue;
          auto larger = [](int64_t x) { return int64_t(std::bit_ceil(uint64_t(2 * x))); };
          v.capacity[n] = std::max({v.capacity[n], larger(word_of(text.numbers[n].digits)),
                                    larger(word_of(first.numbers[n].digits))});
        }
      }
      bool there = std::ranges::any_of(made, [&](const Made& m) {
        return m.variant.rest == v.rest && m.variant.fixed == v.fixed &&
               m.variant.capacity == v.capacity;
      });
      if (there) continue;
      const Fused* f = texts[i].second;
      size_t address = f->body.operands.size() + f->body.stores.size();
      std::string source = sized_text(first, v.fixed, v.capacity, address);
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
