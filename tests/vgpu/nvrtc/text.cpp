#include "tests/vgpu/nvrtc/text.h"

#include <algorithm>
#include <cctype>

namespace vgpu {

namespace {

bool is_name(char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_'; }

class Reader {
 public:
  explicit Reader(const std::string& text) : text_(text) {}
  PlainText read();

 private:
  bool at_word(const char* word) const;
  void skip_space() {
    while (at_ < text_.size() && std::isspace(static_cast<unsigned char>(text_[at_]))) ++at_;
  }
  std::string name();
  std::string parenthesised();
  void kernel(PlainText& out);
  bool dynamic_shared(std::string& out);
  void shared(std::string& out);
  /// Line ends that were skipped since `from`.
  std::string lines(size_t from) const {
    return std::string(
        static_cast<size_t>(std::count(text_.begin() + static_cast<long>(from),
                                       text_.begin() + static_cast<long>(at_), '\n')),
        '\n');
  }

  const std::string& text_;
  size_t at_ = 0;
};

bool Reader::at_word(const char* word) const {
  const size_t n = std::char_traits<char>::length(word);
  return text_.compare(at_, n, word) == 0 && (at_ == 0 || !is_name(text_[at_ - 1])) &&
         (at_ + n == text_.size() || !is_name(text_[at_ + n]));
}

std::string Reader::name() {
  skip_space();
  const size_t from = at_;
  while (at_ < text_.size() && is_name(text_[at_])) ++at_;
  return text_.substr(from, at_ - from);
}

// What stands in the parentheses that begin here.
std::string Reader::parenthesised() {
  skip_space();
  const size_t from = at_ + 1;
  int depth = 0;
  do depth += (text_[at_] == '(') - (text_[at_] == ')');
  while (++at_ < text_.size() && depth);
  return text_.substr(from, at_ - 1 - from);
}

// Behind `__global__`: the bounds may stand before `void` or behind it.
void Reader::kernel(PlainText& out) {
  const size_t from = at_;
  std::string bound = "0", word;
  do {
    word = name();
    if (word == "__launch_bounds__") {
      bound = parenthesised();
      int depth = 0;  // the first of several arguments
      for (size_t i = 0; i < bound.size(); ++i) {
        depth += (bound[i] == '(') - (bound[i] == ')');
        if (bound[i] == ',' && depth == 0) bound.resize(i);
      }
    }
  } while (word == "__launch_bounds__" || word == "void" || word == "static" || word == "inline");
  out.kernels.push_back({word, bound});
  out.text += lines(from) + " void " + word;
}

// `extern __shared__ T name[];`, of any alignment. False: something else that is extern.
bool Reader::dynamic_shared(std::string& out) {
  const size_t from = at_;
  at_ += 6;
  skip_space();
  if (!at_word("__shared__")) return at_ = from, false;
  at_ += 10;
  skip_space();
  while (at_word("alignas") || at_word("__attribute__")) {
    name();
    parenthesised();
    skip_space();
  }
  const size_t end = text_.find(';', at_);
  std::string declaration = text_.substr(at_, end - at_);
  at_ = end + 1;
  size_t bracket = declaration.rfind('[');
  while (bracket > 0 && std::isspace(static_cast<unsigned char>(declaration[bracket - 1])))
    --bracket;
  size_t begin = bracket;
  while (begin > 0 && is_name(declaration[begin - 1])) --begin;
  std::string type = declaration.substr(0, begin);
  std::replace(type.begin(), type.end(), '\n', ' ');
  out += type + "* const " + declaration.substr(begin, bracket - begin) + " = reinterpret_cast<" +
         type + "*>(vgpu_dynamic + kVgpuDynamicZone);" + lines(from);
  return true;
}

void Reader::shared(std::string& out) {
  at_ += 10;
  while (!out.empty() && std::isspace(static_cast<unsigned char>(out.back()))) out.pop_back();
  if (out.size() >= 6 && out.compare(out.size() - 6, 6, "static") == 0) out.resize(out.size() - 6);
  out += " static __attribute__((section(\"vgpu_shared\"))) ";
  const size_t from = at_;
  skip_space();
  if (at_word("alignas")) {
    at_ += 7;
    out += "__attribute__((aligned(" + parenthesised() + ")))";
  }
  out += lines(from);
}

PlainText Reader::read() {
  PlainText out;
  while (at_ < text_.size()) {
    if (text_[at_] == '"') {
      const size_t from = at_++;
      while (at_ < text_.size() && text_[at_] != '"') at_ += text_[at_] == '\\' ? 2 : 1;
      out.text += text_.substr(from, ++at_ - from);
    } else if (at_word("__global__")) {
      at_ += 10;
      kernel(out);
    } else if (at_word("__shared__")) {
      shared(out.text);
    } else if (!at_word("extern") || !dynamic_shared(out.text)) {
      out.text += text_[at_++];
    }
  }
  return out;
}

}  // namespace

PlainText plain_text(const std::string& preprocessed) { return Reader(preprocessed).read(); }

}  // namespace vgpu
