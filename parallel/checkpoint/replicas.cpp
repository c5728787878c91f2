#include "parallel/checkpoint/replicas.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <unordered_map>
#include <vector>

#include "core/base/boundary.h"
#include "core/io/hash.h"
#include "parallel/checkpoint/exchange.h"

namespace tessera::checkpoint {
namespace {

using io::Digest;

// The description of a piece that ranks exchange.
struct Entry {
  Digest which;  // hash of name, dtype and box
  Digest bits;
};

Digest which(const Piece& p) {
  Packer packer;
  packer.put(p.name);
  packer.put(p.values.dtype());
  for (int64_t extent : p.begin) packer.put(extent);
  for (int64_t extent : p.values.shape()) packer.put(extent);
  const std::string text = packer.take();
  return io::xxh128(text.data(), text.size());
}

// Hashes the hashes of each piece's blocks; threads share the blocks.
std::vector<Digest> hashes_of(std::span<const Piece* const> pieces) {
  constexpr uint64_t kBlock = 1 << 20;
  struct Block {
    const std::byte* data;
    uint64_t bytes;
  };
  std::vector<Tensor> dense;
  std::vector<Block> blocks;
  std::vector<size_t> ends;  // by piece: the end of its blocks in `blocks`
  for (const Piece* p : pieces) {
    dense.push_back(io::dense_values(p->values, "checkpoint", p->name));
    const auto* data = static_cast<const std::byte*>(dense.back().raw_values());
    for (uint64_t at = 0, end = dense.back().nbytes(); at < end; at += kBlock)
      blocks.push_back({data + at, std::min(kBlock, end - at)});
    ends.push_back(blocks.size());
  }
  std::vector<Digest> bits(blocks.size());
  parallel_for("replicas.threads", int64_t(blocks.size()), 4, [&](int64_t begin, int64_t end) {
    for (auto i = size_t(begin); i < size_t(end); ++i)
      bits[i] = io::xxh128(blocks[i].data, blocks[i].bytes);
  });
  std::vector<Digest> out;
  for (size_t i = 0; i < pieces.size(); ++i) {
    const size_t begin = i ? ends[i - 1] : 0;
    out.push_back(io::xxh128(bits.data() + begin, (ends[i] - begin) * sizeof(Digest)));
  }
  return out;
}

// Returns the values of all ranks.
template <class T>
std::vector<std::vector<T>> all_gather(Exchange& exchange, const std::vector<T>& mine) {
  std::vector<std::vector<T>> all;
  const auto* bytes = reinterpret_cast<const char*>(mine.data());
  for (const std::string& t : exchange.all_gather({bytes, mine.size() * sizeof(T)})) {
    all.emplace_back(t.size() / sizeof(T));
    std::memcpy(all.back().data(), t.data(), t.size());
  }
  return all;
}

struct HashOf {
  size_t operator()(const Digest& d) const { return size_t(d.low); }
};

// Returns those of `pieces` that another rank holds too.
std::vector<const Piece*> shared(std::span<const Piece> pieces, Exchange& exchange) {
  std::vector<Digest> mine;
  for (const Piece& p : pieces) mine.push_back(which(p));
  std::unordered_map<Digest, int, HashOf> holders;
  for (const auto& held : all_gather(exchange, mine))
    for (const Digest& d : held) ++holders[d];
  std::vector<const Piece*> out;
  for (size_t i = 0; i < pieces.size(); ++i)
    if (holders[mine[i]] > 1) out.push_back(&pieces[i]);
  return out;
}

}  // namespace

std::string who_has_what(std::span<const std::optional<std::string>> said) {
  std::vector<std::pair<std::string, std::vector<size_t>>> groups;
  for (size_t r = 0; r < said.size(); ++r) {
    if (!said[r]) continue;
    auto at = std::ranges::find(groups, *said[r], &decltype(groups)::value_type::first);
    if (at == groups.end()) at = groups.insert(at, {*said[r], {}});
    at->second.push_back(r);
  }
  std::string out;
  for (const auto& [text, ranks] : groups)
    out +=
        fmt::format("{}{} {} {} {}", out.empty() ? "" : ", ", ranks.size() > 1 ? "ranks" : "rank",
                    fmt::join(ranks, ", "), ranks.size() > 1 ? "have" : "has", text);
  return out;
}

ReplicasCompared compare_replicas(std::span<const Piece> all_pieces, ProcessGroup& group) {
  if (group.size() == 1) return {};
  Exchange exchange(&group, {});
  ReplicasCompared result;
  const std::vector<const Piece*> pieces = shared(all_pieces, exchange);
  const std::vector<Digest> hashes = hashes_of(pieces);
  std::vector<Entry> mine;
  for (size_t i = 0; i < pieces.size(); ++i) {
    mine.push_back({which(*pieces[i]), hashes[i]});
    result.bytes += pieces[i]->values.nbytes();
  }
  const std::vector<std::vector<Entry>> all = all_gather(exchange, mine);

  std::unordered_map<Digest, Digest, HashOf> first;
  std::unordered_map<Digest, bool, HashOf> differs;
  for (const auto& entries : all)
    for (const Entry& e : entries)
      if (auto [at, fresh] = first.emplace(e.which, e.bits); !fresh && !(at->second == e.bits))
        differs[e.which] = true;
  if (differs.empty()) return result;

  auto differing = [&](const Entry& e) { return differs.contains(e.which); };
  size_t rank = 0;  // the lowest rank that holds one, and the first piece that it holds
  while (std::ranges::none_of(all[rank], differing)) ++rank;
  const size_t index = size_t(std::ranges::find_if(all[rank], differing) - all[rank].begin());
  const Digest piece = all[rank][index].which;
  const bool told_here = size_t(group.rank()) == rank;
  const std::vector<std::string> names = exchange.all_gather(
      told_here ? pieces[index]->values.shape() == pieces[index]->global
                      ? pieces[index]->name
                      : pieces[index]->name + " " + to_string(pieces[index]->box())
                : "");
  std::vector<std::optional<std::string>> said(all.size());
  for (size_t r = 0; r < all.size(); ++r)
    for (const Entry& e : all[r])
      if (e.which == piece) said[r] = "xxh128 " + io::to_string(e.bits);
  result.difference =
      fmt::format("{}: {}{}", names[rank], who_has_what(said),
                  differs.size() > 1 ? fmt::format("; {} more differ", differs.size() - 1) : "");
  return result;
}

}  // namespace tessera::checkpoint
