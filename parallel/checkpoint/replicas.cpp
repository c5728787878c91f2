#include "parallel/checkpoint/replicas.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <unordered_map>
#include <vector>

#include "core/autograd/autograd.h"
#include "core/base/boundary.h"
#include "core/io/hash.h"
#include "core/ops/bits_hash.h"
#include "core/ops/views.h"
#include "parallel/checkpoint/exchange.h"

namespace tessera::checkpoint {
namespace {

using io::Digest;

// What a rank says of a piece that it holds.
struct Held {
  Digest which;  // hash of name, dtype and box
  uint64_t on_card;
};
// The description of a piece that ranks compare.
struct Entry {
  Digest which;
  Digest bits;
};

// A piece that another rank holds too. `on_card`: one of these ranks holds it there.
struct Shared {
  const Piece* piece;
  bool on_card;
};

bool is_on_card(const Piece& p) {
  return p.values.defined() && !p.values.device().is_cpu() && !p.values.device().is_meta();
}

Digest which(const Piece& p) {
  Packer packer;
  packer.put(p.name);
  packer.put(p.values.dtype());
  for (int64_t extent : p.begin) packer.put(extent);
  for (int64_t extent : p.values.shape()) packer.put(extent);
  const std::string text = packer.take();
  return io::xxh128(text.data(), text.size());
}

// Hashes the bits of each piece where it is. Those of one card come to the host together.
std::vector<Digest> hashes_by_bits(std::span<const Piece* const> pieces) {
  const NoGrad off;
  std::map<int, Tensors> hashes;  // by card
  std::map<int, std::vector<size_t>> places;
  for (size_t i = 0; i < pieces.size(); ++i) {
    const Device device = pieces[i]->values.device();
    const int on = int(device.kind) << 8 | uint8_t(device.index);
    hashes[on].push_back(bits_hash(pieces[i]->values.detach()));
    places[on].push_back(i);
  }
  std::vector<Digest> out(pieces.size());
  for (const auto& [on, list] : hashes) {
    const Tensor all = cat(list, 0).cpu();
    const auto* words = all.values<int64_t>();
    for (size_t k = 0; k < list.size(); ++k)
      out[places[on][k]] = {uint64_t(words[2 * k]), uint64_t(words[2 * k + 1])};
  }
  return out;
}

// Hashes the hashes of each piece's blocks; threads share the blocks.
std::vector<Digest> hashes_on_host(std::span<const Piece* const> pieces) {
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

std::vector<Digest> hashes_of(std::span<const Shared> pieces) {
  std::vector<const Piece*> by_way[2];
  for (const Shared& s : pieces) by_way[s.on_card].push_back(s.piece);
  const std::vector<Digest> hashes[] = {hashes_on_host(by_way[0]), hashes_by_bits(by_way[1])};
  std::vector<Digest> out;
  size_t next[2] = {0, 0};
  for (const Shared& s : pieces) out.push_back(hashes[s.on_card][next[s.on_card]++]);
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
std::vector<Shared> shared(std::span<const Piece> pieces, Exchange& exchange) {
  std::vector<Held> mine;
  for (const Piece& p : pieces) mine.push_back({which(p), is_on_card(p)});
  struct Holders {
    int count = 0;
    bool on_card = false;
  };
  std::unordered_map<Digest, Holders, HashOf> holders;
  for (const auto& held : all_gather(exchange, mine))
    for (const Held& h : held) {
      Holders& all = holders[h.which];
      ++all.count, all.on_card |= h.on_card != 0;
    }
  std::vector<Shared> out;
  for (size_t i = 0; i < pieces.size(); ++i)
    if (const Holders& all = holders[mine[i].which]; all.count > 1)
      out.push_back({&pieces[i], all.on_card});
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
  const std::vector<Shared> pieces = shared(all_pieces, exchange);
  const std::vector<Digest> hashes = hashes_of(pieces);
  std::vector<Entry> mine;
  for (size_t i = 0; i < pieces.size(); ++i) {
    mine.push_back({which(*pieces[i].piece), hashes[i]});
    result.bytes += pieces[i].piece->values.nbytes();
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
  std::string named;  // by the rank that names it: the hash and the piece
  if (size_t(group.rank()) == rank) {
    const auto& [p, on_card] = pieces[index];
    named = fmt::format("{} {}{}", on_card ? "bits_hash" : "xxh128", p->name,
                        p->values.shape() == p->global ? "" : " " + to_string(p->box()));
  }
  named = exchange.all_gather(named)[rank];
  const std::string hash = named.substr(0, named.find(' '));
  std::vector<std::optional<std::string>> said(all.size());
  for (size_t r = 0; r < all.size(); ++r)
    for (const Entry& e : all[r])
      if (e.which == piece) said[r] = hash + " " + io::to_string(e.bits);
  result.difference =
      fmt::format("{}: {}{}", named.substr(hash.size() + 1), who_has_what(said),
                  differs.size() > 1 ? fmt::format("; {} more differ", differs.size() - 1) : "");
  return result;
}

}  // namespace tessera::checkpoint
