#include "core/io/safetensors_header.h"

#include <algorithm>
#include <climits>
#include <numeric>

#include "core/io/bounded_json.h"

namespace tessera::io {
namespace {

constexpr const char* kDamaged = "the file is damaged or was written wrongly, get it again";
constexpr std::string_view kDTypeNames[] = {"BOOL", "U8",  "I32", "I64",     "F16",
                                            "BF16", "F32", "F64", "F8_E4M3", "F8_E5M2"};

// Builds the header from parser events; a small state machine, as the grammar has three fixed
// levels.
class HeaderEvents final : public JsonEvents {
 public:
  HeaderEvents(Header* out, const std::string& where) : out_(*out), where_(where) {}

  bool start_object(size_t) override {
    if (level_ == 2 || in_array_) wrong("an object");
    if (level_ == 1) begin_member();
    ++level_;
    return true;
  }
  bool end_object() override {
    if (level_ == 2 && !in_metadata_) end_entry();
    --level_;
    return true;
  }
  bool key(std::string& k) override {
    if (level_ == 1) {
      name_ = k;
    } else if (in_metadata_) {
      key_ = k;
    } else {
      Field f = k == "dtype"          ? kDType
                : k == "shape"        ? kShape
                : k == "data_offsets" ? kOffsets
                                      : kNone;
      if (f == kNone)
        fail("has the unknown field {}; expected are dtype, shape and data_offsets", quote(k));
      if (seen_ & f) fail("gives {} twice", quote(k));
      seen_ |= f;
      field_ = f;
    }
    return true;
  }
  bool string(std::string& s) override {
    if (level_ == 2 && in_metadata_) {
      if (!out_.metadata.emplace(key_, s).second) fail("has the key {} twice", quote(key_));
    } else if (level_ == 2 && field_ == kDType && !in_array_) {
      if (!parse_safetensors_dtype(s, &entry_.dtype))
        throw UserError(
            fmt::format("{}: tensor {} has dtype {}; supported are BOOL U8 I32 I64 F16 BF16 F32 "
                        "F64 F8_E4M3 F8_E5M2, convert it",
                        where_, quote(name_), quote(s)));
    } else {
      wrong("a string");
    }
    return true;
  }
  bool start_array(size_t) override {
    if (level_ != 2 || in_metadata_ || in_array_ || (field_ != kShape && field_ != kOffsets))
      wrong("an array");
    in_array_ = true;
    count_ = 0;
    return true;
  }
  bool end_array() override {
    in_array_ = false;
    if (field_ == kOffsets && count_ != 2) fail("has {} data_offsets instead of 2", count_);
    return true;
  }
  bool number_unsigned(uint64_t x) override {
    if (!in_array_) wrong("a number");
    if (field_ == kOffsets) {
      if (count_ < 2) (count_ == 0 ? entry_.offset : end_) = x;
    } else {
      if (x > uint64_t(INT64_MAX)) fail("has the extent {}, beyond 2^63 - 1", x);
      if (count_ >= uint64_t(kMaxDims)) fail("has more than {} dims", kMaxDims);
      entry_.shape.push_back(int64_t(x));
    }
    ++count_;
    return true;
  }
  bool number_integer(int64_t x) override { fail("has the negative number {}", x); }
  bool number_float(double, const std::string& s) override {
    fail("has {} where an integer is due", quote(s));
  }
  bool null() override { wrong("null"); }
  bool boolean(bool) override { wrong("a boolean"); }
  bool binary(binary_t&) override { wrong("binary data"); }
  bool parse_error(size_t position, const std::string&,
                   const nlohmann::json::exception& e) override {
    throw UserError(fmt::format("{}: the header is not JSON at offset {}: {}; {}", where_,
                                8 + position, short_reason(e), kDamaged));
  }

 private:
  enum Field : unsigned { kNone = 0, kDType = 1, kShape = 2, kOffsets = 4 };

  template <class... A>
  [[noreturn]] void fail(fmt::format_string<A...> text, A&&... args) {
    std::string what = fmt::vformat(text, fmt::make_format_args(args...));
    throw UserError(fmt::format("{}: {} {} {}; {}", where_, in_metadata_ ? "entry" : "tensor",
                                quote(name_), what, kDamaged));
  }
  [[noreturn]] void wrong(const char* what) {
    if (level_ == 0)
      throw UserError(
          fmt::format("{}: the header is {}, not an object; {}", where_, what, kDamaged));
    fail("has {} in a place where there can be none", what);
  }
  void begin_member() {
    in_metadata_ = name_ == "__metadata__";
    if (in_metadata_ && std::exchange(had_metadata_, true)) fail("is there twice");
    if (in_metadata_) return;
    if (name_.size() > kMaxNameBytes) fail("has a name longer than {} bytes", kMaxNameBytes);
    TESSERA_CHECK(out_.tensors.size() < kMaxTensors,
                  "{}: more than {} tensors; split the model into several files", where_,
                  kMaxTensors);
    entry_ = {};
    field_ = kNone;
    seen_ = 0;
  }
  void end_entry() {
    if (seen_ != (kDType | kShape | kOffsets)) fail("lacks dtype, shape or data_offsets");
    if (end_ < entry_.offset) fail("ends at {} before it begins at {}", end_, entry_.offset);
    entry_.bytes = end_ - entry_.offset;
    entry_.name = name_;
    out_.tensors.push_back(std::move(entry_));
  }

  Header& out_;
  const std::string& where_;
  std::string name_, key_;
  TensorInfo entry_;
  uint64_t end_ = 0, count_ = 0;
  int level_ = 0;
  unsigned seen_ = 0;
  Field field_ = kNone;
  bool in_array_ = false, in_metadata_ = false, had_metadata_ = false;
};

// Bytes of a dense tensor, or false on overflow. Zero extents count as 1 here: strides are products
// of them, too.
bool checked_bytes(const TensorInfo& t, uint64_t* bytes) {
  uint64_t product = size_of(t.dtype);
  bool zero = false;
  for (int64_t extent : t.shape) {
    zero |= extent == 0;
    if (__builtin_mul_overflow(product, uint64_t(std::max<int64_t>(extent, 1)), &product))
      return false;
  }
  *bytes = zero ? 0 : product;
  return product <= uint64_t(INT64_MAX);
}

// Shapes against bytes, and the bytes of all tensors against [0, data_bytes): a partition, or an
// error.
void check_layout(const std::vector<TensorInfo>& tensors, uint64_t data_bytes,
                  const std::string& where) {
  auto span = [](const TensorInfo& t) {
    return fmt::format("{} [{}, {})", quote(t.name), t.offset, t.offset + t.bytes);
  };
  std::vector<uint32_t> order(tensors.size());
  std::iota(order.begin(), order.end(), 0u);
  std::sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
    const TensorInfo &x = tensors[a], &y = tensors[b];
    return x.offset != y.offset ? x.offset < y.offset : x.bytes < y.bytes;
  });
  const TensorInfo* before = nullptr;
  uint64_t expected = 0;
  for (uint32_t i : order) {
    const TensorInfo& t = tensors[i];
    uint64_t bytes = 0;
    TESSERA_CHECK(checked_bytes(t, &bytes), "{}: tensor {}: shape {} of {} overflows; {}", where,
                  quote(t.name), to_string(t.shape), safetensors_dtype(t.dtype), kDamaged);
    TESSERA_CHECK(
        bytes == t.bytes, "{}: tensor {}: {} {} needs {} bytes, but data_offsets hold {}; {}",
        where, span(t), safetensors_dtype(t.dtype), to_string(t.shape), bytes, t.bytes, kDamaged);
    TESSERA_CHECK(t.offset >= expected, "{}: tensor {} overlaps tensor {}; {}", where, span(t),
                  before ? span(*before) : "", kDamaged);
    TESSERA_CHECK(t.offset == expected, "{}: a hole of {} bytes before tensor {}; {}", where,
                  t.offset - expected, span(t), kDamaged);
    expected += bytes;  // cannot wrap: t.offset + bytes was an end offset of the header
    before = &t;
  }
  TESSERA_CHECK(expected <= data_bytes,
                "{}: the tensors need {} bytes of data, the file has {}: it is truncated; get it "
                "again",
                where, expected, data_bytes);
  TESSERA_CHECK(expected == data_bytes,
                "{}: {} bytes follow the last tensor, which ends at data offset {}; {}", where,
                data_bytes - expected, expected, kDamaged);
}

}  // namespace

std::string_view safetensors_dtype(DType t) { return kDTypeNames[int(t)]; }

bool parse_safetensors_dtype(std::string_view text, DType* t) {
  for (DType candidate : kAllDTypes)
    if (text == safetensors_dtype(candidate)) return *t = candidate, true;
  return false;
}

Header parse_header(FunctionRef<size_t(char*, size_t)> source, uint64_t header_bytes,
                    uint64_t file_bytes, const std::string& where) {
  Header header;
  HeaderEvents events(&header, where);
  parse_bounded_json(source, {.max_depth = 4, .max_text_bytes = kMaxHeaderTextBytes}, where,
                     events);
  check_layout(header.tensors, file_bytes - 8 - header_bytes, where);
  std::sort(header.tensors.begin(), header.tensors.end(),
            [](auto& a, auto& b) { return a.name < b.name; });
  for (size_t i = 1; i < header.tensors.size(); ++i)
    TESSERA_CHECK(header.tensors[i - 1].name != header.tensors[i].name,
                  "{}: tensor {} is there twice; {}", where, quote(header.tensors[i].name),
                  kDamaged);
  for (TensorInfo& t : header.tensors) t.offset += 8 + header_bytes;
  return header;
}

std::string print_header(std::vector<TensorInfo>& tensors, const Metadata& metadata, size_t align) {
  auto text_of = [](const std::string& s) {
    try {
      return nlohmann::json(s).dump();
    } catch (const nlohmann::json::exception&) {
      throw UserError(fmt::format("save_safetensors: {} is not UTF-8; rename it", quote(s)));
    }
  };
  std::string out = "{", comma;
  if (!metadata.empty()) {
    out += "\"__metadata__\":{";
    for (const auto& [key, value] : metadata)
      out += std::exchange(comma, ",") + text_of(key) + ":" + text_of(value);
    out += "}";
  }
  uint64_t position = 0;
  for (TensorInfo& t : tensors) {
    t.offset = position;
    position += t.bytes;
    std::string shape;
    for (int64_t extent : t.shape) shape += (shape.empty() ? "" : ",") + std::to_string(extent);
    out += fmt::format("{}{}:{{\"dtype\":\"{}\",\"shape\":[{}],\"data_offsets\":[{},{}]}}",
                       std::exchange(comma, ","), text_of(t.name), safetensors_dtype(t.dtype),
                       shape, t.offset, position);
  }
  out += "}";
  out.resize((8 + out.size() + align - 1) / align * align - 8, ' ');
  for (TensorInfo& t : tensors) t.offset += 8 + out.size();
  return out;
}

}  // namespace tessera::io
