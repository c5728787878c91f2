#include "compile/codegen/generate.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <map>

#include "compile/codegen/cache.h"
#include "compile/codegen/schedule.h"
#include "compile/codegen/toolchain.h"
#include "core/base/env.h"
#include "core/base/error.h"
#include "core/io/hash.h"

namespace tessera::compiler {
namespace {

constexpr size_t kKernelsPerFile = 4;  // fewer are not worth a compiler process
constexpr int64_t kGrain = 1 << 15;    // elements that are worth a thread

struct Distinct {
  const Fused* fused;
  std::string symbol;
  Schedule schedule;
};

struct Loaded final : LoadedKernel {
  Ref<LoadedObject> object;
};

std::string symbol_of(const std::string& name, size_t number) {
  std::string symbol = fmt::format("k{}_", number);
  for (char c : name.substr(0, 80)) symbol += std::isalnum(static_cast<unsigned char>(c)) ? c : '_';
  return symbol;
}

KernelCode code_of(const Distinct& d, const LoadedObject& object) {
  KernelCode code;
  code.run = reinterpret_cast<KernelCode::Run>(object.symbol(d.symbol + "_run"));
  set_sizes(code, d.schedule);
  if (code.scratch_bytes > 0)
    code.finish = reinterpret_cast<KernelCode::Finish>(object.symbol(d.symbol + "_finish"));
  return code;
}

// Distributes the kernels over `files` sources of about equal length.
std::vector<std::string> sources_of(const std::vector<Distinct>& kernels, size_t files) {
  std::vector<std::string> sources(files, prologue_cpp());
  for (const Distinct& d : kernels) {
    auto shortest = std::min_element(sources.begin(), sources.end(),
                                     [](auto& a, auto& b) { return a.size() < b.size(); });
    *shortest += fmt::format("// {}\n", d.fused->name) + print_cpp(d.fused->body, d.symbol);
  }
  return sources;
}

std::string key_of(const Toolchain& toolchain, const std::vector<Distinct>& kernels) {
  io::Xxh128 hash;
  auto add = [&](const std::string& text) { hash.update(text.data(), text.size() + 1); };
  add(toolchain.description);
  for (const std::string& source : sources_of(kernels, 1)) add(source);
  return io::to_string(hash.digest());
}

}  // namespace

void dump_source(std::string folder, const std::string& name, const std::string& source) {
  if (folder.empty()) folder = env::get("TESSERA_COMPILE_DUMP");
  if (folder.empty()) return;
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  std::ofstream file(folder + "/kernels-" + name);
  file << source;
  TESSERA_CHECK(file.flush(), "codegen: cannot write to {}; correct TESSERA_COMPILE_DUMP", folder);
}

void set_sizes(KernelCode& code, const Schedule& schedule) {
  code.scratch_bytes = size_t(scratch_bytes(schedule));
  code.chunks = schedule.chunks();
  int64_t chunk = schedule.count(~LoopMask(0)) / code.chunks;
  code.parallel_grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, chunk));
}

std::vector<Ref<const LoadedKernel>> generate(std::span<const Fused* const> kernels,
                                              const GenerateOptions& options,
                                              GenerateReport* report) {
  auto begin = std::chrono::steady_clock::now();
  std::vector<Ref<const LoadedKernel>> result;
  std::vector<Distinct> distinct;
  std::map<std::string, size_t> by_text;
  std::vector<size_t> number;
  for (const Fused* f : kernels) {
    auto [at, fresh] = by_text.emplace(to_string(f->body), distinct.size());
    number.push_back(at->second);
    if (!fresh) continue;
    std::optional<Schedule> schedule = make_schedule(f->body);
    TESSERA_ASSERT(schedule, "generate: {} cannot be scheduled:\n{}", f->name, to_string(f->body));
    distinct.push_back({f, symbol_of(f->name, distinct.size()), std::move(*schedule)});
  }
  if (distinct.empty()) return result;
  Toolchain toolchain = find_toolchain(options.compiler);
  std::string key = key_of(toolchain, distinct);
  dump_source(options.dump_dir, key.substr(0, 8) + ".cpp", sources_of(distinct, 1)[0]);
  bool made = false;
  size_t files =
      std::clamp<size_t>(distinct.size() / kKernelsPerFile, 1, size_t(available_cores()));
  Ref<LoadedObject> object =
      Cache(options.cache_dir)
          .find_or_make(
              key,
              [&](const std::string& work, const std::string& path) {
                compile_shared(toolchain, sources_of(distinct, files), work, path);
              },
              &made);
  std::vector<Ref<const LoadedKernel>> loaded;
  for (const Distinct& d : distinct) {
    auto kernel = make_ref<Loaded>();
    kernel->object = object, kernel->code = code_of(d, *object);
    loaded.push_back(kernel);
  }
  for (size_t k : number) result.push_back(loaded[k]);
  if (report) {
    std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    *report = {int(distinct.size()), made ? int(distinct.size()) : 0, !made, took.count()};
  }
  return result;
}

}  // namespace tessera::compiler
