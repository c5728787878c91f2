// Saves and restores by one call everything that a training run needs to continue as if it had not
// been interrupted. Invariant: what was saved and is not asked for, or asked for and was not saved,
// is an error that names it; so nothing is left out unnoticed, and the state of the random
// generator is included.
//
//   checkpoint::TrainingState training{.model = model.get(), .optimizer = &opt, .loader = &loader};
//   int64_t step = 0;
//   if (auto from = training.resume("runs/a")) step = from->step;
//   while (step < steps) {
//     ...                                  // opt.set_lr(schedule(step)): a schedule has no state
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

/// The parts of a run, as this rank holds them; null: the run has no such part. Each must outlive
/// this object.
struct TrainingState {
  nn::Module* model = nullptr;  // parameters and persistent buffers: "model.<name>"
  optim::Optimizer* optimizer = nullptr;
  optim::GradScaler* scaler = nullptr;
  data::DataLoader* loader = nullptr;     // its cursor
  Generator* generator = nullptr;         // equal on every rank; null: default_generator()
  std::vector<NamedTensor> tensors = {};  // the program's own, under their names
  Extra extra = {};                       // the program's own texts

  /// Returns model, optimizer and scaler, which are equal on replicas.
  std::vector<Piece> replicas() const;
  /// Returns the whole state. Throws UserError where `tensors` or `extra` use a name that a part
  /// has.
  State state() const;
  /// Begins to save the whole state as step `step`, by Checkpointer::save; all ranks must call it.
  void save(Checkpointer& saver, int64_t step) const;
  /// Restores the whole state in place from `path`, a folder of steps (the newest is taken) or that
  /// of one step; all ranks of `group` (null: the world) must call it. Throws UserError, on all
  /// ranks, that names what the save lacks and what it has besides; values are then unspecified.
  /// With `options.strict` off both lists are returned, "data.cursor" among them.
  Loaded load(const std::string& path, ProcessGroup* group = nullptr,
              const LoadOptions& options = {}) const;
  /// Does the same; returns nothing where no step is saved in `folder`.
  std::optional<Loaded> resume(const std::string& folder, ProcessGroup* group = nullptr,
                               const LoadOptions& options = {}) const;
};

}  // namespace tessera::checkpoint
