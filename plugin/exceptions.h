// No exception may leave the plugin. The only expected exception is std::bad_alloc.
#pragma once

#include <new>

#include "base/log.h"
#include "nccl/types.h"

namespace verbatim::abi {

// `name`: of the function in NCCL's table.
template <typename Call>
nccl::Result catch_exceptions(const char* name, Call&& call) noexcept {
  try {
    return call();
  } catch (const std::bad_alloc&) {
    VERBATIM_WARN("%s failed: out of memory", name);
    return nccl::Result::kSystemError;
  } catch (...) {
    VERBATIM_WARN("%s failed: unexpected C++ exception", name);
    return nccl::Result::kInternalError;
  }
}

}  // namespace verbatim::abi
