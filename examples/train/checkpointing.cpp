#include "examples/train/checkpointing.h"

#include <fmt/ranges.h>

#include <filesystem>

#include "core/data/utf8.h"
#include "examples/train/fit.h"
#include "examples/train/option_table.h"
#include "parallel/checkpoint/folder.h"
#include "parallel/checkpoint/load.h"
#include "parallel/checkpoint/overwrite.h"

namespace tessera::train {
namespace {

// The options that affect the numbers of a run, as texts.
checkpoint::Extra options_of(const Options& o) {
  checkpoint::Extra out;
  for (const OptionRow& row : option_table())
    if (row.kept()) out[fmt::format("train.{}", row.flag)] = data::escape_bytes(row.text(o));
  return out;
}

constexpr const char *kDataSize = "data.size", *kDataHash = "data.xxh128";

// Throws if the folder is a saved step: no run would find what is saved there, and the step would
// be damaged.
void check_folder(const std::string& folder) {
  namespace fs = std::filesystem;
  fs::path path = fs::absolute(folder).lexically_normal();
  if (!path.has_filename()) path = path.parent_path();
  const std::string name = path.filename().string(), parent = path.parent_path().string();
  const int64_t step = name.starts_with("step-") ? std::atoll(name.c_str() + 5) : -1;
  std::error_code error;
  if (!fs::exists(path / checkpoint::kManifestName, error) &&
      (step < 0 || name != checkpoint::step_name(step)))
    return;
  std::vector<std::string> newer;
  for (int64_t s : checkpoint::saved_steps(parent))
    if (step >= 0 && s > step) newer.push_back(checkpoint::step_name(s));
  throw UserError(fmt::format(
      "train: --checkpoint {}: that is one saved step; give the folder that it is in, {}{}", folder,
      parent,
      newer.empty() ? ""
                    : fmt::format("; to go on from this step, remove the newer ones there first: "
                                  "{}",
                                  fmt::join(newer, ", "))));
}

// Throws for names that the save has and this run lacks, or the reverse.
void check_names(const checkpoint::Loaded& l, const std::string& other_options) {
  if (l.missing.empty() && l.unexpected.empty()) return;
  auto few = [](const std::vector<std::string>& names) {
    return names.size() > 3 ? fmt::format("{} and {} more", names[0], names.size() - 1)
                            : fmt::format("{}", fmt::join(names, ", "));
  };
  std::string text = fmt::format("train: --resume: {} does not fit this run", l.folder);
  if (!l.missing.empty()) text += "; it lacks " + few(l.missing);
  if (!l.unexpected.empty()) text += "; this run has no " + few(l.unexpected);
  if (!other_options.empty()) text += "; not as it was saved: " + other_options;
  throw UserError(text + "; give the flags that it was saved with, or another --checkpoint folder");
}

void check_trained(const checkpoint::Loaded& l) {
  TESSERA_CHECK(l.extra.contains("data.cursor"),
                "train: {} was not saved by a training run: it has no data.cursor; load weights "
                "with --weights",
                l.folder);
}

}  // namespace

Checkpointing::Checkpointing(const Options& o, const Task& task, ProcessGroup& group,
                             optim::Optimizer& optimizer, optim::GradScaler& scaler,
                             data::DataLoader& loader, Agreement& agreement)
    : o_(o),
      task_(task),
      group_(group),
      optimizer_(optimizer),
      scaler_(scaler),
      loader_(loader),
      agreement_(agreement) {
  if (o.checkpoint.empty()) return;
  check_folder(o.checkpoint);
  checkpoint::check_may_save(o.checkpoint, "train: --checkpoint");
  saver_ = std::make_unique<checkpoint::Checkpointer>(o.checkpoint, &group,
                                                      checkpoint::SaveOptions{.keep = int(o.keep)});
  if (o.steps == 0) return;
  const checkpoint::State first = training().state();
  checkpoint::check_extra(first.extra);
  saver_->prepare(first.pieces);
}

void Checkpointing::compare_replicas(int64_t done) {
  agreement_.on_replicas(training().replicas(), done);
}

checkpoint::TrainingState Checkpointing::training() const {
  checkpoint::Extra extra = options_of(o_);
  if (!task_.data.hash.empty())
    extra[kDataSize] = task_.data.size, extra[kDataHash] = task_.data.hash;
  for (const auto& [key, value] : task_.metadata) extra["metadata." + key] = value;
  return {.model = task_.model.get(),
          .optimizer = &optimizer_,
          .scaler = &scaler_,
          .loader = &loader_,
          .extra = std::move(extra)};
}

std::string Checkpointing::differing_options(const checkpoint::Extra& saved) const {
  std::string out;
  for (const auto& [key, value] : options_of(o_)) {
    auto at = saved.find(key);
    if (at != saved.end() && at->second != value)
      out += fmt::format("{}--{} {} (was {})", out.empty() ? "" : ", ", key.substr(6),
                         value.empty() ? "''" : value, at->second.empty() ? "''" : at->second);
  }
  const DataFacts were = {find(saved, kDataSize), find(saved, kDataHash)};
  if (!were.hash.empty() && were.hash != task_.data.hash)  // older saves have none
    out += fmt::format("{}the data: {} (were {})", out.empty() ? "" : ", ",
                       task_.data.hash.empty() ? "random values" : to_string(task_.data),
                       to_string(were));
  for (const auto& [key, value] : task_.metadata) {
    auto at = saved.find("metadata." + key);
    if (key.ends_with("dropout") && at != saved.end() && at->second != value)
      out += fmt::format("{}--set {}={} (was {})", out.empty() ? "" : ", ", key.substr(7), value,
                         at->second);
  }
  return out;
}

int64_t Checkpointing::resume() {
  if (!saver_) return 0;
  auto found = checkpoint::newest(o_.checkpoint, group_);
  TESSERA_CHECK(!found || o_.resume,
                "train: {} holds step {} already; give --resume to go on from there, or another "
                "folder",
                o_.checkpoint, found->step);
  if (!found) {
    if (o_.resume) story_ = fmt::format("{} holds no saved step: a fresh start", o_.checkpoint);
    return 0;
  }
  checkpoint::Loaded l = training().load(
      found->folder, &group_, {.strict = false, .accept = [&](const checkpoint::Loaded& saved) {
                                 check_trained(saved);
                                 check_resumes(o_, task_, saved.extra, saved.folder);
                               }});
  check_names(l, differing_options(l.extra));
  story_ = fmt::format("resumed from {}, after step {}", l.folder, l.step);
  if (!o_.weights.empty())
    story_ += fmt::format("\nnote: the weights of --weights {} are not used: the step has its own",
                          o_.weights);
  if (std::string other = differing_options(l.extra); !other.empty())
    story_ += "\nnote: not as it was saved: " + other;
  if (!found->warning.empty()) story_ += "\nwarning: " + found->warning;
  return saved_ = l.step;
}

std::string Checkpointing::after_step(int64_t done) {
  if (!saver_ || o_.save_every == 0 || done % o_.save_every != 0) return {};
  compare_replicas(done);
  std::string warning;
  try {
    saver_->wait();
  } catch (const UserError& e) {
    warning = e.what();
  }
  try {
    training().save(*saver_, done);
    saved_ = done;
  } catch (const UserError& e) {
    warning += (warning.empty() ? "" : "\n") + std::string(e.what());
  }
  return warning;
}

std::string Checkpointing::finish(int64_t done) {
  if (!saver_) return {};
  std::string warning;
  try {
    saver_->wait();
  } catch (const UserError& e) {
    if (saved_ == done) throw;
    warning = e.what();
  }
  if (saved_ == done) return warning;
  compare_replicas(done);
  training().save(*saver_, done);
  saver_->wait();
  return warning;
}

}  // namespace tessera::train
