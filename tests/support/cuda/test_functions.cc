// What tests ask and set; see standin_cuda.h.
#include "support/cuda/driver.h"
#include "support/cuda/standin_cuda.h"
#include "support/cuda/streams.h"

using standin::driver;
using standin::Lock;

STANDIN_EXPORT void standin_cuda_begin_kernel(int device) {
  const Lock lock(driver().mutex);
  ++driver().devices.at(static_cast<std::size_t>(device)).kernels;
}

STANDIN_EXPORT void standin_cuda_end_kernel(int device) {
  const Lock lock(driver().mutex);
  --driver().devices.at(static_cast<std::size_t>(device)).kernels;
  driver().changed.notify_all();
}

STANDIN_EXPORT unsigned long long standin_cuda_waits() {
  const Lock lock(driver().mutex);
  return driver().waits;
}

STANDIN_EXPORT unsigned long long standin_cuda_copies() {
  const Lock lock(driver().mutex);
  return driver().copies;
}

STANDIN_EXPORT unsigned long long standin_cuda_pageable_copies() {
  const Lock lock(driver().mutex);
  return driver().pageable_copies;
}

STANDIN_EXPORT unsigned long long standin_cuda_copy_streams() {
  const Lock lock(driver().mutex);
  unsigned long long count = 0;
  for (const auto& [handle, stream] : driver().streams) count += stream->has_copied ? 1U : 0U;
  return count;
}

STANDIN_EXPORT void standin_cuda_fail_copy(unsigned n, CUresult error) {
  const Lock lock(driver().mutex);
  driver().fail_after = n;
  driver().fail_with = error;
}

STANDIN_EXPORT void standin_cuda_kill_context(int device) {
  const Lock lock(driver().mutex);
  driver().destroy_primary_context(device);
}

STANDIN_EXPORT void standin_cuda_set_delay_us(unsigned mean) {
  const Lock lock(driver().mutex);
  driver().delay_us = mean;
}
