#include "examples/train/agreement.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>
#include <vector>

#include "core/base/env.h"
#include "core/base/isa.h"
#include "core/base/spelling.h"
#include "core/base/version.h"
#include "examples/train/option_table.h"
#include "parallel/checkpoint/exchange.h"
#include "parallel/checkpoint/replicas.h"

namespace tessera::train {
namespace {

// Something that must be equal on all ranks: its name in errors, and its value.
using Fact = std::pair<std::string, std::string>;
using Facts = std::vector<Fact>;

// Returns the kind of text:PATH or wordpiece:PATH, without the path.
std::string kind_of(const std::string& text) { return text.substr(0, text.find(':')); }

Facts facts_of(const Options& o) {
  Facts facts = {{"the instruction set of kernels (TESSERA_ISA chooses it)",
                  std::string(cpu::isa_name(cpu::current_isa()))},
                 {"the version of the program", std::string(version())},
                 {"the compiler of the program", compiler_text()},
                 {"the build of the program (--version)", build_id()},
                 {"TESSERA_COMPILE_SKIP", env::get("TESSERA_COMPILE_SKIP", "''")}};
  for (const OptionRow& row : option_table()) {
    const std::string name = fmt::format("--{}", row.flag), value = row.text(o);
    switch (row.role) {
      case Role::kNumbers:
      case Role::kTogether: facts.emplace_back(name, value.empty() ? "''" : value); break;
      case Role::kGiven: facts.emplace_back(name, value.empty() ? "none" : "one"); break;
      case Role::kData:  // compared below, and once it is read
      case Role::kStart:
      case Role::kOwn: break;
    }
  }
  const bool named = o.tokenizer == "char" || o.tokenizer == "byte";
  facts.emplace_back("the kind of --data", o.data.empty() ? "synthetic" : kind_of(o.data));
  facts.emplace_back("--tokenizer", named ? o.tokenizer : "a file");
  facts.emplace_back("--weights", o.weights.empty() ? "none" : "some");
  return facts;
}

Facts facts_of(const Task& task) {
  Facts facts = {{"the data", task.data.size.empty() ? "none" : to_string(task.data)},
                 {"the weights", task.weights_hash.empty() ? "none" : task.weights_hash}};
  // Paths of the tokenizer may differ, as those of data may; other texts may be long.
  for (const auto& [key, value] : task.metadata)
    if (key != "tokenizer") facts.emplace_back(fmt::format("the model's {}", key), value);
  return facts;
}

std::string packed(const Facts& facts) {
  checkpoint::Packer packer;
  for (const auto& [name, value] : facts) packer.put(name), packer.put(value);
  return packer.take();
}

Facts unpacked(const std::string& text) {
  Facts facts;
  for (checkpoint::Unpacker u(text); !u.done();) {
    std::string name = u.get_text();
    facts.emplace_back(std::move(name), u.get_text());
  }
  return facts;
}

std::optional<std::string> value_of(const Facts& facts, const std::string& name) {
  for (const Fact& f : facts)
    if (f.first == name) return f.second;
  return std::nullopt;
}

// Throws on all ranks where one has another value than rank 0, or a fact that rank 0 lacks.
void compare(ProcessGroup& group, const Facts& mine, const char* remedy) {
  std::vector<Facts> all;
  for (const std::string& text : checkpoint::Exchange(&group, {}).all_gather(packed(mine)))
    all.push_back(unpacked(text));
  std::vector<std::string> differ;
  for (const Facts& facts : all)
    for (const Fact& f : facts)
      if (value_of(all[0], f.first) != f.second && std::ranges::count(differ, f.first) == 0)
        differ.push_back(f.first);
  for (const Fact& f : all[0])
    for (const Facts& facts : all)
      if (!value_of(facts, f.first) && std::ranges::count(differ, f.first) == 0)
        differ.push_back(f.first);
  if (differ.empty()) return;
  std::vector<std::optional<std::string>> said;
  for (const Facts& facts : all)
    said.push_back(io::quote(value_of(facts, differ[0]).value_or("none")));
  for (auto& text : said) *text = text->substr(1, text->size() - 2);
  std::string others;
  for (size_t i = 1; i < differ.size(); ++i) others += (i > 1 ? ", " : "; and on ") + differ[i];
  throw RanksDisagree(fmt::format("train: ranks disagree on {}: {}{}; {}", differ[0],
                                  checkpoint::who_has_what(said), others, remedy));
}

}  // namespace

// Adds the duration of its scope to the total.
class Agreement::Timed {
 public:
  // Waiting is not counted.
  explicit Timed(Agreement& a) : seconds_((a.group_->barrier(), a.seconds_)) {}
  ~Timed() { seconds_ += std::chrono::duration<double>(Clock::now() - start_).count(); }

 private:
  using Clock = std::chrono::steady_clock;
  double& seconds_;
  Clock::time_point start_ = Clock::now();
};

Agreement::Agreement(const Options& options, Ref<ProcessGroup> group)
    : o_(options), group_(std::move(group)) {
  if (group_->size() == 1) return;
  Timed timed(*this);
  compare(*group_, facts_of(o_), "give all ranks the same program and options");
}

Task Agreement::on(Task task) {
  if (group_->size() == 1) return task;
  Timed timed(*this);
  compare(*group_, facts_of(task), "give all ranks the same files");
  return task;
}

void Agreement::on_replicas(std::span<const checkpoint::Piece> pieces, int64_t done) {
  if (group_->size() == 1 || compared_ == done) return;
  Timed timed(*this);
  const checkpoint::ReplicasCompared compared = checkpoint::compare_replicas(pieces, *group_);
  if (compared.difference)
    throw RanksDisagree(fmt::format(
        "train: after {} the ranks hold other values of what they should hold alike, {}. Nothing "
        "is saved; {}",
        counted(done, "step"), *compared.difference,
        times_ == 0 ? "they began with them: give all ranks the same --weights, the same saved "
                      "steps in --checkpoint and the same program"
                    : "a core or memory computes wrongly, or a program changed parameters on some "
                      "ranks only: run again from the last saved step, on other hosts if it comes "
                      "back"));
  compared_ = done;
  ++times_;
  bytes_ = compared.bytes;
}

std::string Agreement::story() const {
  if (group_->size() == 1) return {};
  return fmt::format(
      "ranks agreed on options and data, and on what they hold alike ({:.1f} MB each, compared {}) "
      "in {:.2f} ms",
      double(bytes_) / 1e6, counted(times_, "time"), seconds_ * 1e3);
}

}  // namespace tessera::train
