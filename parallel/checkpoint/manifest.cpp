#include "parallel/checkpoint/manifest.h"

#include <algorithm>
#include <nlohmann/json.hpp>

namespace tessera::checkpoint {
namespace {

std::string json_text(const std::string& s) {
  try {
    return nlohmann::json(s).dump();
  } catch (const nlohmann::json::exception&) {
    throw UserError(fmt::format("checkpoint: {} is not UTF-8; rename or encode it", io::quote(s)));
  }
}

std::string list(const Dims& d) {
  std::string out;
  for (int64_t x : d) out += (out.empty() ? "" : ",") + std::to_string(x);
  return "[" + out + "]";
}

void print_tensor(std::string& out, const TensorEntry& t) {
  out += fmt::format("{{\"name\":{},\"dtype\":\"{}\",\"shape\":{},\"chunks\":[", json_text(t.name),
                     io::safetensors_dtype(t.dtype), list(t.shape));
  std::string comma;
  for (const Chunk& c : t.chunks) {
    out += fmt::format("{}{{\"file\":{},\"offset\":{},\"begin\":{},\"shape\":{},\"xxh128\":[",
                       std::exchange(comma, ","), c.file, c.offset, list(c.box.begin),
                       list(c.box.shape));
    for (size_t i = 0; i < c.blocks.size(); ++i)
      out += fmt::format("{}\"{}\"", i ? "," : "", to_string(c.blocks[i]));
    out += "]}";
  }
  out += "]}";
}

// Computes the bytes of a dense tensor of this shape; false on overflow.
bool checked_bytes(const Shape& shape, DType dtype, uint64_t* bytes) {
  uint64_t product = size_of(dtype);
  bool zero = false;
  for (int64_t extent : shape) {
    zero |= extent == 0;
    if (extent < 0 ||
        __builtin_mul_overflow(product, uint64_t(std::max<int64_t>(extent, 1)), &product))
      return false;
  }
  *bytes = zero ? 0 : product;
  return product <= uint64_t(INT64_MAX);
}

struct Part {
  uint64_t begin, bytes;
  const TensorEntry* tensor;
};

void check_tensor(const Manifest& m, const TensorEntry& t, const std::string& where,
                  std::vector<std::vector<Part>>& parts) {
  std::string who = fmt::format("{}: tensor {}", where, io::quote(t.name));
  uint64_t bytes = 0;
  TESSERA_CHECK(t.name.size() <= io::kMaxNameBytes && !t.name.empty(),
                "{}: a name has 1 to {} bytes", who, io::kMaxNameBytes);
  TESSERA_CHECK(checked_bytes(t.shape, t.dtype, &bytes), "{}: shape {} overflows", who,
                to_string(t.shape));
  std::vector<Box> boxes;
  for (const Chunk& c : t.chunks) {
    TESSERA_CHECK(inside(c.box, t.shape), "{}: the box {} is not inside {}", who, to_string(c.box),
                  to_string(t.shape));
    uint64_t chunk_bytes = bytes_of(t, c);  // it cannot overflow: the chunk is inside the shape
    TESSERA_CHECK(chunk_bytes > 0, "{}: the box {} is empty", who, to_string(c.box));
    TESSERA_CHECK(c.file < m.files.size(), "{}: file number {} of {}", who, c.file, m.files.size());
    const FileEntry& file = m.files[c.file];
    TESSERA_CHECK(c.offset <= file.bytes && chunk_bytes <= file.bytes - c.offset,
                  "{}: bytes [{}, {}+{}) of {}, which has {}", who, c.offset, c.offset, chunk_bytes,
                  io::quote(file.name), file.bytes);
    TESSERA_CHECK(c.blocks.size() == (chunk_bytes - 1) / m.block_bytes + 1,
                  "{}: {} hashes for {} bytes in blocks of {}", who, c.blocks.size(), chunk_bytes,
                  m.block_bytes);
    parts[c.file].push_back({c.offset, chunk_bytes, &t});
    boxes.push_back(c.box);
  }
  if (auto error = partition_error(t.shape, std::move(boxes)))
    throw UserError(fmt::format("{}: {}", who, *error));
}

}  // namespace

const TensorEntry* Manifest::find(std::string_view name) const {
  auto at =
      std::ranges::lower_bound(tensors, name, {}, [](auto& t) { return std::string_view(t.name); });
  return at != tensors.end() && at->name == name ? &*at : nullptr;
}

bool is_plain_file_name(std::string_view name) {
  if (name.empty() || name.size() > 255 || name.front() == '.') return false;
  return std::ranges::all_of(name, [](char c) {
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '.' ||
           c == '_' || c == '-';
  });
}

void check_extra(const Extra& extra) {
  TESSERA_CHECK(extra.size() <= kMaxExtra, "checkpoint: {} extra texts, at most {} are kept",
                extra.size(), kMaxExtra);
  for (const auto& [key, value] : extra) json_text(key), json_text(value);
}

std::string print_manifest(Manifest& m) {
  std::string out = fmt::format(
      "{{\"format\":\"tessera-checkpoint\",\"version\":1,\"step\":{},\"world_size\":{},"
      "\"block_bytes\":{},\n\"extra\":{{",
      m.step, m.world_size, m.block_bytes);
  std::string comma;
  for (const auto& [key, value] : m.extra)
    out += std::exchange(comma, ",\n") + json_text(key) + ":" + json_text(value);
  out += "},\n\"files\":[";
  comma.clear();
  for (const FileEntry& f : m.files)
    out += fmt::format("{}{{\"name\":{},\"bytes\":{},\"header_bytes\":{},\"xxh128\":\"{}\"}}",
                       std::exchange(comma, ",\n"), json_text(f.name), f.bytes, f.header_bytes,
                       to_string(f.header));
  out += "],\n\"tensors\":[";
  comma.clear();
  for (const TensorEntry& t : m.tensors) out += std::exchange(comma, ",\n"), print_tensor(out, t);
  out += "],\n";
  m.hash = io::xxh128(out.data(), out.size());
  return out + fmt::format("\"xxh128\":\"{}\"}}\n", to_string(m.hash));
}

void check_manifest(const Manifest& m, const std::string& where) {
  TESSERA_CHECK(m.step >= 0 && m.step <= kMaxStep && m.world_size >= 1, "{}: step {} of {} ranks",
                where, m.step, m.world_size);
  TESSERA_CHECK(m.block_bytes >= 1 && m.block_bytes <= (1 << 30), "{}: blocks of {} bytes", where,
                m.block_bytes);
  for (const FileEntry& f : m.files) {
    TESSERA_CHECK(is_plain_file_name(f.name),
                  "{}: the file name {} is refused; only files of the same folder are read", where,
                  io::quote(f.name));
    TESSERA_CHECK(f.header_bytes <= io::kMaxHeaderBytes + 8 && f.header_bytes <= f.bytes &&
                      f.bytes <= uint64_t(INT64_MAX),
                  "{}: file {}: {} bytes with a header of {}", where, io::quote(f.name), f.bytes,
                  f.header_bytes);
  }
  std::vector<std::vector<Part>> parts(m.files.size());
  for (size_t i = 0; i < m.tensors.size(); ++i) {
    TESSERA_CHECK(i == 0 || m.tensors[i - 1].name < m.tensors[i].name,
                  "{}: tensor {} is there twice or out of order", where,
                  io::quote(m.tensors[i].name));
    check_tensor(m, m.tensors[i], where, parts);
  }
  // Headers and chunks must cover files without gaps or overlaps, so that every byte has a hash.
  for (size_t f = 0; f < parts.size(); ++f) {
    std::ranges::sort(parts[f], {}, &Part::begin);
    uint64_t at = m.files[f].header_bytes;
    for (const Part& p : parts[f]) {
      TESSERA_CHECK(p.begin == at, "{}: file {}: tensor {} begins at {}, expected {}", where,
                    io::quote(m.files[f].name), io::quote(p.tensor->name), p.begin, at);
      at += p.bytes;
    }
    TESSERA_CHECK(at == m.files[f].bytes, "{}: file {}: chunks end at {}, the file at {}", where,
                  io::quote(m.files[f].name), at, m.files[f].bytes);
  }
}

}  // namespace tessera::checkpoint
