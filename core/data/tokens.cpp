#include "core/data/tokens.h"

#include <algorithm>
#include <filesystem>
#include <vector>

#include "core/base/error.h"
#include "core/base/log.h"
#include "core/base/spelling.h"
#include "core/data/utf8.h"
#include "core/io/file.h"

namespace tessera::data {
namespace fs = std::filesystem;

namespace {

int64_t nine_tenths(int64_t n) { return n / 10 * 9 + n % 10 * 9 / 10; }

// Text files below `folder`, by relative path, so that every rank and machine concatenates in the
// same order.
std::vector<fs::path> files_below(const fs::path& folder) {
  std::vector<fs::path> out;
  std::error_code error;
  fs::recursive_directory_iterator at(folder, error), end;
  for (; !error && at != end; at.increment(error)) {
    bool hidden = at->path().filename().string().starts_with('.');
    std::error_code ignored;
    if (at->is_symlink(ignored)) continue;
    if (at->is_directory(ignored)) {
      if (hidden || fs::exists(at->path() / "CMakeCache.txt", ignored))
        at.disable_recursion_pending();
    } else if (!hidden && at->is_regular_file(ignored)) {
      out.push_back(at->path());
    }
  }
  TESSERA_CHECK(!error, "data: cannot list folder {}: {}; check its permissions",
                io::quote(folder.string()), error.message());
  std::sort(out.begin(), out.end(),
            [](const fs::path& a, const fs::path& b) { return a.string() < b.string(); });
  return out;
}

}  // namespace

Tokens Tokens::from_ids(std::span<const TokenId> ids) {
  Tokens out;
  out.size_ = int64_t(ids.size());
  out.wide_ = std::any_of(ids.begin(), ids.end(), [](TokenId id) { return id > 0xFFFF; });
  if (out.wide_) {
    auto data = std::make_shared<std::vector<uint32_t>>(ids.begin(), ids.end());
    out.data_ = data->data();
    out.owner_ = data;
  } else {
    auto data = std::make_shared<std::vector<uint16_t>>(ids.begin(), ids.end());
    out.data_ = data->data();
    out.owner_ = data;
  }
  return out;
}

Tokens Tokens::map_file(const std::string& path) {
  io::File file = io::File::open(path, "data");
  Tokens out;
  out.wide_ = path.ends_with(".u32") || path.ends_with(".u32.bin");
  uint64_t width = out.wide_ ? 4 : 2;
  TESSERA_CHECK(file.size() > 0, "data: {} is empty; expected raw little-endian u{} tokens",
                io::quote(path), 8 * width);
  TESSERA_CHECK(file.size() % width == 0,
                "data: {} has {} bytes, no multiple of {}; expected raw little-endian u{} tokens "
                "(u32 files end in .u32)",
                io::quote(path), file.size(), width, 8 * width);
  out.mapping_ = file.map();
  out.data_ = out.mapping_->data();
  out.size_ = int64_t(file.size() / width);
  return out;
}

Tokens Tokens::slice(int64_t begin, int64_t end) const {
  TESSERA_ASSERT(begin >= 0 && begin <= end && end <= size_, "slice [{}, {}) of {} tokens", begin,
                 end, size_);
  Tokens out = *this;
  out.data_ = static_cast<const char*>(data_) + begin * (wide_ ? 4 : 2);
  out.size_ = end - begin;
  return out;
}

TokenId Tokens::max_and_hash(io::Xxh128& hash) const {
  constexpr int64_t kBlock = 1 << 13;  // stays in the cache from the one use to the other
  std::vector<uint32_t> block(kBlock);
  int64_t top = -1;
  for (int64_t begin = 0; begin < size_; begin += kBlock) {
    const int64_t n = std::min(kBlock, size_ - begin);
    if (wide_)
      std::copy_n(static_cast<const uint32_t*>(data_) + begin, n, block.begin());
    else
      std::copy_n(static_cast<const uint16_t*>(data_) + begin, n, block.begin());
    uint32_t largest = 0;
    for (int64_t i = 0; i < n; ++i) largest = std::max(largest, block[size_t(i)]);
    top = std::max<int64_t>(top, largest);
    hash.update(block.data(), size_t(n) * sizeof(uint32_t));
  }
  check_unchanged();
  return TokenId(top);
}

void Tokens::check_unchanged() const {
  if (mapping_) mapping_->check();
}

std::string read_text(const std::string& path) {
  std::error_code error;
  if (!fs::is_directory(path, error)) {
    std::string text = io::read_file(path, "data");
    TESSERA_CHECK(!text.empty(), "data: {} is empty; give a file with text", io::quote(path));
    return text;
  }
  std::string all;
  size_t skipped = 0;
  std::string first_skipped;
  for (const fs::path& file : files_below(path)) {
    std::string text = io::read_file(file.string(), "data");
    if (text.find('\0') != std::string::npos || find_invalid_utf8(text) != std::string::npos) {
      if (skipped++ == 0) first_skipped = file.string();
      continue;
    }
    all += text;
  }
  TESSERA_CHECK(!all.empty(),
                "data: folder {} holds no text ({} files are not text); give another folder",
                io::quote(path), skipped);
  if (skipped)
    logging::warn("data: {}: left out {} without UTF-8 text, {} the first", path,
                  counted(int64_t(skipped), "file"), io::quote(first_skipped));
  return all;
}

TextSplit split_text(std::string_view text) {
  size_t cut;
  if (find_invalid_utf8(text) != std::string_view::npos) {
    cut = size_t(nine_tenths(int64_t(text.size())));
  } else {
    int64_t left = nine_tenths(int64_t(count_code_points(text)));
    for (cut = 0; left > 0; --left) cut += decode_utf8(text, cut).bytes;
  }
  return {text.substr(0, cut), text.substr(cut)};
}

namespace {

// Hashes the splits, each after its length. Returns the largest id.
TokenId survey(TokenSplit& split) {
  io::Xxh128 hash;
  TokenId top = -1;
  for (const Tokens* part : {&split.train, &split.validation}) {
    const int64_t size = part->size();
    hash.update(&size, sizeof size);
    top = std::max(top, part->max_and_hash(hash));
  }
  split.hash = hash.digest();
  return top;
}

/// A folder that holds train.txt and validation.txt is split as they are; other text 90/10.
TokenSplit load_text(const std::string& path, const std::string& tokenizer) {
  TESSERA_CHECK(!tokenizer.empty(),
                "data: text needs a tokenizer; give byte, char, wordpiece:PATH or a ranks file");
  fs::path train = fs::path(path) / "train.txt", validation = fs::path(path) / "validation.txt";
  std::error_code error;
  bool parts = fs::exists(train, error) && fs::exists(validation, error);
  std::string text = parts ? read_text(train.string()) : read_text(path);
  size_t cut = text.size();
  if (parts) text += read_text(validation.string());
  TextSplit split =
      parts ? TextSplit{std::string_view(text).substr(0, cut), std::string_view(text).substr(cut)}
            : split_text(text);
  TokenSplit out;
  out.tokenizer = make_tokenizer(tokenizer, text);
  out.vocab_size = out.tokenizer->vocab_size();
  out.train = Tokens::from_ids(out.tokenizer->encode(split.train));
  out.validation = Tokens::from_ids(out.tokenizer->encode(split.validation));
  survey(out);
  return out;
}

TokenSplit load_token_files(const std::string& path, const std::string& tokenizer) {
  TESSERA_CHECK(tokenizer != "char",
                "data: characters are not known from tokens; give a ranks file, byte or none");
  TokenSplit out;
  std::error_code error;
  if (fs::is_directory(path, error)) {
    auto part = [&](const char* name) {
      for (const char* suffix : {".bin", ".u32.bin", ".u32"})
        if (fs::path p = fs::path(path) / (std::string(name) + suffix); fs::exists(p, error))
          return Tokens::map_file(p.string());
      throw UserError(fmt::format(
          "data: folder {} has no {}.bin; give a token file or a folder with train.bin and val.bin",
          io::quote(path), name));
    };
    out.train = part("train");
    out.validation = part("val");
  } else {
    Tokens all = Tokens::map_file(path);
    int64_t cut = nine_tenths(all.size());
    out.train = all.slice(0, cut);
    out.validation = all.slice(cut, all.size());
  }
  const TokenId top = survey(out);
  if (tokenizer.empty()) {
    out.vocab_size = int64_t(top) + 1;
  } else {
    out.tokenizer = make_tokenizer(tokenizer, "");
    out.vocab_size = out.tokenizer->vocab_size();
  }
  return out;
}

}  // namespace

TokenSplit load_tokens(const std::string& kind_and_path, const std::string& tokenizer) {
  size_t colon = kind_and_path.find(':');
  std::string kind = kind_and_path.substr(0, colon);
  TESSERA_CHECK(colon == std::string::npos || colon + 1 < kind_and_path.size(),
                "data: {} has no path after the colon; is a variable of the shell unset?",
                io::quote(kind_and_path));
  TESSERA_CHECK(colon != std::string::npos && (kind == "text" || kind == "tokens"),
                "data: {} is not text:PATH or tokens:PATH", io::quote(kind_and_path));
  std::string path = kind_and_path.substr(colon + 1);
  return kind == "text" ? load_text(path, tokenizer) : load_token_files(path, tokenizer);
}

}  // namespace tessera::data
