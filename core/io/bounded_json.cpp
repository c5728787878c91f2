#include "core/io/bounded_json.h"

#include <istream>
#include <streambuf>

#include "core/base/error.h"
#include "core/io/file.h"

namespace tessera::io {
namespace {

constexpr const char* kAdvice = "the file is damaged or not what its name says";

// Tracks just enough of the syntax (inside a string or not, depth) to measure what the parser would
// have to keep.
class BoundedBuffer final : public std::streambuf {
 public:
  BoundedBuffer(FunctionRef<size_t(char*, size_t)> source, const JsonLimits& limits,
                const std::string& where)
      : source_(source), limits_(limits), where_(where) {}

 protected:
  int_type underflow() override {
    size_t kept = 0;
    while (kept == 0) {
      size_t n = source_(chunk_, sizeof chunk_);
      if (n == 0) return traits_type::eof();
      for (size_t i = 0; i < n; ++i, ++offset_) {
        char c = chunk_[i];
        // The parser keeps a run of blanks as it keeps a token, so it gets one blank of each run.
        bool blank = !in_string_ && (c == ' ' || c == '\t' || c == '\n' || c == '\r');
        if (!blank || !after_blank_) chunk_[kept++] = c;
        after_blank_ = blank;
        look_at(c);
      }
    }
    setg(chunk_, chunk_, chunk_ + kept);
    return traits_type::to_int_type(chunk_[0]);
  }

 private:
  void look_at(char c) {
    if (in_string_) {
      ++text_;
      TESSERA_CHECK(++length_ <= limits_.max_string_bytes,
                    "{}: a string longer than {} bytes ends after offset {}; {}", where_,
                    limits_.max_string_bytes, offset_, kAdvice);
      TESSERA_CHECK(text_ <= limits_.max_text_bytes,
                    "{}: more than {} bytes of strings at offset {}; {}", where_,
                    limits_.max_text_bytes, offset_, kAdvice);
      if (escaped_)
        escaped_ = false;
      else if (c == '\\')
        escaped_ = true;
      else if (c == '"')
        in_string_ = false, length_ = 0;
      return;
    }
    switch (c) {
      case '"': in_string_ = true, length_ = 0; return;
      case '{':
      case '[':
        length_ = 0;
        TESSERA_CHECK(++depth_ <= limits_.max_depth, "{}: nested deeper than {} at offset {}; {}",
                      where_, limits_.max_depth, offset_, kAdvice);
        return;
      case '}':
      case ']':
        --depth_;
        length_ = 0;
        return;
      case ',':
      case ':':
      case ' ':
      case '\t':
      case '\n':
      case '\r': length_ = 0; return;
      default:
        TESSERA_CHECK(++length_ <= JsonLimits::kMaxScalarBytes,
                      "{}: a number longer than {} digits at offset {}; {}", where_,
                      JsonLimits::kMaxScalarBytes, offset_, kAdvice);
    }
  }

  FunctionRef<size_t(char*, size_t)> source_;
  const JsonLimits& limits_;
  const std::string& where_;
  char chunk_[1 << 16];
  uint64_t offset_ = 0, length_ = 0, text_ = 0;
  int depth_ = 0;
  bool in_string_ = false, escaped_ = false, after_blank_ = false;
};

}  // namespace

void parse_bounded_json(FunctionRef<size_t(char*, size_t)> source, const JsonLimits& limits,
                        const std::string& where, JsonEvents& events) {
  BoundedBuffer buffer(source, limits, where);
  std::istream stream(&buffer);
  nlohmann::json::sax_parse(stream, &events);
}

nlohmann::json::parser_callback_t nested_at_most(int max_depth, std::string where) {
  return [=, where = std::move(where)](int depth, nlohmann::json::parse_event_t, nlohmann::json&) {
    TESSERA_CHECK(depth <= max_depth, "{}: nested deeper than {}; {}", where, max_depth, kAdvice);
    return true;
  };
}

std::string short_reason(const nlohmann::json::exception& e) {
  std::string text = e.what();  // "[json.exception.parse_error.101] parse error at line 1, column
                                // 5: syntax error ..."
  if (size_t bracket = text.find("] "); bracket != std::string::npos)
    text = text.substr(bracket + 2);
  return quote(text);
}

}  // namespace tessera::io
