// What a checkpoint consists of. A rank describes what it holds as boxes of global tensors; a
// checkpoint knows nothing else of meshes and strategies. Invariant: the distinct boxes of a tensor
// partition it, which is checked before anything is written and again when a manifest is read.
// Internal: not part of the public interface.
#pragma once
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/tensor/named_tensor.h"

namespace tessera::checkpoint {

/// A part of a tensor: `shape` elements in each dim, from `begin` (included) on.
struct Box {
  Dims begin;
  Shape shape;
  bool operator==(const Box&) const = default;
};

/// A box of one global tensor, held by this rank. If several ranks hold the same box (replicas),
/// one of them writes it.
struct Piece {
  std::string name;  // "model.h.0.attn.weight", "optimizer.exp_avg.h.0.attn.weight"
  Shape global;      // of the whole tensor
  Dims begin;        // first index of the box; its extent is values.shape(), which may be empty
  Tensor values;     // on the CPU; load() fills them in place

  Box box() const { return {begin, values.shape()}; }
};

/// Makes a piece of a whole tensor.
Piece whole(std::string name, Tensor values);

/// Small texts that are saved with the tensors: step, data cursor, options.
using Extra = std::map<std::string, std::string>;

struct State {
  std::vector<Piece> pieces;
  Extra extra;
};

/// "[0:4, 2:8]".
std::string to_string(const Box& box);
/// Returns the common part of two boxes; nothing when it is empty.
std::optional<Box> intersect(const Box& a, const Box& b);
/// True when `box` has the dims of `whole` and lies inside.
bool inside(const Box& box, const Shape& whole);
/// Returns why `boxes` (not empty, inside `whole`) are not a partition of `whole`: the first gap or
/// overlap found, with its range. Returns nothing when they are one.
std::optional<std::string> partition_error(const Shape& whole, std::vector<Box> boxes);

/// True when `text` matches `pattern`, in which `*` stands for any text.
bool matches(std::string_view pattern, std::string_view text);

}  // namespace tessera::checkpoint
