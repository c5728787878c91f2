#include "parallel/checkpoint/training_state.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>

#include "parallel/checkpoint/sharded.h"

namespace tessera::checkpoint {
namespace {

constexpr const char *kCursor = "data.cursor", *kGenerator = "random.generator";

// The parts of a state, by the prefix of their names.
struct Part {
  const char *prefix, *what, *field;
};
constexpr Part kParts[] = {
    {"model.", "a model", ".model"},
    {"optimizer.", "an optimizer", ".optimizer"},
    {"scaler.", "a loss scale", ".scaler"},
    {kCursor, "a position in the data", ".loader"},
    {kGenerator, "a random generator", ".generator"},
    {"", "tensors", ".tensors"},
};
const Part& part_of(const std::string& name) {
  return *std::ranges::find_if(kParts, [&](const Part& p) { return name.starts_with(p.prefix); });
}

std::string few(const std::vector<std::string>& names) {
  if (names.size() <= 3) return fmt::format("{}", fmt::join(names, ", "));
  return fmt::format("{} and {} more", names[0], names.size() - 1);
}

// Lists names by part: "an optimizer (optimizer.step and 9 more), tensors (ema)". `fields`: with
// the field of TrainingState that sets each part.
std::string by_part(const std::vector<std::string>& names, bool fields) {
  std::string text;
  for (const Part& part : kParts) {
    std::vector<std::string> of_part;
    for (const std::string& name : names)
      if (&part_of(name) == &part) of_part.push_back(name);
    if (of_part.empty()) continue;
    text += fmt::format("{}{} ({})", text.empty() ? "" : ", ", part.what, few(of_part));
    if (fields) text += fmt::format(", to be given as {}", part.field);
  }
  return text;
}

void check_fits(const Loaded& l) {
  if (l.missing.empty() && l.unexpected.empty()) return;
  std::string text = fmt::format("checkpoint: {} is not the state of this run", l.folder);
  if (!l.missing.empty()) text += "; it lacks " + by_part(l.missing, false);
  if (!l.unexpected.empty()) text += "; it also has " + by_part(l.unexpected, true);
  throw UserError(text +
                  "; load() of single pieces takes parts of it (parallel/checkpoint/load.h)");
}

int64_t parse_cursor(const Loaded& l, const std::string& text) {
  int64_t cursor = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), cursor);
  TESSERA_CHECK(error == std::errc() && end == text.data() + text.size() && cursor >= 0,
                "checkpoint: {}: \"{}\" is no position in the data", l.folder, text);
  return cursor;
}

}  // namespace

std::vector<Piece> TrainingState::replicas() const {
  std::vector<Piece> out;
  if (model)
    for (const NamedTensor& t : model->state())
      out.push_back(piece_of("model." + t.name, t.tensor));
  if (scaler)
    for (const NamedTensor& t : scaler->named_state())
      out.push_back(whole("scaler." + t.name, t.tensor));
  if (optimizer)
    for (const NamedTensor& t : optimizer->named_state())
      out.push_back(piece_of("optimizer." + t.name, t.tensor));
  return out;
}

State TrainingState::state() const {
  State s;
  s.pieces = replicas();
  s.pieces.push_back(whole(kGenerator, (generator ? *generator : default_generator()).state()));
  for (const NamedTensor& t : tensors) {
    TESSERA_CHECK(part_of(t.name).prefix[0] == 0,
                  "checkpoint: the name \"{}\" of a tensor is that of a part of the state; choose "
                  "another",
                  t.name);
    s.pieces.push_back(piece_of(t.name, t.tensor));
  }
  s.extra = extra;
  TESSERA_CHECK(!s.extra.contains(kCursor),
                "checkpoint: extra has \"{}\", which is what the loader's position is called; "
                "choose another name",
                kCursor);
  if (loader) s.extra[kCursor] = std::to_string(loader->cursor());
  return s;
}

void TrainingState::save(Checkpointer& saver, int64_t step) const { saver.save(step, state()); }

Loaded TrainingState::load(const std::string& path, ProcessGroup* group,
                           const LoadOptions& options) const {
  LoadOptions o = options;
  o.strict = false;
  Loaded l = checkpoint::load(path, state().pieces, group, o);
  if (const bool has = l.extra.contains(kCursor); matches(options.only, kCursor)) {
    if (loader && !has) l.missing.push_back(kCursor);
    if (!loader && has) l.unexpected.push_back(kCursor);
    if (options.strict) check_fits(l);
    if (loader && has) loader->seek(parse_cursor(l, l.extra.at(kCursor)));
  } else if (options.strict) {
    check_fits(l);
  }
  // The state was filled in place; this lets the optimizer check the values.
  if (optimizer) optimizer->load_state(optimizer->named_state());
  return l;
}

std::optional<Loaded> TrainingState::resume(const std::string& folder, ProcessGroup* group,
                                            const LoadOptions& options) const {
  std::optional<Newest> found = newest(folder, group ? *group : world());
  if (!found) return std::nullopt;
  Loaded l = load(found->folder, group, options);
  l.warning = found->warning;
  return l;
}

}  // namespace tessera::checkpoint
