// Whether what was saved belongs to this run. Invariant: what would load into a model that computes
// something else, or into one whose ids and classes mean something else, is an error that names
// both values and the way out.
#pragma once
#include <string>

#include "examples/train/options.h"
#include "examples/train/task.h"

namespace tessera::train {

/// xxh128 of all pieces of a vocabulary in the order of their ids.
std::string vocabulary_hash(const data::Tokenizer& tokenizer);

/// Throws UserError where the vocabulary or the classes of `saved` (metadata of `where`) are known
/// and are not those of `mine`.
void check_meaning(const Options& o, const io::Metadata& saved, const io::Metadata& mine,
                   const std::string& where);

/// --weights: model, vocabulary and classes.
void check_weights(const Options& o, const Task& task);
/// Throws UserError where a file's tensors do not hash to what it says of them.
void check_intact(const std::string& weights);

/// --resume: model, its options (but for dropout), vocabulary, classes, optimizer. `saved`: what
/// the step in `folder` keeps beside its tensors.
void check_resumes(const Options& o, const Task& task, const io::Metadata& saved,
                   const std::string& folder);

}  // namespace tessera::train
