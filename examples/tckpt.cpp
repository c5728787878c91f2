// tckpt: looks into files of weights. `inspect` prints what a safetensors file (or a folder of
// shards) claims, `verify` reads all of it and compares the stored hash. Invariant: exit 0 only
// when everything asked for is sound; otherwise one line on stderr says what is not.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <string>

#include "core/base/error.h"
#include "core/base/version.h"
#include "core/io/safetensors.h"

namespace tessera {
namespace {

constexpr int kBad = 1, kNotAvailable = 2;

// Names come from files of any origin: control characters must not reach the terminal.
std::string printable(const std::string& text) {
  std::string quoted = io::quote(text);
  return quoted.substr(1, quoted.size() - 2);
}

std::string grouped(uint64_t n) {
  std::string digits = std::to_string(n);
  for (size_t at = digits.size(); at > 3;) digits.insert(at -= 3, ",");
  return digits;
}

void inspect_file(const io::SafetensorsFile& file) {
  size_t widest = 4;
  for (const io::TensorInfo& t : file.tensors())
    widest = std::max(widest, printable(t.name).size());
  fmt::print("{}\n{:<{}}  {:<5}  {:<18}  {:>15}\n", printable(file.path()), "name", widest, "dtype",
             "shape", "bytes");
  uint64_t elements = 0, bytes = 0;
  for (const io::TensorInfo& t : file.tensors()) {
    fmt::print("{:<{}}  {:<5}  {:<18}  {:>15}\n", printable(t.name), widest,
               io::safetensors_dtype(t.dtype), to_string(t.shape), grouped(t.bytes));
    elements += t.bytes / size_of(t.dtype);
    bytes += t.bytes;
  }
  fmt::print("{} tensors, {} elements, {} bytes of data in a file of {} bytes\n",
             grouped(file.tensors().size()), grouped(elements), grouped(bytes),
             grouped(file.file_bytes()));
  for (const auto& [key, value] : file.metadata())
    fmt::print("metadata {} = {}\n", printable(key), printable(value));
}

void verify_file(const io::SafetensorsFile& file) {
  std::string actual = file.compute_hash();
  auto stored = file.metadata().find(io::kHashKey);
  TESSERA_CHECK(stored == file.metadata().end() || stored->second == actual,
                "verify: {}: the data hash to {}, but {} {} was stored when they were written; the "
                "file is damaged, get "
                "it again",
                io::quote(file.path()), actual, io::kHashKey, io::quote(stored->second));
  fmt::print("{}: sound, {} tensors, {} {} {}\n", printable(file.path()),
             grouped(file.tensors().size()), io::kHashKey, actual,
             stored == file.metadata().end() ? "(none stored to compare with)" : "as stored");
}

int run(int argc, char** argv) {
  CLI::App app{"Looks into files of weights (safetensors, or a folder of its shards)."};
  app.name("tckpt");
  app.set_version_flag("--version", [] { return version_text("tckpt"); });
  app.require_subcommand(1);
  std::string path;
  CLI::App* inspect =
      app.add_subcommand("inspect", "print names, dtypes, shapes, sizes and metadata");
  CLI::App* verify =
      app.add_subcommand("verify", "check structure and data; non-zero exit status on damage");
  for (CLI::App* command : {inspect, verify})
    command->add_option("FILE", path, "safetensors file or folder")->required();
  for (const char* later : {"consolidate", "convert"})
    app.add_subcommand(later, "not available yet")->allow_extras();
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& e) {  // --help, --version
    return app.exit(e);
  } catch (const CLI::RequiredError& e) {
    if (argc > 1 && app.get_subcommands().empty())
      throw UserError(fmt::format("there is no command {}; see tckpt --help", io::quote(argv[1])));
    throw UserError(fmt::format("{}; see tckpt --help", e.what()));
  } catch (const CLI::ParseError& e) {
    throw UserError(fmt::format("{}; see tckpt --help", e.what()));
  }
  if (!inspect->parsed() && !verify->parsed()) {
    fmt::print(stderr, "tckpt: {} is not available yet; there are inspect and verify\n",
               app.get_subcommands().at(0)->get_name());
    return kNotAvailable;
  }
  io::SafetensorsSet set = io::SafetensorsSet::open(path);
  for (const io::SafetensorsFile& file : set.files())
    inspect->parsed() ? inspect_file(file) : verify_file(file);
  TESSERA_CHECK(std::fflush(stdout) == 0, "cannot write to standard output");
  return 0;
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  try {
    return tessera::run(argc, argv);
  } catch (const std::exception& e) {
    std::fflush(stdout);
    std::fprintf(stderr, "tckpt: %s\n", e.what());
    return tessera::kBad;
  }
}
