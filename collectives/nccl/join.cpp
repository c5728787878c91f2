#include "collectives/nccl/join.h"

#include <algorithm>
#include <cstring>

#include "collectives/nccl/core.h"
#include "collectives/nccl/ended.h"
#include "core/backend/cuda/context.h"
#include "core/base/log.h"
#include "core/dispatch/call.h"

namespace tessera::nccl {
namespace {

/// What a rank tells the others.
struct Card {
  int32_t version = 0;  // of NCCL; 0: `why` says why there is none
  char card[64] = {};
  char why[256] = {};
  UniqueId id = {};  // rank 0's is used
};

template <size_t N>
void put(char (&to)[N], const std::string& text) {
  std::strncpy(to, text.c_str(), N - 1);
}

Tensor bytes_of(void* at, size_t bytes) {
  return Tensor(Meta::contiguous({int64_t(bytes)}, kU8, kCPU),
                make_ref<Storage>(at, bytes, kCPU, nullptr));
}

// Why NCCL cannot serve these ranks, and what to do; empty where it can.
std::string why_not_all(const std::vector<Card>& cards) {
  for (size_t r = 0; r < cards.size(); ++r)
    if (!cards[r].version) return fmt::format("rank {}: {}", r, cards[r].why);
  for (size_t r = 0; r < cards.size(); ++r) {
    if (cards[r].version / 100 != cards[0].version / 100)
      return fmt::format("rank 0 has NCCL {} and rank {} has {}; install one version",
                         cuda::library_version_text(cards[0].version), r,
                         cuda::library_version_text(cards[r].version));
    for (size_t q = 0; q < r; ++q)
      if (std::strcmp(cards[r].card, cards[q].card) == 0)
        return fmt::format(
            "ranks {} and {} share card {}; start one rank for each card (tlaunch --nproc gpu)", q,
            r, cards[r].card);
  }
  return "";
}

}  // namespace

Ref<detail::CardGroup> join(ProcessGroup& cpu, Device device, const GroupContext& context) {
  Card mine;
  const Functions* nccl = functions();
  put(mine.card, cuda::properties(device.index).uuid);
  if (!nccl)
    put(mine.why, why_not());
  else if (const Result r =
               cpu.rank() == 0 ? nccl->get_unique_id.result(&mine.id) : Result::kSuccess;
           r != Result::kSuccess)
    put(mine.why, fmt::format("NCCL: {}: {}", nccl->get_unique_id.symbol(), nccl->error_string(r)));
  else
    mine.version = nccl->version;
  std::vector<Card> cards(size_t(cpu.size()));
  cpu.all_gather(bytes_of(cards.data(), cards.size() * sizeof(Card)), bytes_of(&mine, sizeof mine));
  if (const std::string why = why_not_all(cards); !why.empty()) {
    if (cpu.rank() == 0)
      logging::warn("{}: tensors on cuda pass through the host ({}): {}", cpu.name(), cpu.backend(),
                    why);
    return nullptr;
  }
  const detail::Membership members = members_beside(cpu);
  std::optional<CommError> gone;
  std::mutex mutex;
  detail::WaitFacts facts;
  facts.group = members.group, facts.members = members.world_ranks, facts.call = "init";
  facts.kind = detail::WaitFacts::Kind::kJoin;
  PeerWait wait(std::move(facts), context.timeout,
                context.prefix + "cards/" + members.group + "/failure", [&](const CommError& e) {
                  std::lock_guard lock(mutex);
                  gone = e;
                });
  try {
    Communicators communicators;
    {
      const detail::Watchdog::Scope scope(context.watchdog.get(), wait,
                                          detail::Watchdog::Clock::now());
      const Communicator::Pause pause = [&] {
        std::lock_guard lock(mutex);
        if (gone) throw *gone;
      };
      communicators =
          with_messages(std::make_unique<Communicator>(device.index, members.size, cards[0].id,
                                                       members.rank, pause),
                        members.rank, pause);
    }
    if (cpu.rank() == 0)
      logging::info("{}: NCCL {} moves tensors on cuda{}", cpu.name(),
                    cuda::library_version_text(nccl->version),
                    nccl->has_windows ? "" : "; it is too old for windows of memory");
    return Ref<detail::CardGroup>(
        new NcclGroup(members, context, device, std::move(communicators)));
  } catch (const Error& e) {
    const CommError error =
        nccl_failure(fmt::format("{}: rank {}: NCCL: {}", members.group, members.rank, e.what()),
                     members, *context.store, 0, "; NCCL_DEBUG=WARN says more", {members.rank});
    context.watchdog->failed(error);
    throw error;
  } catch (const CommError& e) {
    context.watchdog->failed(e);
    throw;
  }
}

}  // namespace tessera::nccl
