// tckpt: inspects checkpoints and files of weights. `inspect` prints what they claim, `verify`
// reads everything and compares hashes, `consolidate` and `convert` change the layout. Invariant:
// the exit status is 0 only when everything asked for is sound; otherwise lines on stderr say what
// is not, and the status is 1, or 2 where `verify` read everything but found no hash to compare
// with.
#include <fmt/core.h>

#include <cstdio>
#include <filesystem>
#include <string>

#include "core/base/error.h"
#include "core/base/output.h"
#include "core/base/spelling.h"
#include "core/base/version.h"
#include "core/io/safetensors.h"
#include "launcher/command_line.h"
#include "parallel/checkpoint/convert.h"
#include "parallel/checkpoint/folder.h"
#include "parallel/checkpoint/verify.h"

namespace tessera {
namespace {

constexpr int kBad = 1, kUnverified = 2;

// Escapes control characters, which must not reach the terminal: names come from files of any
// origin.
std::string printable(const std::string& text) {
  std::string out;
  for (char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7f)
      out += fmt::format("\\x{:02x}", byte);
    else
      out += c;
  }
  return out;
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

int verify_file(const io::SafetensorsFile& file) {
  std::string actual = file.compute_hash();
  auto stored = file.metadata().find(io::kHashKey);
  if (stored == file.metadata().end()) {
    std::fprintf(stderr, "tckpt: %s: readable, %s, no %s stored: bytes not verified\n",
                 printable(file.path()).c_str(),
                 counted(int64_t(file.tensors().size()), "tensor").c_str(), io::kHashKey);
    return kUnverified;
  }
  TESSERA_CHECK(stored->second == actual,
                "verify: {}: the data hash to {}, but {} {} was stored when they were written; the "
                "file is damaged, get "
                "it again",
                io::quote(file.path()), actual, io::kHashKey, io::quote(stored->second));
  fmt::print("{}: sound, {} tensors, {} {} as stored\n", printable(file.path()),
             grouped(file.tensors().size()), io::kHashKey, actual);
  return 0;
}

// Lists the first few chunks: "rank-0000-of-0002.safetensors[0:4], ...".
std::string layout_of(const checkpoint::Manifest& m, const checkpoint::TensorEntry& t) {
  constexpr size_t kShown = 3;
  std::string out;
  for (size_t i = 0; i < t.chunks.size() && i < kShown; ++i) {
    const checkpoint::Chunk& c = t.chunks[i];
    bool whole = c.box.shape == t.shape;
    out +=
        fmt::format("{}{}{}", i ? ", " : "", m.files[c.file].name, whole ? "" : to_string(c.box));
  }
  if (t.chunks.size() > kShown) out += fmt::format(" and {} more", t.chunks.size() - kShown);
  return out;
}

void inspect_checkpoint(const std::string& path) {
  checkpoint::Newest found = checkpoint::resolve(path);
  if (!found.warning.empty()) fmt::print("warning: {}\n", printable(found.warning));
  checkpoint::Manifest m = checkpoint::read_step(found.folder);
  fmt::print("{}: step {}, saved by {}\n", printable(found.folder), m.step,
             counted(m.world_size, "rank"));
  size_t widest = 4;
  for (const auto& t : m.tensors) widest = std::max(widest, printable(t.name).size());
  fmt::print("{:<{}}  {:<5}  {:<18}  {:>15}  {}\n", "name", widest, "dtype", "shape", "bytes",
             "where");
  uint64_t bytes = 0;
  for (const auto& t : m.tensors) {
    uint64_t own = uint64_t(numel(t.shape)) * size_of(t.dtype);
    fmt::print("{:<{}}  {:<5}  {:<18}  {:>15}  {}\n", printable(t.name), widest,
               io::safetensors_dtype(t.dtype), to_string(t.shape), grouped(own), layout_of(m, t));
    bytes += own;
  }
  fmt::print("{} tensors, {} bytes in {}\n", grouped(m.tensors.size()), grouped(bytes),
             counted(int64_t(m.files.size()), "file"));
  for (const auto& [key, value] : m.extra)
    fmt::print("extra {} = {}\n", printable(key), printable(value));
  std::string others;
  for (int64_t step : checkpoint::saved_steps(path))
    if (step != m.step) others += fmt::format(" {}", step);
  if (!others.empty()) fmt::print("other saved steps:{}\n", others);
}

int verify_checkpoint(const std::string& path) {
  checkpoint::Verified v = checkpoint::verify(path);
  for (const checkpoint::Finding& f : v.findings)
    std::fprintf(stderr, "tckpt: %s\n", printable(to_string(f)).c_str());
  if (!v.findings.empty()) return kBad;
  fmt::print("{}: sound, {}, {} bytes compared with their hashes\n", printable(path),
             counted(int64_t(v.steps.size()), "saved step"), grouped(v.bytes));
  return 0;
}

// Throws for a folder with neither a checkpoint nor weights, instead of calling it damaged.
void check_holds_anything(const char* command, const std::string& path) {
  namespace fs = std::filesystem;
  std::error_code error;
  if (!fs::is_directory(path, error) || checkpoint::is_checkpoint(path)) return;
  bool weights = false;
  for (const char* name : {"model.safetensors", "model.safetensors.index.json"})
    weights |= fs::exists(fs::path(path) / name, error);
  TESSERA_CHECK(
      weights,
      "{}: folder {} holds no saved step ({}, step-N, {}) and no weights (model.safetensors, "
      "model.safetensors.index.json); name the folder that was saved into, one of its steps, or a "
      "file of weights",
      command, io::quote(path), checkpoint::kLatestName, checkpoint::kManifestName);
}

struct Arguments {
  std::string path, to, prefix = "model.";
  uint64_t max_shard_bytes = 0;
  int64_t step = 0;
};

int look(const Arguments& a, bool inspect) {
  check_holds_anything(inspect ? "inspect" : "verify", a.path);
  if (checkpoint::is_checkpoint(a.path)) {
    if (!inspect) return verify_checkpoint(a.path);
    inspect_checkpoint(a.path);
    return 0;
  }
  io::SafetensorsSet set = io::SafetensorsSet::open(a.path);
  int status = 0;
  for (const io::SafetensorsFile& file : set.files()) {
    if (inspect)
      inspect_file(file);
    else
      status = std::max(status, verify_file(file));
  }
  return status;
}

void convert(const Arguments& a) {
  check_holds_anything("convert", a.path);
  TESSERA_CHECK(
      checkpoint::is_checkpoint(a.path) || !a.to.ends_with(".safetensors"),
      "convert: {} holds safetensors, of which a checkpoint is made, and that is a folder; "
      "{} is the name of a file",
      io::quote(a.path), io::quote(a.to));
  checkpoint::Converted c =
      checkpoint::is_checkpoint(a.path)
          ? checkpoint::export_safetensors(
                a.path, a.to, {.prefix = a.prefix, .max_shard_bytes = a.max_shard_bytes})
          : checkpoint::import_safetensors(a.path, a.to, a.step, a.prefix);
  fmt::print("{}: {} tensors, {} bytes in {}\n", printable(a.to), grouped(c.tensors),
             grouped(c.bytes), counted(int64_t(c.files), "file"));
}

void consolidate(const Arguments& a) {
  check_holds_anything("consolidate", a.path);
  TESSERA_CHECK(checkpoint::is_checkpoint(a.path), "consolidate: {} is no checkpoint; see convert",
                io::quote(a.path));
  TESSERA_CHECK(a.to.ends_with(".safetensors"),
                "consolidate: {} must end in .safetensors; for a folder see convert",
                io::quote(a.to));
  convert(a);
}

int run(int argc, char** argv) {
  CLI::App app{"Looks into checkpoints and weights (folders of saved steps, safetensors, shards)."};
  app.name("tckpt");
  app.set_version_flag("--version", [] { return version_text("tckpt"); });
  app.require_subcommand(1);
  Arguments a;
  CLI::App* inspect =
      app.add_subcommand("inspect", "print names, dtypes, shapes, sizes, layout and extra texts");
  CLI::App* verify =
      app.add_subcommand("verify",
                         "read everything and compare hashes; status 1 on damage, 2 where "
                         "a file is readable but stores no hash");
  CLI::App* consolidate_ = app.add_subcommand(
      "consolidate", "write the weights of a checkpoint as one safetensors file");
  CLI::App* convert_ = app.add_subcommand(
      "convert", "between a checkpoint and Hugging Face's files, in either direction");
  for (CLI::App* command : {inspect, verify})
    command->add_option("FILE", a.path, "checkpoint, safetensors file or folder")->required();
  consolidate_->add_option("FROM", a.path, "checkpoint or one of its steps")->required();
  consolidate_->add_option("--to", a.to, "file to write")->required();
  convert_->add_option("FROM", a.path, "checkpoint, safetensors file or folder")->required();
  convert_->add_option("TO", a.to, "file, or folder that is created")->required();
  convert_
      ->add_option("--max-shard-bytes", a.max_shard_bytes,
                   "most bytes of tensors in one file, as in 5GB; 0: one file")
      ->check(CLI::Validator(
          [](const std::string& text) {
            return text.starts_with("-") ? "is negative; expected a size as in 5GB" : "";
          },
          ""))
      ->transform(CLI::AsSizeValue(true));
  convert_->add_option("--step", a.step, "number of the step that a new checkpoint holds");
  for (CLI::App* command : {consolidate_, convert_})
    command
        ->add_option("--prefix", a.prefix,
                     "what names of weights begin with in a checkpoint, and nowhere else")
        ->type_name("[TEXT]")
        ->capture_default_str();
  if (auto status = parse_command_line(app, argc, argv, kBad)) return *status;
  int status = 0;
  if (convert_->parsed())
    convert(a);
  else if (consolidate_->parsed())
    consolidate(a);
  else
    status = look(a, inspect->parsed());
  return status;
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  tessera::reserve_standard_streams();
  try {
    const int status = tessera::run(argc, argv);
    tessera::check_output();
    return status;
  } catch (const std::exception& e) {
    std::fflush(stdout);
    std::fprintf(stderr, "tckpt: %s\n", e.what());
    return tessera::kBad;
  }
}
