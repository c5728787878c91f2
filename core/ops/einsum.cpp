// A spec is brought to plain words, one letter for each dim, and those are contracted pair by pair.
// Invariant: once read, "..." is the letters '0', '1', ..., counted from the right, so that dims
// which broadcast have one letter in every operand.
#include "core/ops/einsum.h"

#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "core/dispatch/dispatch.h"
#include "core/ops/contract.h"
#include "core/ops/layout.h"
#include "core/ops/reduce.h"
#include "core/ops/views.h"

namespace tessera {
namespace {

bool has(const std::string& word, char c) { return word.find(c) != std::string::npos; }
bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }

// A comma-separated part of the spec: letters around at most one "...".
struct Word {
  std::string before, after;
  bool ellipsis = false;

  int letters() const { return int(before.size() + after.size()); }
  std::string with(const std::string& dims) const { return before + dims + after; }
};

Word parse_word(std::string_view text, std::string_view spec) {
  Word w;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text.substr(i, 3) == "...") {
      TESSERA_CHECK(!w.ellipsis, "einsum: spec \"{}\" has \"...\" twice in \"{}\"", spec, text);
      w.ellipsis = true;
      i += 2;
      continue;
    }
    TESSERA_CHECK(
        is_letter(text[i]),
        "einsum: spec \"{}\": '{}' in \"{}\" is no letter; dims are named a-z, A-Z or \"...\"",
        spec, text[i], text);
    (w.ellipsis ? w.after : w.before) += text[i];
  }
  return w;
}

struct Spec {
  std::vector<Word> in;
  Word out;
};

Spec parse(const std::string& text, std::string_view spec) {
  Spec s;
  size_t arrow = text.find("->");
  std::string_view words = std::string_view(text).substr(0, arrow);
  for (size_t begin = 0;;) {
    size_t comma = words.find(',', begin);
    s.in.push_back(parse_word(words.substr(begin, comma - begin), spec));
    if (comma == std::string_view::npos) break;
    begin = comma + 1;
  }
  if (arrow != std::string::npos) {
    s.out = parse_word(std::string_view(text).substr(arrow + 2), spec);
    return s;
  }
  std::array<int, 256> count{};
  for (const Word& w : s.in) {
    for (char c : w.with("")) ++count[uint8_t(c)];
    s.out.ellipsis |= w.ellipsis;
  }
  for (int c = 0; c < 256; ++c)
    if (count[size_t(c)] == 1) s.out.after += char(c);
  return s;
}

// A letter that an operand repeats walks its diagonal: each becomes one dim, the last.
Tensor diagonals(Tensor t, std::string& word, std::string_view spec) {
  for (size_t i = 0; i < word.size();) {
    size_t j = word.find(word[i], i + 1);
    if (j == std::string::npos) {
      ++i;
      continue;
    }
    char letter = word[i];
    TESSERA_CHECK_AS(ShapeError, t.size(int64_t(i)) == t.size(int64_t(j)),
                     "einsum: spec \"{}\" repeats '{}', whose extents in {} differ", spec, letter,
                     describe(t));
    t = diagonal(t, 0, int64_t(i), int64_t(j));
    word.erase(j, 1), word.erase(i, 1), word += letter;
  }
  return t;
}

std::string shown(char letter) {
  return letter >= '0' && letter <= '9' ? fmt::format("dim -{} of \"...\"", letter - '0' + 1)
                                        : fmt::format("'{}'", letter);
}

// Drops dims of extent 1 whose letter is longer elsewhere: their operand is the same for every
// element along that letter.
void drop_broadcast(Tensors& x, std::vector<std::string>& words, std::string_view spec) {
  std::array<int64_t, 256> extent;
  std::array<size_t, 256> owner{};
  extent.fill(1);
  for (size_t k = 0; k < x.size(); ++k)
    for (size_t d = 0; d < words[k].size(); ++d) {
      size_t c = uint8_t(words[k][d]);
      int64_t n = x[k].shape()[int(d)];
      TESSERA_CHECK_AS(ShapeError, n == 1 || extent[c] == 1 || n == extent[c],
                       "einsum: spec \"{}\": {} has extent {} in {} (operand {}) and {} in {} "
                       "(operand {})",
                       spec, shown(char(c)), n, describe(x[k]), k, extent[c], describe(x[owner[c]]),
                       owner[c]);
      if (n != 1) extent[c] = n, owner[c] = k;
    }
  for (size_t k = 0; k < x.size(); ++k)
    for (size_t d = words[k].size(); d-- > 0;)
      if (x[k].shape()[int(d)] == 1 && extent[uint8_t(words[k][d])] != 1)
        x[k] = squeeze(x[k], int64_t(d)), words[k].erase(d, 1);
}

// What is left of one operand: letters outside the result are summed, the others put in its order.
Tensor arranged(const Tensor& t, const std::string& word, const std::string& out) {
  Dims gone, order;
  std::string kept;
  for (size_t i = 0; i < word.size(); ++i) {
    if (has(out, word[i]))
      kept += word[i];
    else
      gone.push_back(int64_t(i));
  }
  for (char c : out) order.push_back(int64_t(kept.find(c)));
  return permute(gone.empty() ? t : sum(t, gone), order);
}

Tensor contract_all(const Tensors& x, const std::vector<std::string>& words,
                    const std::string& out) {
  Tensor t = x[0];
  std::string have = words[0];
  for (size_t i = 1; i < x.size(); ++i) {
    std::string later = out, next;  // letters still needed, and those of them there are now
    for (size_t k = i + 1; k < words.size(); ++k) later += words[k];
    for (char c : have + words[i])
      if (has(later, c) && !has(next, c)) next += c;
    if (i + 1 == x.size()) next = out;
    t = contract(have + "," + words[i] + "->" + next, t, x[i]);
    have = next;
  }
  return x.size() > 1 ? t : arranged(t, have, out);
}

}  // namespace

Tensor einsum(std::string_view spec, std::span<const Tensor> operands) {
  std::string text(spec);
  std::erase(text, ' ');
  const Spec s = parse(text, spec);
  TESSERA_CHECK(s.in.size() == operands.size(), "einsum: spec \"{}\" names {} operands, got {}",
                spec, s.in.size(), operands.size());
  Tensors x(operands.begin(), operands.end());
  std::vector<std::string> words;
  std::string seen, ellipsis;
  for (size_t k = 0; k < x.size(); ++k) {
    const Word& w = s.in[k];
    int more = x[k].ndim() - w.letters();
    TESSERA_CHECK_AS(ShapeError, w.ellipsis ? more >= 0 : more == 0,
                     "einsum: spec \"{}\": \"{}\" names {}{} dims, operand {} is {}", spec,
                     w.with(w.ellipsis ? "..." : ""), w.ellipsis ? "at least " : "", w.letters(), k,
                     describe(x[k]));
    std::string dims;
    for (int d = more - 1; d >= 0; --d) dims += char('0' + d);
    if (dims.size() > ellipsis.size()) ellipsis = dims;
    words.push_back(w.with(dims));
    seen += words.back();
  }
  const std::string out = s.out.with(s.out.ellipsis ? ellipsis : "");
  for (size_t i = 0; i < out.size(); ++i) {
    TESSERA_CHECK(has(seen, out[i]), "einsum: spec \"{}\": '{}' is in no operand", spec, out[i]);
    TESSERA_CHECK(out.find(out[i], i + 1) == std::string::npos,
                  "einsum: spec \"{}\" repeats '{}' in the result", spec, out[i]);
  }
  for (size_t k = 0; k < x.size(); ++k) x[k] = diagonals(x[k], words[k], spec);
  drop_broadcast(x, words, spec);
  return contract_all(x, words, out);
}

}  // namespace tessera
