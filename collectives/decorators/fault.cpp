#include "collectives/decorators/fault.h"

#include <signal.h>
#include <unistd.h>

#include <charconv>
#include <thread>

#include "core/base/log.h"

namespace tessera {
namespace {

int64_t parse_number(std::string_view field, std::string_view value, const std::string& text) {
  int64_t v = 0;
  auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), v);
  TESSERA_CHECK(error == std::errc() && end == value.data() + value.size() && v >= 0,
                "TESSERA_FAULT=\"{}\": {}={} is not a number; write e.g. "
                "rank=1,op=all_reduce,n=20,kill",
                text, field, value);
  return v;
}

}  // namespace

Fault parse_fault(const std::string& text) {
  Fault fault;
  bool has_action = false;
  auto act = [&](Fault::Action action) {
    fault.action = action;
    has_action = true;
  };
  for (size_t at = 0; at <= text.size();) {
    size_t end = std::min(text.find(',', at), text.size());
    std::string field = text.substr(at, end - at), value;
    at = end + 1;
    if (size_t eq = field.find('='); eq != std::string::npos) {
      value = field.substr(eq + 1);
      field.resize(eq);
    }
    if (field == "rank")
      fault.rank = int(parse_number(field, value, text));
    else if (field == "n")
      fault.n = parse_number(field, value, text);
    else if (field == "op")
      fault.kind = parse_coll_kind(value);
    else if (field == "kill")
      act(Fault::Action::kKill);
    else if (field == "stop")
      act(Fault::Action::kStop);
    else if (field == "exit")
      act(Fault::Action::kExit);
    else if (field == "throw")
      act(Fault::Action::kThrow);
    else if (field == "mismatch")
      act(Fault::Action::kMismatch);
    else if (field == "delay") {
      fault.delay_ms = parse_number(field, value, text);
      act(Fault::Action::kDelay);
    } else {
      throw UserError(
          fmt::format("TESSERA_FAULT=\"{}\": unknown field \"{}\"; write e.g. "
                      "rank=1,op=all_reduce,n=20,kill",
                      text, field));
    }
  }
  TESSERA_CHECK(has_action,
                "TESSERA_FAULT=\"{}\": no action; add kill, stop, exit, throw, mismatch or "
                "delay=MS",
                text);
  return fault;
}

Ref<Work> FaultGroup::submit_another(const Collective& c) {
  Collective other{.timeout = c.timeout, .async = c.async, .site = c.site};
  if (c.kind != CollKind::kBarrier) return inner_->submit(other);
  Tensor byte = empty({1}, kU8);
  other.kind = CollKind::kBroadcast;
  other.peer = 0;
  (inner_->rank() == 0 ? other.in : other.out) = {&byte, 1};
  return inner_->submit(other);
}

Ref<Work> FaultGroup::submit(const Collective& c) {
  const Fault& f = state_->fault;
  bool counts = inner_->size() > 1 && inner_->global_rank(inner_->rank()) == f.rank &&
                (!f.kind || *f.kind == c.kind);
  if (!counts || ++state_->calls != f.n) return inner_->submit(c);
  logging::warn("fault injected at call {} of {} on rank {}", f.n, name_of(c.kind), f.rank);
  switch (f.action) {
    case Fault::Action::kKill: kill(getpid(), SIGKILL); break;
    case Fault::Action::kStop: kill(getpid(), SIGSTOP); break;
    case Fault::Action::kExit: _exit(3);
    case Fault::Action::kThrow:
      throw UserError(fmt::format("{}: fault injected on rank {}", name_of(c.kind), f.rank));
    case Fault::Action::kDelay: std::this_thread::sleep_for(Millis(f.delay_ms)); break;
    case Fault::Action::kMismatch: return submit_another(c);
  }
  return inner_->submit(c);
}

}  // namespace tessera
