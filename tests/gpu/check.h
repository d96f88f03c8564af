// Errors of CUDA and NCCL as exceptions: they end the rank, which reports their text to its parent.
#pragma once

#include <nccl.h>

#include <stdexcept>
#include <string>

#include "cuda_check.h"

namespace verbatim::gpu {

inline void check(ncclResult_t result, const char* what) {
  if (result != ncclSuccess) {
    throw std::runtime_error(std::string(what) + ": " + ncclGetErrorString(result) + " (" + ncclGetLastError(nullptr) +
                             ")");
  }
}

}  // namespace verbatim::gpu
