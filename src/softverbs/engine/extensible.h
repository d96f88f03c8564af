// Objects that have a plain and an extended handle.
#pragma once

#include <infiniband/verbs.h>

#include <cstddef>

namespace verbatim::softverbs {

// An object that is returned as Base by a verb and as the longer Extended by the extended verb.
template <typename Base, typename Extended>
struct Extensible : Base {
  alignas(Extended) std::byte rest[sizeof(Extended) - sizeof(Base)] = {};

  Extended& extended() { return *reinterpret_cast<Extended*>(static_cast<Base*>(this)); }
};
static_assert(sizeof(ibv_cq) == offsetof(ibv_cq_ex, comp_mask) && sizeof(ibv_qp) == offsetof(ibv_qp_ex, comp_mask));

}  // namespace verbatim::softverbs
