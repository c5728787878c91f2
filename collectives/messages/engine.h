// Collectives over messages between pairs of ranks: our plans and our reduction order on top of a
// Carrier. Carriers' own collectives are not used: they lack verbs and uneven forms, or add up in
// an order that depends on sizes. Invariant: no message of a collective is sent before all ranks'
// call records have been compared.
#pragma once
#include <memory>
#include <string>

#include "collectives/messages/carrier.h"

namespace tessera::detail {

/// `store` and `prefix` are where ranks tell each other what they wait for.
std::unique_ptr<Engine> make_message_engine(const Membership& members,
                                            std::unique_ptr<Carrier> carrier,
                                            std::shared_ptr<Store> store, std::string prefix);

}  // namespace tessera::detail
