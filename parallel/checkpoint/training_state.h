// All that a training run needs to go on as if nothing had happened, saved and restored by one
// call. Invariant: what was saved and is not asked for, or asked for and was not saved, is an error
// that names it; so nothing is left out unnoticed, the state of the random generator included.
//
//   checkpoint::TrainingState training{.model = model.get(), .optimizer = &opt, .loader = &loader};
//   int64_t step = 0;
//   if (auto from = training.resume("runs/a")) step = from->step;
//   while (step < steps) {
//     ...                                  // opt.set_lr(schedule(step)): a schedule is its step
//     if (++step % 500 == 0) training.save(saver, step);
//   }
#pragma once
#include <optional>

#include "core/data/loader.h"
#include "core/nn/module.h"
#include "core/optim/grad_scaler.h"
#include "core/optim/optimizer.h"
#include "core/tensor/random.h"
#include "parallel/checkpoint/checkpointer.h"
#include "parallel/checkpoint/load.h"

namespace tessera::checkpoint {

/// Parts of a run, as this rank holds them; null: the run has none. Each is to live as long as this
/// is used.
struct TrainingState {
  nn::Module* model = nullptr;  // parameters and persistent buffers: "model.<name>"
  optim::Optimizer* optimizer = nullptr;
  optim::GradScaler* scaler = nullptr;
  data::DataLoader* loader = nullptr;     // its cursor
  Generator* generator = nullptr;         // null: default_generator(). The same on every rank
  std::vector<NamedTensor> tensors = {};  // of the program, under their names
  Extra extra = {};                       // texts of the program

  /// Model, optimizer and scaler: what replicas hold alike.
  std::vector<Piece> replicas() const;
  /// All of it. Throws UserError where `tensors` or `extra` have a name that a part has.
  State state() const;
  /// Begins to save all of it as step `step`, as Checkpointer::save; all ranks call it.
  void save(Checkpointer& saver, int64_t step) const;
  /// Restores all of it in place from `path`, a folder of steps (the newest is taken) or one
  /// step's; all ranks of `group` (null: the world) call it. Throws UserError, on all ranks, that
  /// names what the save lacks and what it has besides: values are unspecified then; with
  /// `options.strict` off both are returned, "data.cursor" among them.
  Loaded load(const std::string& path, ProcessGroup* group = nullptr,
              const LoadOptions& options = {}) const;
  /// The same, or nothing where no step is saved in `folder`.
  std::optional<Loaded> resume(const std::string& folder, ProcessGroup* group = nullptr,
                               const LoadOptions& options = {}) const;
};

}  // namespace tessera::checkpoint
