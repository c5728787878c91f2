// Checks whether what was saved fits this run. Invariant: what would load into a model that
// computes something else, or whose ids and classes mean something else, is an error that names
// both values and what to do.
#pragma once
#include <string>

#include "examples/train/options.h"
#include "examples/train/task.h"

namespace tessera::train {

/// Returns the xxh128 of all pieces of a vocabulary in the order of their ids.
std::string vocabulary_hash(const data::Tokenizer& tokenizer);

/// Throws UserError where the vocabulary or the classes in `saved` (the metadata of `where`) are
/// known and differ from those of `mine`.
void check_meaning(const Options& o, const io::Metadata& saved, const io::Metadata& mine,
                   const std::string& where);

/// Checks model, vocabulary and classes of --weights.
void check_weights(const Options& o, const Task& task);
/// Throws UserError where a file's tensors do not have the hash that the file states.
void check_intact(const std::string& weights);

/// For --resume: checks model, its options (except dropout), vocabulary, classes and optimizer.
/// `saved`: the texts that the step in `folder` has beside its tensors.
void check_resumes(const Options& o, const Task& task, const io::Metadata& saved,
                   const std::string& folder);

}  // namespace tessera::train
